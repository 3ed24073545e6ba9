"""Softmax statistics of a chunk of logits and their gradient, each in one pass.

Shape letters: C rows, V vocabulary columns of this rank.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 8192


def row_statistics(logits_CV: Tensor, local_targets_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Maximum, sum of exp(logit - maximum), and the target's logit (0 where it is outside), fp32 [C] each."""
    rows, columns = logits_CV.shape
    maximum, total, target = torch.empty(3, rows, dtype=torch.float32, device=logits_CV.device).unbind(0)
    _statistics_kernel[(rows,)](
        logits_CV, local_targets_C, maximum, total, target, columns, logits_CV.stride(0), BLOCK=_COLUMNS, num_warps=8
    )
    return maximum, total, target


def logit_gradient_(logits_CV: Tensor, log_partition_C: Tensor, local_targets_C: Tensor, weight_C: Tensor) -> Tensor:
    """Overwrite logits with weight * (softmax - one-hot)."""
    rows, columns = logits_CV.shape
    _gradient_kernel[(rows, triton.cdiv(columns, _COLUMNS))](
        logits_CV,
        log_partition_C,
        local_targets_C,
        weight_C,
        columns,
        logits_CV.stride(0),
        BLOCK=_COLUMNS,
        num_warps=8,
    )
    return logits_CV


@triton.jit
def _statistics_kernel(logits, targets, maximum, total, target_logit, columns, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane_maximum = tl.full((BLOCK,), -3.4028234e38, tl.float32)
    lane_total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        x = tl.load(logits + row * stride + column, mask=column < columns, other=-float("inf")).to(tl.float32)
        larger = tl.maximum(lane_maximum, x)
        lane_total = lane_total * tl.exp(lane_maximum - larger) + tl.exp(x - larger)
        lane_maximum = larger
    row_maximum = tl.max(lane_maximum, 0)
    tl.store(maximum + row, row_maximum)
    tl.store(total + row, tl.sum(lane_total * tl.exp(lane_maximum - row_maximum), 0))
    target = tl.load(targets + row)
    here = (target >= 0) & (target < columns)
    tl.store(target_logit + row, tl.load(logits + row * stride + target, mask=here, other=0.0).to(tl.float32))


@triton.jit
def _gradient_kernel(logits, log_partition, targets, weights, columns, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = logits + row * stride + column
    x = tl.load(at, mask=column < columns, other=-float("inf")).to(tl.float32)
    probability = tl.exp(x - tl.load(log_partition + row))
    difference = tl.where(column == tl.load(targets + row), probability - 1.0, probability)
    tl.store(at, (difference * tl.load(weights + row)).to(logits.dtype.element_ty), mask=column < columns)
