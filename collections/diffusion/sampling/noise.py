"""Random numbers of a sampling run, drawn row by row.

Shape letters: B rows, T positions.
"""

from collections.abc import Sequence
from copy import copy
from functools import cached_property
from numbers import Integral

import torch
from torch import Tensor

from nemo_dllm.collections.diffusion.sampling.joining import Picked, attribute_of, pick_items

_MASK_64 = (1 << 64) - 1


def row_seed(seed: int, row_id: int) -> int:
    """A 63-bit seed for one row: two rounds of SplitMix64 over (seed, row_id).

    Adding the two would give row 1 of seed 0 the noise of row 0 of seed 1.
    """
    mixed = seed & _MASK_64
    for word in (0, row_id):
        mixed = (mixed ^ (word & _MASK_64)) + 0x9E3779B97F4A7C15 & _MASK_64
        mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & _MASK_64
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & _MASK_64
        mixed ^= mixed >> 31
    return mixed >> 1


class _Draws:
    """Numbers of one row. Their generator, which takes its time on a GPU, is made where the first are drawn."""

    def __init__(self, seed: int, device: torch.device):
        self._seed, self._device = seed, device

    @cached_property
    def _generator(self) -> torch.Generator:
        return torch.Generator(self._device).manual_seed(self._seed)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self._generator, dtype=torch.float64, device=self._device)


class RowNoise:
    """One generator per row, so that a row draws the same numbers whatever it is batched with.

    Args:
        seeds: one integer per row, or one for all; None draws one for all from torch's global generator.
        row_ids: identity of each row among those of its seed, [B].
        device: where numbers are drawn; the CPU and CUDA give different ones.
    """

    def __init__(self, seeds: int | Sequence[int] | None, row_ids: Sequence[int], device: torch.device):
        if seeds is None:
            seeds = int(torch.randint(1 << 62, (), device="cpu"))
        if isinstance(seeds, Integral):
            # A number of numpy has no room for 64 bits and their sign.
            seeds = [int(seeds)] * len(row_ids)
        self._draws = [_Draws(row_seed(seed, row_id), device) for seed, row_id in zip(seeds, row_ids, strict=True)]

    @classmethod
    def join_rows(cls, picked: Sequence[Picked]) -> "RowNoise":
        """The noise of rows of several runs, which go on with the numbers that they have not drawn yet."""
        joined = copy(picked[0].part)
        joined._draws = pick_items(attribute_of(picked, "_draws"))
        return joined

    def uniform(self, positions_BT: Tensor, *shape: int) -> Tensor:
        """Float64 numbers in [0, 1), one tensor of ``shape`` for each True of ``positions_BT``, in row-major order."""
        counts = positions_BT.sum(dim=1).tolist()
        drawn = [draws.uniform(count, *shape) for count, draws in zip(counts, self._draws, strict=True)]
        return drawn[0] if len(drawn) == 1 else torch.cat(drawn)


class GlobalNoise:
    """Numbers from torch's global generator, for all positions of a pass at once, as dllm's samplers draw them.

    Args:
        device: where they are drawn; None is the CPU.
    """

    def __init__(self, device: torch.device | None = None):
        self._device = device

    def uniform(self, positions_BT: Tensor, *shape: int) -> Tensor:
        """As of ``RowNoise``; what a row draws depends on the others, and on positions that need nothing."""
        # dllm draws Gumbel noise in float64, and scores for a random order in float32.
        dtype = torch.float64 if shape else torch.float32
        return torch.rand(*positions_BT.shape, *shape, dtype=dtype, device=self._device)[positions_BT]


def gumbel(uniform: Tensor) -> Tensor:
    """Standard Gumbel noise -log(-log u) from float64 uniforms in [0, 1); always finite."""
    # u = 0 would give -inf, which loses even against forbidden tokens. In place, for there is one for every token.
    return uniform.clamp_min(torch.finfo(uniform.dtype).tiny).log_().neg_().log_().neg_()
