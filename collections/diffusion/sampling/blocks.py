"""Blocks of a canvas, which are filled one after the other, and the positions of one pass.

Shape letters: B rows, T canvas positions, L positions of one pass.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nemo_dllm.collections.diffusion.sampling.joining import Picked, attribute_of, stack_rows

BLOCK_ORIGINS = ("prompt", "sequence")


class Canvas(NamedTuple):
    """What stays the same during a run; on the CPU, where the run does its bookkeeping.

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
        return (self.keys_BT.cumsum(dim=1) - 1).clamp_min(0)

    @classmethod
    def join_rows(cls, picked: Sequence[Picked]) -> "Canvas":
        """Rows of several runs, as wide as the longest of them."""
        width = max(int(canvas.keys_BT[row].nonzero().max()) + 1 for canvas, rows in picked for row in rows)
        holes_BT, blocks_BT, keys_BT = (
            stack_rows(attribute_of(picked, name), width) for name in ("holes_BT", "blocks_BT", "keys_BT")
        )
        return cls(holes_BT, blocks_BT, keys_BT, padded=not keys_BT.all())

    def cpu(self) -> "Canvas":
        """The same, on the CPU."""
        return Canvas(self.holes_BT.cpu(), self.blocks_BT.cpu(), self.keys_BT.cpu(), self.padded)


class Given(NamedTuple):
    """What a model gets of the positions of a pass, on its device; see ``CachedDenoiser``."""

    tokens_BL: Tensor
    positions_BL: Tensor
    key_mask_BL: Tensor


class Window(NamedTuple):
    """Some positions of each row, ascending, padded on the right to the row that has most.

    Attributes:
        index_BL: int64 canvas position, 0 at padding.
        valid_BL: bool, False at padding.
    """

    index_BL: Tensor
    valid_BL: Tensor

    def take(self, tokens_BT: Tensor, positions_BT: Tensor, device: torch.device) -> Given:
        """Tokens and positions within the text at these places."""
        parts = (tokens_BT.gather(1, self.index_BL), positions_BT.gather(1, self.index_BL), self.valid_BL)
        return Given(*(on_device(part, device) for part in parts))


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


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A small tensor of the CPU on a device; the CPU does not wait for what is queued there."""
    return tensor.to(device, non_blocking=True)


def gather_window(chosen_BT: Tensor) -> Window:
    """The chosen positions of each row."""
    counts = chosen_BT.sum(dim=1).tolist()
    if min(counts) == max(counts):
        index_BL = chosen_BT.nonzero()[:, 1].view(len(counts), counts[0])
        return Window(index_BL, torch.ones_like(index_BL, dtype=torch.bool))
    valid_BL = torch.arange(max(counts)) < torch.tensor(counts)[:, None]
    # Both go row by row, from left to right.
    index_BL = torch.zeros_like(valid_BL, dtype=torch.int64).masked_scatter(valid_BL, chosen_BT.nonzero()[:, 1])
    return Window(index_BL, valid_BL)


def window_places(chosen_BT: Tensor, right_shift: bool) -> Tensor:
    """Row and column that the logits for each position have in a pass over the chosen ones; int64 [2, B, T].

    With a shift they are those of its left neighbour; position 0 has its own. What is not in the pass has any place.
    """
    columns_BT = chosen_BT.cumsum(dim=1) - 1
    if right_shift:
        columns_BT = torch.cat([columns_BT[:, :1], columns_BT[:, :-1]], dim=1)
    rows_B1 = torch.arange(len(chosen_BT))[:, None]
    return torch.stack([rows_B1.expand_as(columns_BT), columns_BT])
