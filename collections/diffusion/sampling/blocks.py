"""Semi-autoregressive blocks: which positions of a row may be filled next.

Shape letters: B rows, T canvas positions.
"""

import torch
from torch import Tensor


def block_indices(holes_BT: Tensor, block_size: int | None) -> Tensor:
    """Number the blocks of each row, counted from its first hole (the end of the prompt).

    Args:
        holes_BT: bool, positions to fill.
        block_size: positions per block, at least 1; None puts every position into block 0.

    Returns:
        int64 [B, T]; negative before the first hole.
    """
    if block_size is None:
        return torch.zeros_like(holes_BT, dtype=torch.int64)
    positions_T = torch.arange(holes_BT.shape[1], device=holes_BT.device)
    first_hole_B1 = holes_BT.int().argmax(dim=1, keepdim=True)
    return torch.div(positions_T - first_hole_B1, block_size, rounding_mode="floor")


def current_block_holes(holes_BT: Tensor, blocks_BT: Tensor) -> Tensor:
    """The holes of the first unfinished block of each row, bool [B, T]; rows move on independently of each other."""
    past_the_end = torch.iinfo(torch.int64).max
    first_open_B1 = blocks_BT.masked_fill(~holes_BT, past_the_end).amin(dim=1, keepdim=True)
    return holes_BT & (blocks_BT == first_open_B1)
