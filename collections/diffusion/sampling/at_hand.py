"""The blocks that the rows of a run work on.

Shape letters: B rows, T canvas positions, N all positions of the canvas. A place is a position of the canvas counted
row after row.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple, Self

import numpy
from torch import Tensor

from nemo_dllm.collections.diffusion.sampling.blocks import Canvas, places_by_row
from nemo_dllm.collections.diffusion.sampling.stopping import first_ends


class AtHand(NamedTuple):
    """Blocks as they are when a row begins one.

    Attributes:
        blocks: of each row, None where it has nothing to do.
        active_BT: bool, their positions.
        generated: by row, places of theirs that are filled or to be filled, ascending.
        open: by row, those that are to be filled.
        ends: by row, the first filled one that ends a text, where there is one.
    """

    blocks: Sequence[int | None]
    active_BT: Tensor
    generated: list[list[int]]
    open: list[list[int]]
    ends: dict[int, int]

    @classmethod
    def of(
        cls,
        canvas: Canvas,
        blocks: Sequence[int | None],
        tokens_N: numpy.ndarray,
        holes_N: numpy.ndarray,
        end_ids: Collection[int],
    ) -> Self:
        """Blocks of a canvas on which these tokens are, and these holes are left."""
        active_BT = canvas.at(blocks)
        generated = places_by_row(canvas.holes_BT & active_BT)
        open_ = [[place for place in row if holes_N[place]] for row in generated]
        return cls(blocks, active_BT, generated, open_, first_ends(tokens_N, holes_N, generated, end_ids))
