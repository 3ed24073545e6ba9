"""Keys and values by text position, for models that attend in plain torch.

Shape letters: B rows, L positions of one pass, S slots (one per position and one for padding), H key/value heads,
D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple, Self

import torch
from torch import Tensor

from nemo_dllm.collections.diffusion.sampling.joining import Picked, by_part

HIDDEN = torch.iinfo(torch.int32).max
"""Rank of a slot that no position sees."""
_HELD = torch.iinfo(torch.int32).min
TOO_LARGE = 2
"""Memory is given up for smaller one where it is more than so many times as large."""


class CacheWindow(NamedTuple):
    """Where the positions of one pass lie in the cache, and what they see: slots whose rank is at most their own.

    Attributes:
        slots_BL: int64 slot of each position.
        places_N: int64, the same slots, position by position, counted through all rows.
        ranks_BL: int32 of each position; [B, 1] where all of a row have one.
        slot_ranks_BS: int32 of each slot; that of the padding is hidden.
    """

    slots_BL: Tensor
    places_N: Tensor
    ranks_BL: Tensor
    slot_ranks_BS: Tensor

    @property
    def visible_BLS(self) -> Tensor:
        """Bool, slots that a position may attend to; its second size is that of ``ranks_BL``.

        At least one everywhere, so that a softmax over them is finite: what sees nothing else sees the padding.
        """
        visible_BLS = self.slot_ranks_BS[:, None] <= self.ranks_BL[:, :, None]
        visible_BLS[..., -1] = ~visible_BLS.any(dim=-1)
        return visible_BLS


@dataclass(eq=False)
class CacheMemory:
    """What a cache is written to.

    Attributes:
        held_BS: bool, slots whose content later passes see; the last one, for padding, never is.
        layers: keys and values [B, S, H, D] by the number of their layer.
    """

    held_BS: Tensor
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @classmethod
    def empty(cls, rows: int, slots: int, device: torch.device | str | None) -> Self:
        """Memory that nothing was written to."""
        # A cache that is made in inference mode may be written to outside of it.
        with torch.inference_mode(False):
            return cls(torch.zeros(rows, slots, dtype=torch.bool, device=device))

    def layer(self, number: int, like_BLHD: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer; zeros, of heads and dtype as given, where it has none yet."""
        if number not in self.layers:
            shape = (*self.held_BS.shape, *like_BLHD.shape[2:])
            with torch.inference_mode(False):
                self.layers[number] = (like_BLHD.new_zeros(shape), like_BLHD.new_zeros(shape))
        return self.layers[number]


