"""What scorers with a cache of the model's share: the canvas, the passes over blocks, and whose rows are in the cache.

Shape letters: B rows, T canvas positions, L positions of one pass, V vocabulary.
"""

from collections.abc import Sequence
from copy import copy
from typing import Any, Self

import torch
from torch import Tensor

from nemo_dllm.collections.diffusion.sampling.blocks import Canvas, gather_window, on_device, window_places
from nemo_dllm.collections.diffusion.sampling.joining import Picked, join_attribute
from nemo_dllm.collections.diffusion.sampling.model_function import CachedDenoiser


class CachedScorer:
    """A scorer as of ``scoring``, whose passes read and write a cache.

    Args:
        model: keeps keys and values.
        canvas: what is to be filled.
        right_shift: logits of a position predict the next one.
        device: of the model.
    """

    def __init__(self, model: CachedDenoiser, canvas: Canvas, right_shift: bool, device: torch.device):
        self._model, self._canvas, self._right_shift, self._device = model, canvas, right_shift, device
        self._positions_BT = canvas.positions_BT
        self._cache = model.new_cache(*canvas.keys_BT.shape)

    @property
    def row_parts(self) -> tuple[Any, ...]:
        """See ``joining``."""
        return (self._cache,)

    @classmethod
    def _with_rows(cls, picked: Sequence[Picked], canvas: Canvas) -> Self:
        """The scorer of rows of several runs; what else a class knows of each row, its ``join_rows`` brings along."""
        joined = copy(picked[0].part)
        joined._canvas, joined._positions_BT = canvas, canvas.positions_BT
        joined._cache = join_attribute(picked, "_cache", canvas.keys_BT.shape[1])
        return joined

    def _take(self, positions_BT: Tensor, shifted: bool) -> None:
        """Let ``_denoise`` give these positions to the model; ``shifted`` as of ``window_places``."""
        self._window = gather_window(positions_BT)
        self._positions_BL = on_device(self._positions_BT.gather(1, self._window.index_BL), self._device)
        self._key_mask_BL = on_device(self._window.valid_BL, self._device)
        self._places_2BT = window_places(positions_BT, shifted)

    def _denoise(self, tokens_BT: Tensor) -> Tensor:
        """Logits [B, L, V]; ``_places_2BT`` tells where in them those for a position are."""
        tokens_BL = on_device(tokens_BT.gather(1, self._window.index_BL), self._device)
        return self._model.denoise(tokens_BL, self._positions_BL, self._cache, key_mask_BL=self._key_mask_BL)
