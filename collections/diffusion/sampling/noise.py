"""Random numbers of a sampling run, drawn row by row.

Shape letters: B rows, N candidate positions of all rows in row-major order, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

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


class RowNoise:
    """One generator per row, so that a row draws the same numbers whatever it is batched with.

    Args:
        seed: any integer; None draws one from torch's global generator.
        row_ids: identity of each row within the request, [B].
        device: where numbers are drawn; the CPU and CUDA give different ones.
    """

    def __init__(self, seed: int | None, row_ids: Sequence[int], device: torch.device):
        base = int(torch.randint(1 << 62, ())) if seed is None else seed
        self._generators = [torch.Generator(device).manual_seed(row_seed(base, row_id)) for row_id in row_ids]

    def uniform(self, per_row: Sequence[int], *shape: int) -> Tensor:
        """Float64 numbers in [0, 1) of shape [sum(per_row), *shape]; row b draws ``per_row[b]`` of them."""
        draws = [
            torch.rand(count, *shape, generator=generator, dtype=torch.float64, device=generator.device)
            for count, generator in zip(per_row, self._generators, strict=True)
        ]
        return torch.cat(draws)


def gumbel(uniform: Tensor) -> Tensor:
    """Standard Gumbel noise -log(-log u) from float64 uniforms in [0, 1); always finite."""
    # u = 0 would give -inf, which loses even against forbidden tokens.
    return -torch.log(-torch.log(uniform.clamp_min(torch.finfo(uniform.dtype).tiny)))
