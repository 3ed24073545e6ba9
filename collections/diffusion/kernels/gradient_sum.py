"""Gradients of many tensors of one shape, added to fp32 buffers that lie anywhere, in one kernel.

Shape letters: E tensors.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_ELEMENTS = 4096


def add_to_buffers(gradients: Tensor, addresses_E: Tensor) -> None:
    """Add ``gradients[e]`` to the buffer at an address, for each e.

    Args:
        gradients: [E, ...], contiguous, on a GPU.
        addresses_E: int64, as of :func:`addresses_of`: of fp32 buffers of ``gradients[0].numel()`` elements each.
    """
    size = gradients[0].numel()
    _add_kernel[(triton.cdiv(size, _ELEMENTS), len(gradients))](gradients, addresses_E, size, BLOCK=_ELEMENTS)


def addresses_of(buffers: Sequence[Tensor]) -> Tensor:
    """Where contiguous fp32 tensors on one GPU lie: int64 [E], on it."""
    assert all(buffer.dtype == torch.float32 and buffer.is_contiguous() for buffer in buffers)
    addresses_E = torch.tensor([buffer.data_ptr() for buffer in buffers], pin_memory=True)
    return addresses_E.to(buffers[0].device, non_blocking=True)


@triton.jit
def _add_kernel(gradients, addresses, size, BLOCK: tl.constexpr):
    tensor = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    buffer = tl.load(addresses + tensor).to(tl.pointer_type(tl.float32)) + at
    gradient = tl.load(gradients + tensor * size + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(buffer, tl.load(buffer, mask=inside, other=0.0) + gradient, mask=inside)
