"""What scorers with a cache of the model's share: the canvas, the passes over blocks, and whose rows are in the cache.

Shape letters: B rows, T canvas positions, L positions of one pass, V vocabulary.
"""

from collections.abc import Sequence
from copy import copy
from typing import Any, NamedTuple, Self

import numpy
import torch
from torch import Tensor

from nemo_dllm.collections.diffusion.sampling.blocks import (
    Canvas,
    Window,
    gather_window,
    rows_and_columns,
    take,
    window_entries,
)
from nemo_dllm.collections.diffusion.sampling.device import on_device
from nemo_dllm.collections.diffusion.sampling.joining import Picked, join_attribute
from nemo_dllm.collections.diffusion.sampling.model_function import CachedDenoiser


class Pass(NamedTuple):
    """What a pass over some positions needs besides their tokens.

    Attributes:
        chosen_BT: bool, the positions, on the CPU.
        window: the same.
        places_BL: int64, the same, counted row after row.
        positions_BL, key_mask_BL, blocks_BL: as of ``CachedDenoiser``, on the model's device.
    """

    chosen_BT: Tensor
    window: Window
    places_BL: numpy.ndarray
    positions_BL: Tensor
    key_mask_BL: Tensor
    blocks_BL: Tensor


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

    def rehearse(self, tokens_BT: Tensor, places: Sequence[int]) -> None:
        """What a step begins with."""
        self._tokens_of(self._pass, tokens_BT)

    def _pass_over(self, chosen_BT: Tensor) -> Pass:
        """A pass over these positions."""
        window, (rows, width) = gather_window(chosen_BT), chosen_BT.shape
        places_BL = window.index_BL.numpy() + numpy.arange(0, rows * width, width)[:, None]
        positions_BL, blocks_BL = (self._at(places_BL, x_BT) for x_BT in (self._positions_BT, self._canvas.blocks_BT))
        return Pass(chosen_BT, window, places_BL, positions_BL, on_device(window.valid_BL, self._device), blocks_BL)

    def _tokens_of(self, at: Pass, tokens_BT: Tensor) -> Tensor:
        """Int64 [B, L], on the model's device."""
        return self._at(at.places_BL, tokens_BT)

    def _at(self, places_BL: numpy.ndarray, x_BT: Tensor) -> Tensor:
        """What is at some places of a canvas, on the model's device."""
        return on_device(torch.from_numpy(take(x_BT, places_BL)), self._device)

    def _take(self, chosen_BT: Tensor, shifted: bool) -> None:
        """Let ``_denoise`` give these positions to the model; ``shifted`` as of ``window_entries``."""
        self._pass = self._pass_over(chosen_BT)
        self._entries_BT = window_entries(chosen_BT, self._pass.positions_BL.shape[1], shifted)

    def _denoise(self, tokens_BT: Tensor) -> Tensor:
        """Logits [B, L, V]; ``_entries_BT`` tells which of them are those for a position."""
        at = self._pass
        tokens_BL = self._tokens_of(at, tokens_BT)
        return self._model.denoise(tokens_BL, at.positions_BL, self._cache, key_mask_BL=at.key_mask_BL)

    def _logits_of(self, places: Sequence[int], logits_BLV: Tensor) -> Tensor:
        """Those [N, V] for some places; of a block without any token yet they are all of them, as they are."""
        entries_N = take(self._entries_BT, places)
        rows, length = logits_BLV.shape[:2]
        if len(entries_N) == rows * length and (entries_N == numpy.arange(rows * length)).all():
            return logits_BLV.flatten(0, 1)
        return logits_BLV[rows_and_columns(entries_N, length, self._device)]
