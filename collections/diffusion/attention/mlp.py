"""Megatron's MLP with its activation fused on a GPU."""

import torch.nn.functional as F
from megatron.core.transformer.mlp import MLP
from torch import Tensor


class FusedMLP(MLP):
    """Computes SwiGLU in one kernel, forward and backward; every other activation is Megatron's."""

    def forward(self, hidden_states: Tensor, per_token_scale: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Hidden states [S, B, hidden]; returns the output [S, B, hidden] before its bias, and the bias."""
        if per_token_scale is not None or not hidden_states.is_cuda or not self._is_plain_swiglu():
            return super().forward(hidden_states, per_token_scale)
        from nemo_dllm.collections.diffusion.kernels.swiglu import swiglu

        gate_and_up, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(swiglu(gate_and_up))

    def _is_plain_swiglu(self) -> bool:
        config = self.config
        return (
            config.gated_linear_unit
            and config.activation_func is F.silu
            and not config.add_bias_linear
            and config.activation_func_clamp_value is None
            and config.glu_linear_offset == 0
        )
