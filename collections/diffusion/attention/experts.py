"""Experts computed by torch's grouped matrix products.

One kernel does all experts of a layer. Transformer Engine runs a product for each, which takes up to twice as long with
128 or 256 experts (docs/throughput.md); its own are used for fp8, and where torch's do not fit.

Shape letters: T tokens on this rank, sorted by expert, E experts of this rank, H hidden size, F width of an expert
(twice it where gate and up are stacked).
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd.function import once_differentiable


def can_group(config: TransformerConfig) -> bool:
    """True where :class:`GroupedExperts` computes what Megatron's experts do, on this version of torch."""
    width = config.moe_ffn_hidden_size // (config.expert_tensor_parallel_size or 1)
    return (
        hasattr(F, "grouped_mm")
        and not config.fp8
        # Its rows begin at multiples of 16 bytes.
        and config.hidden_size % 8 == width % 8 == 0
        and config.gated_linear_unit
        and config.activation_func is F.silu
        and not config.add_bias_linear
        and config.activation_func_clamp_value is None
        and config.glu_linear_offset == 0
        and not config.moe_apply_probs_on_input
    )


class _GroupedLinear(torch.autograd.Function):
    """x @ w.T, each token with its expert's weight; keeps the weights as they are, not a stacked copy, for backward.

    With ``in_place`` their gradients are added to Megatron's buffers, ``main_grad``, at once. Autograd would copy each
    of some hundred slices, and Megatron add each to its buffer.
    """

    @staticmethod
    def forward(ctx, x_TH: Tensor, end_E: Tensor, in_place: bool, *weights_FH: Tensor) -> Tensor:
        ctx.save_for_backward(x_TH, end_E, *weights_FH)
        ctx.in_place = in_place
        return F.grouped_mm(x_TH, torch.stack(weights_FH).transpose(1, 2), offs=end_E)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TF: Tensor) -> tuple:
        x_TH, end_E, *weights_FH = ctx.saved_tensors
        grad_TF = grad_TF.contiguous()
        grad_TH = F.grouped_mm(grad_TF, torch.stack(weights_FH), offs=end_E) if ctx.needs_input_grad[0] else None
        grads_FH = (None,) * len(weights_FH)
        if any(ctx.needs_input_grad[3:]):
            grads_EFH = F.grouped_mm(grad_TF.t(), x_TH, offs=end_E)
            in_place = ctx.in_place and all(ctx.needs_input_grad[3:]) and all(map(_has_buffer, weights_FH))
            grads_FH = _add_in_place(grads_EFH, weights_FH) if in_place else grads_EFH.unbind()
        return grad_TH, None, None, *grads_FH


def _has_buffer(weight: Tensor) -> bool:
    buffer = getattr(weight, "main_grad", None)
    return buffer is not None and buffer.dtype == torch.float32


def _add_in_place(grads_EFH: Tensor, weights_FH: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Add gradients to Megatron's buffers; returns what stands for them, as Megatron's own fused layers do."""
    buffers = [weight.main_grad for weight in weights_FH]
    if grads_EFH.is_cuda:
        from nemo_dllm.collections.diffusion.kernels.gradient_sum import add_to_buffers, addresses_of

        add_to_buffers(grads_EFH, addresses_of(buffers))
    else:
        for buffer, gradient in zip(buffers, grads_EFH, strict=True):
            buffer.add_(gradient)
    for weight in weights_FH:
        weight.grad_added_to_main_grad = True
    # Megatron counts gradients by these; nobody reads them.
    return tuple(torch.empty_like(weight) for weight in weights_FH)


class GroupedExperts(SequentialMLP):
    """Megatron's experts one after another, computed together: one grouped product for each of their two layers.

    Parameters, their names and their checkpoints are those of ``SequentialMLP``.
    """

    fuse_wgrad_accumulation = False
    """Gradients of weights are added to Megatron's buffers as they are formed; named as in Transformer Engine."""

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """Returns the weighed outputs, [T, H], and no bias.

        Args:
            permuted_local_hidden_states: [T, H], sorted by expert.
            tokens_per_expert: int64 [E].
            permuted_probs: [T], weight of each output.
        """
        is_double = permuted_local_hidden_states.dtype == torch.float64
        if is_double or len(permuted_local_hidden_states) == 0:
            return super().forward(permuted_local_hidden_states, tokens_per_expert, permuted_probs)
        x_TH = permuted_local_hidden_states
        end_E = tokens_per_expert.to(x_TH.device).cumsum(0).int()
        in_place, experts = self.fuse_wgrad_accumulation, self.local_experts
        gate_up_TF = _GroupedLinear.apply(x_TH, end_E, in_place, *(expert.linear_fc1.weight for expert in experts))
        hidden_TF = self._activate(gate_up_TF, permuted_probs[:, None])
        output_TH = _GroupedLinear.apply(hidden_TF, end_E, in_place, *(expert.linear_fc2.weight for expert in experts))
        return output_TH, None

    def _activate(self, gate_up_TF: Tensor, probs_T1: Tensor) -> Tensor:
        if self.config.bias_activation_fusion:
            return weighted_bias_swiglu_impl(gate_up_TF, None, probs_T1, self.config.activation_func_fp8_input_store)
        gate_TF, up_TF = gate_up_TF.chunk(2, dim=-1)
        hidden_TF = F.silu(gate_TF) * up_TF
        return (hidden_TF * probs_T1).to(hidden_TF.dtype)
