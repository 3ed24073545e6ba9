"""Layers of experts that hand their router what it must know of each micro-batch."""

from functools import partial

import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor, nn

from nemo_dllm.collections.diffusion.attention.masks import NoisyClean
from nemo_dllm.collections.diffusion.attention.residual import keeps_no_tensor
from nemo_dllm.collections.diffusion.models.balancing import BALANCE_OVER, RoutedTokens, TokenKind, given_to_layer
from nemo_dllm.collections.diffusion.models.router import BalancedRouter


def check_balance_over(balance_over: str) -> None:
    """Check the name of the tokens over which experts are balanced.

    Raises:
        ValueError: for an unknown one.
    """
    if balance_over not in BALANCE_OVER:
        raise ValueError(f"balance_over={balance_over!r} is unknown; choose from {', '.join(BALANCE_OVER)}")


class RoutedMoELayer(MoELayer):
    """Megatron's layer; where its activations are recomputed, so is the routing of the same micro-batch."""

    routed: RoutedTokens | None
    recomputes: bool

    @classmethod
    def adopt(cls, layer: MoELayer, balance_over: str) -> None:
        """Turn a built layer and its router into ours, in place."""
        layer.__class__ = cls
        layer.routed = None
        # Megatron's recomputation would ask for the tokens of whichever micro-batch came last. With fp8, whose scales
        # Transformer Engine must keep, it stays.
        layer.recomputes = layer.moe_layer_recompute and not layer.config.fp8
        layer.moe_layer_recompute &= not layer.recomputes
        if isinstance(layer.router, BalancedRouter):
            layer.router.balance_over = balance_over
        else:
            BalancedRouter.adopt(layer.router, balance_over)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, None]:
        """Hidden states [S, R, hidden]; returns their like, and no bias."""
        forward = partial(self._forward, self.routed)
        if self.recomputes and self.training:
            return tensor_parallel.checkpoint(forward, False, hidden_states)
        return forward(hidden_states)

    def _forward(self, routed: RoutedTokens | None, hidden_states: Tensor) -> tuple[Tensor, None]:
        self.router.routed = routed
        return super().forward(hidden_states)


def moe_layers(model: nn.Module) -> list[RoutedMoELayer]:
    """This rank's layers of experts, in order; ``layer_number`` counts all layers from 1."""
    return [module for module in model.modules() if isinstance(module, RoutedMoELayer)]


def adopt_moe_layers(model: GPTModel, balance_over: str) -> None:
    """Turn the layers of experts of a built model into ours, in place.

    Args:
        model: Megatron's, dense or with experts.
        balance_over: a name of ``BALANCE_OVER``.
    """
    for layer in model.decoder.layers:
        if isinstance(layer.mlp, MoELayer):
            RoutedMoELayer.adopt(layer.mlp, balance_over)
            layer.register_forward_pre_hook(_hand_over, with_kwargs=True)


@keeps_no_tensor
def _hand_over(layer: nn.Module, args: tuple, kwargs: dict) -> None:
    pattern = kwargs.get("attention_bias")
    routed = given_to_layer(pattern)
    config = layer.config
    if (
        routed
        and isinstance(pattern, NoisyClean)
        and config.sequence_parallel
        and layer.layer_number == config.num_layers
    ):
        # Without sequence parallelism this layer does not even get what nobody reads.
        read = routed.kind_RS.size(1) * pattern.output_length // (2 * pattern.length)
        kind_RS = F.pad(routed.kind_RS[:, :read], (0, routed.kind_RS.size(1) - read), value=TokenKind.PAD)
        routed = routed._replace(kind_RS=kind_RS)
    layer.mlp.routed = routed
