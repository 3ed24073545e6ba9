"""Blocks of a canvas, which are filled one after the other, and the positions of one pass.

Shape letters: B rows, T canvas positions, L positions of one pass.
"""

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK_ORIGINS = ("prompt", "sequence")


class Window(NamedTuple):
    """Some positions of each row, ascending, padded on the right to the row that has most.

    Attributes:
        index_BL: int64 canvas position.
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
        positions_BT = positions_BT - holes_BT.int().argmax(dim=1, keepdim=True)
    return torch.div(positions_BT, block_size, rounding_mode="floor")


def gather_window(chosen_BT: Tensor) -> Window:
    """The chosen positions of each row."""
    counts_B = chosen_BT.sum(dim=1)
    longest = int(counts_B.max())
    index_BL = (~chosen_BT).int().argsort(dim=1, stable=True)[:, :longest]
    return Window(index_BL, torch.arange(longest, device=counts_B.device) < counts_B[:, None])
