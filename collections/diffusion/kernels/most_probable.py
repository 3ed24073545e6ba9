"""The most probable token of each row of logits and its probability, read once.

Shape letters: N rows, V vocabulary columns, P parts of a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 4096
"""Of a part: few enough that the rows of a single block keep a GPU busy."""


def most_probable(logits_NV: Tensor, forbidden_V: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The token with the largest logit, the lowest one among equals, and its share of the softmax over the others.

    An infinite logit counts as the largest finite number of fp32.

    Args:
        logits_NV: of any floating dtype; where neighbours in the vocabulary are none in memory it is copied first.
        forbidden_V: bool, tokens that have probability 0; None is none.

    Returns:
        int64 [N], and fp32 [N] that is NaN where a logit is, and where no token is left.
    """
    if logits_NV.stride(1) != 1:
        logits_NV = logits_NV.contiguous()
    rows, columns = logits_NV.shape
    parts = triton.cdiv(columns, _COLUMNS)
    largest, total = torch.empty(2, rows, parts, dtype=torch.float32, device=logits_NV.device)
    tokens_NP = torch.empty(rows, parts, dtype=torch.int32, device=logits_NV.device)
    tokens_N = torch.empty(rows, dtype=torch.int64, device=logits_NV.device)
    probability_N = torch.empty(rows, dtype=torch.float32, device=logits_NV.device)
    # Only the first size of a grid may be above 65535.
    _part_kernel[(rows, parts)](
        logits_NV,
        forbidden_V,
        largest,
        tokens_NP,
        total,
        columns,
        logits_NV.stride(0),
        BLOCK=_COLUMNS,
        num_warps=8,
    )
    _row_kernel[(rows,)](
        largest, tokens_NP, total, tokens_N, probability_N, parts, BLOCK=triton.next_power_of_2(parts), num_warps=1
    )
    return tokens_N, probability_N


@triton.jit
def _part_kernel(logits, forbidden, largest, tokens, total, columns, stride, BLOCK: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(logits + row * stride + column, mask=inside, other=-float("inf")).to(tl.float32)
    x = tl.where(x == float("inf"), 3.4028234663852886e38, x)
    if forbidden is not None:
        x = tl.where(tl.load(forbidden + column, mask=inside, other=0) != 0, -float("inf"), x)
    best = tl.max(x, 0)
    at = row * tl.num_programs(1) + part
    tl.store(largest + at, best)
    tl.store(tokens + at, tl.min(tl.where(x == best, column, columns), 0))
    # Minus infinity less itself is no number, and such a part counts for nothing.
    tl.store(total + at, tl.sum(tl.where(x == -float("inf"), 0.0, tl.exp(x - best)), 0))


@triton.jit
def _row_kernel(largest, tokens, total, token, probability, parts, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    at, inside = row * parts + part, part < parts
    best_of_part = tl.load(largest + at, mask=inside, other=-float("inf"))
    best = tl.max(best_of_part, 0)
    candidates = tl.load(tokens + at, mask=inside, other=2147483647)
    tl.store(token + row, tl.min(tl.where(best_of_part == best, candidates, 2147483647), 0).to(tl.int64))
    share = tl.load(total + at, mask=inside, other=0.0) * tl.exp(best_of_part - best)
    tl.store(probability + row, 1 / tl.sum(share, 0))
