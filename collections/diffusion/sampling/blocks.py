"""Blocks of a canvas, which are filled one after the other, and the positions of one pass.

Shape letters: B rows, T canvas positions, L positions of one pass.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from nemo_dllm.collections.diffusion.sampling.device import on_cpu, on_device
from nemo_dllm.collections.diffusion.sampling.joining import Picked, attribute_of, stack_rows

BLOCK_ORIGINS = ("prompt", "sequence")


class Canvas(NamedTuple):
    """What stays the same during a run; on the CPU, where the run does its bookkeeping.

    Numpy does it in a fraction of the time that torch takes for so little.

    Attributes:
        holes_BT: bool, positions to fill.
        blocks_BT: int64, the block of each position.
        keys_BT: bool, False at padding.
        padded: whether ``keys_BT`` is False anywhere.
    """

    holes_BT: Tensor
    blocks_BT: Tensor
    keys_BT: Tensor
    padded: bool

    @property
    def positions_BT(self) -> Tensor:
        """Int64, how many tokens are before each position, padding not counted."""
        return torch.from_numpy((self.keys_BT.numpy().cumsum(axis=1) - 1).clip(0))

    def at(self, blocks: Sequence[int | None]) -> Tensor:
        """Positions of a block of each row, bool; none of a row with None."""
        return torch.from_numpy(self.keys_BT.numpy() & (self.blocks_BT.numpy() == _numbers(blocks)))

    def before(self, blocks: Sequence[int | None]) -> Tensor:
        """Positions of earlier blocks of each row, bool; none of a row with None."""
        return torch.from_numpy(self.keys_BT.numpy() & (self.blocks_BT.numpy() < _numbers(blocks)))

    @classmethod
    def join_rows(cls, picked: Sequence[Picked]) -> "Canvas":
        """Rows of several runs, as wide as the longest of them."""
        width = max(int(canvas.keys_BT[row].nonzero().max()) + 1 for canvas, rows in picked for row in rows)
        holes_BT, blocks_BT, keys_BT = (
            stack_rows(attribute_of(picked, name), width) for name in ("holes_BT", "blocks_BT", "keys_BT")
        )
        return cls(holes_BT, blocks_BT, keys_BT, padded=not keys_BT.all())

    def cpu(self) -> "Canvas":
        """The same, on the CPU and row after row in memory, where ``put`` and its like find places by their number."""
        return Canvas(*(x_BT.cpu().contiguous() for x_BT in (self.holes_BT, self.blocks_BT, self.keys_BT)), self.padded)


class Window(NamedTuple):
    """Some positions of each row, ascending, padded on the right to the row that has most.

    Attributes:
        index_BL: int64 canvas position, 0 at padding.
        valid_BL: bool, False at padding.
    """

    index_BL: Tensor
    valid_BL: Tensor


def block_indices(holes_BT: Tensor, block_size: int | None, origin: str = "prompt") -> Tensor:
    """Number the blocks of each row.

    Args:
        holes_BT: bool, positions to fill.
        block_size: positions per block, at least 1; None puts every position into block 0.
        origin: "prompt" counts from the first hole of the row (the end of the prompt), "sequence" from its start.

    Returns:
        int64 [B, T]; for "prompt" negative before the first hole.
    """
    if block_size is None:
        return torch.zeros_like(holes_BT, dtype=torch.int64)
    positions_BT = torch.arange(holes_BT.shape[1], device=holes_BT.device).expand_as(holes_BT)
    if origin == "prompt":
        positions_BT = positions_BT - (holes_BT.cumsum(dim=1) == 0).sum(dim=1, keepdim=True)
    return torch.div(positions_BT, block_size, rounding_mode="floor")


def _numbers(blocks: Sequence[int | None]) -> numpy.ndarray:
    """Int64 [B, 1]; for None one that no block has, below all of them."""
    nothing = torch.iinfo(torch.int64).min
    return numpy.array([[nothing if block is None else block] for block in blocks])


def following(blocks: Sequence[int | None]) -> list[int | None]:
    """The blocks behind those that rows work on."""
    return [None if block is None else block + 1 for block in blocks]


def rows_and_columns(numbers_N: numpy.ndarray, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where numbers that count row after row stand in rows of a width; int64 [N] each, on a device."""
    rows_N, columns_N = on_device(torch.from_numpy(numpy.array(divmod(numbers_N, width))), device)
    return rows_N, columns_N


def gather_window(chosen_BT: Tensor) -> Window:
    """The chosen positions of each row."""
    counts = chosen_BT.numpy().sum(axis=1).tolist()
    if min(counts) == max(counts):
        index_BL = torch.from_numpy(chosen_BT.numpy().nonzero()[1].reshape(len(counts), counts[0]))
        return Window(index_BL, torch.ones_like(index_BL, dtype=torch.bool))
    valid_BL = torch.arange(max(counts), device="cpu") < on_cpu(counts)[:, None]
    # Both go row by row, from left to right.
    index_BL = torch.zeros_like(valid_BL, dtype=torch.int64).masked_scatter(valid_BL, chosen_BT.nonzero()[:, 1])
    return Window(index_BL, valid_BL)


def window_entries(chosen_BT: Tensor, length: int, right_shift: bool) -> Tensor:
    """Which logits are those of a position in a pass over the chosen ones, of all rows one after the other.

    With a shift they are those of its left neighbour; position 0 has its own. What is not in the pass has any number.

    Args:
        chosen_BT: bool, the positions of the pass.
        length: of the pass; L.
        right_shift: logits of a position predict the next one.

    Returns:
        int64 [B, T].
    """
    columns_BT = chosen_BT.cumsum(dim=1) - 1
    if right_shift:
        columns_BT = torch.cat([columns_BT[:, :1], columns_BT[:, :-1]], dim=1)
    return columns_BT + torch.arange(0, len(chosen_BT) * length, max(length, 1), device="cpu")[:, None]


def places_of(chosen_BT: Tensor) -> list[int]:
    """The chosen positions, ascending, counted row after row."""
    return chosen_BT.numpy().reshape(-1).nonzero()[0].tolist()


def places_by_row(chosen_BT: Tensor) -> list[list[int]]:
    """The chosen positions of each row, ascending, counted row after row."""
    rows, width = chosen_BT.shape
    places = places_of(chosen_BT)
    bounds = [bisect_left(places, row * width) for row in range(rows + 1)]
    return [places[start:end] for start, end in pairwise(bounds)]


def before_hole(holes_BT: Tensor) -> Tensor:
    """Positions before the first hole of their row, bool [B, T]; holes_BT is on the CPU."""
    holes_BT = holes_BT.numpy()
    first_B = holes_BT.argmax(axis=1)
    # In a row without holes that is 0 as well.
    first_B[~holes_BT[numpy.arange(len(first_B)), first_B]] = holes_BT.shape[1]
    return torch.from_numpy(numpy.arange(holes_BT.shape[1]) < first_B[:, None])


def take(canvas_BT: Tensor, places: Sequence[int] | numpy.ndarray) -> numpy.ndarray:
    """What is at some places of a canvas."""
    return canvas_BT.numpy().reshape(-1)[places]


def put(canvas_BT: Tensor, places: list[int], values: Any) -> Tensor:
    """Write to some places of a canvas; returns it."""
    # At so few places, tensors of them would take longer to make.
    canvas_BT.numpy().reshape(-1)[places] = values
    return canvas_BT