class KVCache:
    """Keys and values of every layer in one slot per position; layers appear as they are first written.

    A pass asks for its ``window``, sends each layer's keys and values through ``write``, and attends to the slots that
    are ``visible_BLS``. It writes in place: what it writes is visible to itself alone unless ``hold`` keeps it. A pass
    over fewer rows than there is memory for is one over the first of them. Memory may be for more positions, too.

    Args:
        rows: rows of the batch.
        positions: longest row, in tokens.
        device: where keys and values are.

    Attributes:
        memory: what it writes to; the cache's alone, as long as it lives.
    """

    def __init__(self, rows: int, positions: int, device: torch.device | str | None = None):
        self.memory = CacheMemory.empty(*self.shape(rows, positions), device)

    def another(self, rows: int, positions: int) -> Self:
        """An empty cache like this one, of other sizes."""
        return type(self)(rows, positions, self.held_BS.device)

    @staticmethod
    def shape(rows: int, positions: int) -> tuple[int, int]:
        """Rows and slots of memory for so many rows and positions."""
        return rows, positions + 1

    def suits(self, rows: int, positions: int) -> bool:
        """Whether its memory is for so many rows and positions, and at most ``TOO_LARGE`` times that of a new cache."""
        has_rows, has_slots = self.held_BS.shape
        fits = has_rows >= rows and has_slots > positions
        return fits and has_rows * has_slots <= TOO_LARGE * prod(self.shape(rows, positions))

    @classmethod
    def join_rows(cls, picked: Sequence[Picked], positions: int) -> Self:
        """A cache of rows of several others.

        One of them that suits takes the others' rows into its memory, where its own rows all stay in their places.

        Args:
            picked: rows of caches of the same layers; where one has not been written to, it holds nothing.
            positions: of the longest row, in tokens.
        """
        groups, count = by_part(picked), sum(len(rows) for _, rows in picked)
        staying = (cache for cache, rows, places in groups if rows == places and cache.suits(count, positions))
        joined = next(staying, None) or picked[0].part.another(count, positions)
        for cache, rows, places in groups:
            if cache is not joined:
                joined._take(cache, rows, places)
        return joined

    def _take(self, other: Self, rows: list[int], places: list[int]) -> None:
        """Make rows of another cache the rows in some places."""
        mine, theirs = self.memory.layers, other.memory.layers
        parts = []
        for number in sorted({*mine, *theirs}):
            kept = theirs.get(number, (None, None))
            parts += zip(mine[number] if kept[0] is None else self.memory.layer(number, kept[0]), kept, strict=True)
        # Nothing of the row that was there is left: numbers that are not finite would be seen from hidden slots.
        for pairs in ([(self.held_BS, other.held_BS)], parts):
            written, read, emptied = [], [], []
            for whole_BS, kept_BS in pairs:
                slots = 0 if kept_BS is None else min(whole_BS.size(1), kept_BS.size(1))
                for row, place in zip(rows, places, strict=True):
                    if slots:
                        written.append(whole_BS[place, :slots])
                        read.append(kept_BS[row, :slots])
                    if slots < whole_BS.size(1):
                        emptied.append(whole_BS[place, slots:])
            if written:
                torch._foreach_copy_(written, read)
            if emptied:
                torch._foreach_zero_(emptied)

    @property
    def held_BS(self) -> Tensor:
        """Bool, slots whose content later passes see; the last one, for padding, never is."""
        return self.memory.held_BS

    @property
    def _padding_slot(self) -> int:
        return self.held_BS.size(1) - 1

    def window(self, positions_BL: Tensor, key_mask_BL: Tensor, blocks_BL: Tensor | None = None) -> CacheWindow:
        """Where a pass over these positions writes and what it sees.

        Args:
            positions_BL, key_mask_BL, blocks_BL: as of ``CachedDenoiser.commit``, blocks numbered within int32, below
                ``HIDDEN``; without blocks the positions see each other.
        """
        slots_BL = positions_BL.where(key_mask_BL, self._padding_slot)
        first_B = torch.arange(len(slots_BL), device=slots_BL.device) * (self._padding_slot + 1)
        ranks_BL = blocks_BL
        if ranks_BL is None:
            ranks_BL = slots_BL.new_zeros(len(slots_BL), 1)
        ranks_BL = ranks_BL.int()
        held_BS = self.held_BS[: len(slots_BL)]
        slot_ranks_BS = torch.full_like(held_BS, HIDDEN, dtype=torch.int32).masked_fill_(held_BS, _HELD)
        slot_ranks_BS.scatter_(1, slots_BL, ranks_BL.expand_as(slots_BL))
        slot_ranks_BS[:, self._padding_slot] = HIDDEN
        return CacheWindow(slots_BL, (slots_BL.T + first_B).flatten(), ranks_BL, slot_ranks_BS)

    def write(self, layer: int, window: CacheWindow, keys_BLHD: Tensor, values_BLHD: Tensor) -> tuple[Tensor, Tensor]:
        """Put one layer's keys and values into the slots of the window.

        Returns:
            Keys and values of all slots, [B, S, H, D]; views of the cache, to be read before the next pass.
        """
        kept = self.memory.layer(layer, keys_BLHD)
        for kept_BSHD, new_BLHD in zip(kept, (keys_BLHD, values_BLHD), strict=True):
            # Position by position, as layers lay them: rows by rows they would be copied first.
            kept_BSHD.flatten(0, 1).index_copy_(0, window.places_N, new_BLHD.transpose(0, 1).flatten(0, 1))
        return tuple(kept_BSHD[: len(keys_BLHD)] for kept_BSHD in kept)

    def hold(self, window: CacheWindow, kept_BL: Tensor | None = None) -> None:
        """Keep what the pass has written, for later passes; with ``kept_BL``, bool, at these positions only."""
        slots_BL = window.slots_BL
        if kept_BL is not None:
            slots_BL = slots_BL.where(kept_BL, self._padding_slot)
        # Of the first rows; the others stay as they are.
        self.held_BS.scatter_(1, slots_BL, True)
        self.held_BS[:, self._padding_slot] = False
