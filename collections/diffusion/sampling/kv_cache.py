"""Keys and values by text position, for models that attend in plain torch.

Shape letters: B rows, L positions of one pass, S slots (one per position and one for padding), H key/value heads,
D head size.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nemo_dllm.collections.diffusion.sampling.joining import Picked, attribute_of, stack_rows


class CacheWindow(NamedTuple):
    """Where the positions of one pass lie in the cache.

    Attributes:
        rows_B1: int64 number of each row.
        slots_BL: int64 slot of each position.
        visible_BLS: bool, slots that a position may attend to; at least one everywhere, so that a softmax over them
            is finite for padding too. Its second size is 1 where all positions see the same.
        written_BS: bool, slots that the pass writes.
    """

    rows_B1: Tensor
    slots_BL: Tensor
    visible_BLS: Tensor
    written_BS: Tensor


class KVCache:
    """Keys and values of every layer in one slot per position; layers appear as they are first written.

    A pass asks for its ``window``, sends each layer's keys and values through ``write``, and attends to all slots under
    ``visible_BLS``. It writes in place: what it writes is visible to itself alone unless ``hold`` keeps it.

    Args:
        rows: rows of the batch.
        positions: longest row, in tokens.
        device: where keys and values are.
    """

    def __init__(self, rows: int, positions: int, device: torch.device | str | None = None):
        self._padding_slot = positions
        self._held_BS = torch.zeros(rows, positions + 1, dtype=torch.bool, device=device)
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @classmethod
    def join_rows(cls, picked: Sequence[Picked], positions: int) -> "KVCache":
        """A cache of rows of several others.

        Args:
            picked: rows of caches of the same layers; where one has not been written to, it holds nothing.
            positions: of the longest row, in tokens.
        """
        slots = positions + 1
        joined = cls(0, positions)
        joined._held_BS = stack_rows(attribute_of(picked, "_held_BS"), slots)
        for layer in sorted({layer for cache, _ in picked for layer in cache._layers}):
            kept = [(cache._layers.get(layer, (None, None)), rows) for cache, rows in picked]
            joined._layers[layer] = tuple(
                stack_rows([Picked(layer_kept[part], rows) for layer_kept, rows in kept], slots) for part in range(2)
            )
        return joined

    @property
    def held_BS(self) -> Tensor:
        """Bool, slots whose content later passes see; the last one, for padding, never is."""
        return self._held_BS

    def window(self, positions_BL: Tensor, key_mask_BL: Tensor, blocks_BL: Tensor | None = None) -> CacheWindow:
        """Where a pass over these positions writes and what it sees.

        Args:
            positions_BL, key_mask_BL, blocks_BL: as of ``CachedDenoiser.commit``; without blocks the positions see each
                other.
        """
        slots_BL = positions_BL.where(key_mask_BL, self._padding_slot)
        written_BS = torch.zeros_like(self._held_BS).scatter_(1, slots_BL, True)
        written_BS[:, self._padding_slot] = False
        if blocks_BL is None:
            visible_BLS = (self._held_BS | written_BS)[:, None]
        else:
            blocks_BS = torch.zeros_like(self._held_BS, dtype=torch.int64).scatter_(1, slots_BL, blocks_BL)
            earlier_BLS = blocks_BS[:, None] <= blocks_BL[:, :, None]
            visible_BLS = (self._held_BS & ~written_BS)[:, None] | (written_BS[:, None] & earlier_BLS)
        nothing_BL1 = ~visible_BLS.any(dim=-1, keepdim=True)
        padding_S = torch.arange(self._padding_slot + 1, device=slots_BL.device) == self._padding_slot
        rows_B1 = torch.arange(len(slots_BL), device=slots_BL.device)[:, None]
        return CacheWindow(rows_B1, slots_BL, visible_BLS | (nothing_BL1 & padding_S), written_BS)

    def write(self, layer: int, window: CacheWindow, keys_BLHD: Tensor, values_BLHD: Tensor) -> tuple[Tensor, Tensor]:
        """Put one layer's keys and values into the slots of the window.

        Returns:
            Keys and values of all slots, [B, S, H, D]; views of the cache, to be read before the next pass.
        """
        if layer not in self._layers:
            shape = (*self._held_BS.shape, *keys_BLHD.shape[2:])
            self._layers[layer] = (keys_BLHD.new_zeros(shape), values_BLHD.new_zeros(shape))
        for kept_BSHD, new_BLHD in zip(self._layers[layer], (keys_BLHD, values_BLHD), strict=True):
            kept_BSHD[window.rows_B1, window.slots_BL] = new_BLHD
        return self._layers[layer]

    def hold(self, window: CacheWindow, kept_BL: Tensor | None = None) -> None:
        """Keep what the pass has written, for later passes; with ``kept_BL``, bool, at these positions only."""
        written_BS = window.written_BS
        if kept_BL is not None:
            slots_BL = window.slots_BL.where(kept_BL, self._padding_slot)
            written_BS = written_BS & torch.zeros_like(written_BS).scatter_(1, slots_BL, True)
        self._held_BS |= written_BS
