"""SwiGLU of a fused projection, forward and backward, in one pass each.

Shape letters: N rows, F features. The projection is [N, 2, F]: the gate, then what it gates.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 1024


def swiglu(gate_and_up: Tensor) -> Tensor:
    """silu(gate) * up of [..., 2 * F], in fp32 inside: [..., F]."""
    return _SwiGLU.apply(gate_and_up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_and_up):
        gate_and_up = gate_and_up.contiguous()
        features = gate_and_up.size(-1) // 2
        output = gate_and_up.new_empty(*gate_and_up.shape[:-1], features)
        _forward_kernel[_grid(output)](gate_and_up, output, features, BLOCK=_COLUMNS)
        ctx.save_for_backward(gate_and_up)
        return output

    @staticmethod
    def backward(ctx, grad_output):
        (gate_and_up,) = ctx.saved_tensors
        grad_output = grad_output.contiguous()
        grad = torch.empty_like(gate_and_up)
        _backward_kernel[_grid(grad_output)](gate_and_up, grad_output, grad, grad_output.size(-1), BLOCK=_COLUMNS)
        return grad


def _grid(rows: Tensor) -> tuple[int, int]:
    return rows.numel() // rows.size(-1), triton.cdiv(rows.size(-1), _COLUMNS)


@triton.jit
def _forward_kernel(gate_and_up, output, features, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < features
    source = gate_and_up + row * 2 * features + column
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + features, mask=inside, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    tl.store(output + row * features + column, value.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(gate_and_up, grad_output, grad, features, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < features
    at = row * 2 * features + column
    gate = tl.load(gate_and_up + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_and_up + at + features, mask=inside, other=0.0).to(tl.float32)
    incoming = tl.load(grad_output + row * features + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    grad_gate = incoming * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    dtype = grad.dtype.element_ty
    tl.store(grad + at, grad_gate.to(dtype), mask=inside)
    tl.store(grad + at + features, (incoming * gate * sigmoid).to(dtype), mask=inside)
