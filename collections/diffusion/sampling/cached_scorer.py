"""What scorers with a cache of the model's share: the canvas, and which rows of the cache belong to which run.

Shape letters: B rows, T canvas positions.
"""

from collections.abc import Sequence
from copy import copy
from typing import Any, Self

from nemo_dllm.collections.diffusion.sampling.blocks import Canvas
from nemo_dllm.collections.diffusion.sampling.joining import Picked, join_attribute
from nemo_dllm.collections.diffusion.sampling.model_function import CachedDenoiser


class CachedScorer:
    """A scorer as of ``scoring``, whose passes read and write a cache.

    Args:
        model: keeps keys and values.
        canvas: what is to be filled.
        right_shift: logits of a position predict the next one.
    """

    def __init__(self, model: CachedDenoiser, canvas: Canvas, right_shift: bool):
        self._model, self._canvas, self._right_shift = model, canvas, right_shift
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
