"""Megatron's MLP with its activation fused on a GPU."""

import torch.nn.functional as F
from megatron.core.transformer.mlp import MLP
from torch import Tensor

from nemo_dllm.collections.diffusion.attention.residual import Product, project


class FusedMLP(MLP):
    """Computes SwiGLU in one kernel on a GPU, forward and backward; every other activation is Megatron's."""

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None
    ) -> tuple[Tensor | Product, Tensor | None]:
        """Hidden states [S, B, hidden]; returns the output [S, B, hidden] before its bias, and the bias.

        See :func:`~residual.project` for the form of the output.
        """
        if per_token_scale is not None or not self._is_plain_swiglu():
            return super().forward(hidden_states, per_token_scale)
        gate_and_up, _ = self.linear_fc1(hidden_states)
        return project(self.linear_fc2, _swiglu(gate_and_up), self)

    def _is_plain_swiglu(self) -> bool:
        config = self.config
        return (
            config.gated_linear_unit
            and config.activation_func is F.silu
            and not config.add_bias_linear
            and config.activation_func_clamp_value is None
            and config.glu_linear_offset == 0
        )


def _swiglu(gate_and_up: Tensor) -> Tensor:
    """[..., 2 F] -> [..., F]."""
    if gate_and_up.is_cuda:
        from nemo_dllm.collections.diffusion.kernels.swiglu import swiglu

        return swiglu(gate_and_up)
    gate, up = gate_and_up.chunk(2, dim=-1)
    return F.silu(gate) * up
