"""How many tokens each denoising step commits.

Shape letters: B rows, T canvas positions, S steps, P forward passes.
"""

from collections.abc import Callable, Iterator
from itertools import repeat
from math import ceil

import torch
from torch import Tensor

Alpha = Callable[[Tensor], Tensor]


def linear_alpha(t: Tensor) -> Tensor:
    """Share of tokens still clean at time t in [0, 1] under the linear schedule: 1 - t."""
    return 1 - t


def transfer_counts(masked: int, steps: int, alpha: Alpha = linear_alpha) -> list[int]:
    """Tokens to commit at each step of the reverse process, its expected number rounded half to even.

    With R masks left at time t = (N - j) / N and s = (N - j - 1) / N, step j of N commits R * (1 - q) of them, where
    q = (1 - alpha(s)) / (1 - alpha(t)) is the chance that a mask survives from t to s (Sahoo et al. 2024, the reverse
    posterior of absorbing diffusion).

    Args:
        masked: masks to fill, at least 0.
        steps: steps to divide them over, at least 1.
        alpha: the noise schedule, float32 [S + 1] times in [0, 1] -> share of clean tokens; alpha(0) = 1, alpha(1) = 0.

    Returns:
        Positive counts that sum to ``masked``. Steps which would commit nothing are left out, so there may be fewer
        than ``steps``.
    """
    times_S = torch.arange(steps, -1, -1, dtype=torch.float64) / steps
    # The ratio is rounded to float32 and the rest is not, because half cases decide: 10 masks in 3 linear steps are
    # [3, 3, 4] so, as in the dllm reference, and [3, 4, 3] in float64 throughout.
    masked_share_S = 1 - alpha(times_S.float())
    survival = (masked_share_S[1:] / masked_share_S[:-1]).tolist()
    counts, left = [], masked
    for chance in survival[:-1]:
        counts.append(round(left * (1 - chance)))
        left -= counts[-1]
    counts.append(left)
    return [count for count in counts if count]


def commit_quotas(holes_BT: Tensor, blocks_BT: Tensor, steps: int | None, alpha: Alpha) -> Iterator[Tensor]:
    """The number of tokens that each forward pass commits, row by row; every row follows its own schedule.

    Args:
        holes_BT: bool, positions to fill.
        blocks_BT: int64, the block of each position, see ``block_indices``.
        steps: steps for the whole row, split evenly over the blocks that have holes and rounded up; None is one
            token per pass.
        alpha: as in ``transfer_counts``.

    Returns:
        int64 [B] per pass; without end for ``steps=None``, else until the slowest row is full.
    """
    if steps is None:
        return repeat(torch.ones(holes_BT.shape[0], dtype=torch.int64, device=holes_BT.device))
    plans = []
    for holes_T, blocks_T in zip(holes_BT, blocks_BT, strict=True):
        per_block = torch.unique(blocks_T[holes_T], return_counts=True)[1].tolist()
        plans.append([n for masked in per_block for n in transfer_counts(masked, ceil(steps / len(per_block)), alpha)])
    passes = max(map(len, plans), default=0)
    plan_BP = torch.tensor([plan + [0] * (passes - len(plan)) for plan in plans], dtype=torch.int64)
    return iter(plan_BP.to(holes_BT.device).reshape(len(plans), passes).unbind(1))
