"""Layer norms for Megatron's local layers, without Transformer Engine and apex.

Megatron's own fallback refuses sequence parallelism, because nothing tells the gradient reduction that a weight was
applied to a slice of the sequence only. Here the weights carry that mark.
"""

from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn


def _check_and_mark(norm: nn.Module, config: TransformerConfig) -> None:
    if config.layernorm_zero_centered_gamma:
        raise ValueError(
            "layernorm_zero_centered_gamma=True needs Transformer Engine; install the extra `te` or set it to False"
        )
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel


class LocalRMSNorm(nn.RMSNorm):
    """Root mean square norm with Megatron's constructor."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object):
        super().__init__(hidden_size, eps=eps)
        _check_and_mark(self, config)


class LocalLayerNorm(nn.LayerNorm):
    """Layer norm with Megatron's constructor."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object):
        super().__init__(hidden_size, eps=eps)
        _check_and_mark(self, config)


LOCAL_NORMS = {"RMSNorm": LocalRMSNorm, "LayerNorm": LocalLayerNorm}
