"""How many tokens each denoising step commits.

A schedule is a function (masked, steps, length) -> counts: ``masked`` holes of a block of ``length`` positions are
filled in ``steps`` steps. Counts are positive and sum to at least ``masked``; steps which would commit nothing are left
out. ``register_schedule`` adds one under a name for ``SamplerConfig.schedule``.

Shape letters: S steps.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

Alpha = Callable[[Tensor], Tensor]
Schedule = Callable[[int, int, int], list[int]]


def linear_alpha(t: Tensor) -> Tensor:
    """Share of tokens still clean at time t in [0, 1] under the linear schedule: 1 - t."""
    return 1 - t


def cosine_alpha(t: Tensor) -> Tensor:
    """Share of tokens still clean at time t in [0, 1] under the cosine schedule: 1 - cos(pi/2 * (1 - t))."""
    return 1 - torch.cos(math.pi / 2 * (1 - t))


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
    times_S = torch.arange(steps, -1, -1, dtype=torch.float64, device="cpu") / steps
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


def even_counts(masked: int, steps: int) -> list[int]:
    """An even split whose first steps take the remainder, as of LLaDA's own sampler: 10 in 4 are [3, 3, 2, 2]."""
    share, rest = divmod(masked, steps)
    return [count for count in [share + 1] * rest + [share] * (steps - rest) if count]


SCHEDULES: dict[str, Schedule] = {}


def register_schedule(name: str, schedule: Schedule) -> None:
    """Make a schedule known as ``SamplerConfig(schedule=name)``."""
    SCHEDULES[name] = schedule


def _reverse_process(masked: int, steps: int, length: int, *, alpha: Alpha) -> list[int]:
    return transfer_counts(masked, steps, alpha)


register_schedule("linear", partial(_reverse_process, alpha=linear_alpha))
register_schedule("cosine", partial(_reverse_process, alpha=cosine_alpha))
register_schedule("even", lambda masked, steps, length: even_counts(masked, steps))
# LLaDA2 splits the block's length, though part of a block may be prompt.
register_schedule("even_block", lambda masked, steps, length: even_counts(length, steps))
