"""Memory of caches that are gone, with the passes that were recorded over it, for the next ones of the same shape.

Torch only. Shape letters: B rows, S slots.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import RLock
from typing import Self, TypeVar
from weakref import finalize

import torch

from nemo_dllm.collections.diffusion.inference.recorded import RecordedPasses, Recorder
from nemo_dllm.collections.diffusion.sampling import CacheMemory, KVCache
from nemo_dllm.collections.diffusion.sampling.joining import Picked

T = TypeVar("T")
SLOTS = 128
"""Slots of a cache are a multiple of this, so that texts of about one length share memory and passes."""
ROWS = 16
"""Its rows too, or a power of two below, so that rows which come and go do."""
SPARE = 1024
"""A cache may have so many slots more than it needs, of all rows together, so that few memories serve texts of all
lengths: a recorded pass looks at every slot."""
KEPT = 8
"""Memories of a pool that wait for a cache, at most."""
SHARE = 8
"""They take at most one in so many bytes of the device."""
RECORDED_LENGTHS = 64
"""Longer passes with a cache are recorded over a multiple of so many positions at least, the last ones idle."""


@dataclass(eq=False)
class RecordedMemory:
    """Memory of a cache, and what was recorded over it."""

    memory: CacheMemory
    passes: RecordedPasses

    @property
    def size(self) -> int:
        """Bytes of keys and values."""
        return sum(part.nbytes for layer in self.memory.layers.values() for part in layer)

    def serves(self, rows: int, slots: int) -> bool:
        """Whether it is for so many rows, and for slots which are as many or few more."""
        has_rows, has_slots = self.memory.held_BS.shape
        return has_rows == rows and 0 <= (has_slots - slots) * rows <= SPARE


class CachePool:
    """Where the caches of one model get their memory.

    A recorded pass reads and writes keys and values where they lie. What a cache leaves behind is therefore kept for
    the next one of about as many rows and slots, whose passes need not be recorded again.

    Args:
        recorder: of the model.
        device: of the model.
        most_bytes: of keys and values that wait for a cache.
    """

    def __init__(self, recorder: Recorder, device: torch.device, most_bytes: int):
        self._recorder, self._device, self._most_bytes = recorder, device, most_bytes
        # A cache may end, and give its memory back, at any time: on another thread, or on this one between two lines.
        self._lock = RLock()
        # Replaced and never changed.
        self._idle: tuple[RecordedMemory, ...] = ()

    def new_cache(self, rows: int, positions: int) -> "PooledCache":
        """An empty cache; see ``CachedDenoiser``."""
        shape = PooledCache.shape(rows, positions)
        with self._lock:
            taken = next((kept for kept in reversed(self._idle) if kept.serves(*shape)), None)
            self._idle = tuple(kept for kept in self._idle if kept is not taken)
        if taken is None:
            taken = RecordedMemory(CacheMemory.empty(*shape, self._device), RecordedPasses(self._recorder))
        else:
            taken.memory.held_BS.zero_()
            # Of one dtype: among others each would be a launch of its own.
            torch._foreach_zero_([part for layer in taken.memory.layers.values() for part in layer])
        cache = PooledCache(self, taken)
        finalize(cache, self._give_back, taken).atexit = False
        return cache

    def _give_back(self, left: RecordedMemory) -> None:
        """Keep what a cache has left; the oldest go where that is too much."""
        if not left.memory.layers or (not left.passes.names and left.size > self._most_bytes // KEPT):
            return
        with self._lock:
            idle = (*self._idle, left)[-KEPT:]
            while sum(kept.size for kept in idle) > self._most_bytes:
                idle = idle[1:]
            self._idle = idle

    def with_room(self, work: Callable[[], T]) -> T:
        """``work()``; where memory is short, once more without what waits for a cache.

        Args:
            work: may be done again after it was broken off.
        """
        try:
            return work()
        except torch.OutOfMemoryError:
            with self._lock:
                waiting, self._idle = self._idle, ()
            if not waiting:
                raise
        # Behind the error, which holds what was made on the way to it.
        del waiting
        return work()


def _rows_for(rows: int) -> int:
    return 1 << (rows - 1).bit_length() if rows < ROWS else multiple_of(rows, ROWS)


def multiple_of(least: int, of: int) -> int:
    """The least multiple of a number that is not below another one."""
    return -(-least // of) * of


def recorded_length(length: int, *, varies: bool) -> int:
    """The length that passes of about so many positions are recorded over: there are two to an octave, or four.

    Args:
        length: of a pass.
        varies: short ones are recorded as they are unless their lengths do.
    """
    if not varies and length <= RECORDED_LENGTHS:
        return length
    octave = 1 << (length - 1).bit_length()
    step = octave // 4 if length <= RECORDED_LENGTHS else max(octave // 8, RECORDED_LENGTHS)
    return multiple_of(length, max(step, 1))


class PooledCache(KVCache):
    """A cache with memory of a pool, for some rows more, and the passes that were recorded over it.

    Args:
        pool: where it got the memory.
        of: that memory, empty.
    """

    def __init__(self, pool: CachePool, of: RecordedMemory):
        # Not that of other caches, which makes memory.
        self.pool, self.memory, self.passes = pool, of.memory, of.passes

    @staticmethod
    def shape(rows: int, positions: int) -> tuple[int, int]:
        """Rows and slots of memory for so many rows and positions."""
        return _rows_for(rows), multiple_of(positions + 1, SLOTS)

    def another(self, rows: int, positions: int) -> Self:
        """An empty cache of the same pool."""
        return self.pool.new_cache(rows, positions)

    @classmethod
    def join_rows(cls, picked: Sequence[Picked], positions: int) -> Self:
        """See ``KVCache``."""
        return picked[0].part.pool.with_room(partial(super().join_rows, picked, positions))
