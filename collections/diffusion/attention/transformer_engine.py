"""Core attention through Transformer Engine. Importing this file needs Transformer Engine."""

from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from nemo_dllm.collections.diffusion.attention.core import PatternAttention
from nemo_dllm.collections.diffusion.attention.flex import flex
from nemo_dllm.collections.diffusion.attention.masks import Pattern, sees_all_real_tokens


class TEPatternAttention(TEDotProductAttention):
    """Transformer Engine's attention where every token sees every real token; FlexAttention otherwise.

    In evaluation mode torch's kernels take its place: they are as fast, and can be recorded in CUDA graphs, which
    Transformer Engine's state of dropout forbids.
    """

    def __init__(self, *arguments: object, **named: object):
        super().__init__(*arguments, **named)
        self.patterned = PatternAttention(*arguments, **named, patterned=flex)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, pattern: Pattern) -> Tensor:
        """Query [Q, B, H, D], key and value [K, B, G, D] of this rank; returns the context, [Q, B, H * D]."""
        if not sees_all_real_tokens(pattern) or not self.training:
            return self.patterned(query, key, value, pattern)
        if pattern.key_mask_BL is None:
            return super().forward(query, key, value, None, AttnMaskType.no_mask)
        hidden_B11S = ~pattern.key_mask_BL[:, None, None, :]
        return super().forward(query, key, value, hidden_B11S, AttnMaskType.padding)
