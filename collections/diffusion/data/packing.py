"""Several samples in one row of fixed length, each still on its own (see `document_ids`)."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Packs(NamedTuple):
    """Which samples share a row.

    members: [num_samples] int64, samples in the order of the rows.
    ends: [num_rows] int64, the position in `members` after each row's last sample.
    """

    members: np.ndarray
    ends: np.ndarray

    def row(self, row: int) -> np.ndarray:
        """The samples of one row."""
        return self.members[self.ends[row - 1] if row else 0 : self.ends[row]]


def pack_by_length(lengths: Sequence[int] | np.ndarray, capacity: int, seed: Sequence[int] | None = None) -> Packs:
    """Best-fit decreasing: samples from long to short, each into the fullest row that still has room.

    At most 11/9 of the fewest possible rows, plus one (Johnson, 1973); with many short samples, next to no waste. How
    many rows there are depends on the lengths alone, never on the seed.

    Args:
        lengths: [num_samples] tokens, each in [1, capacity].
        capacity: tokens of a row.
        seed: of numpy's generator; decides which of equally long samples go together, and the order of rows and of
            samples within a row. None leaves all in order.

    Raises:
        ValueError: a length is outside [1, capacity].
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if len(lengths) and not (lengths.min() >= 1 and lengths.max() <= capacity):
        worst = int(np.argmax((lengths < 1) | (lengths > capacity)))
        raise ValueError(f"sample {worst} has {lengths[worst]} tokens, a row holds 1 to {capacity}")
    generator = None if seed is None else np.random.default_rng(seed)
    candidates = np.arange(len(lengths)) if generator is None else generator.permutation(len(lengths))
    longest_first = candidates[np.argsort(-lengths[candidates], kind="stable")]
    rows = _best_fit(longest_first.tolist(), lengths.tolist(), capacity)
    if generator is not None:
        rows = [generator.permutation(rows[row]).tolist() for row in generator.permutation(len(rows))]
    members = np.fromiter((sample for row in rows for sample in row), dtype=np.int64, count=len(lengths))
    return Packs(members, np.cumsum([len(row) for row in rows], dtype=np.int64))


def _best_fit(samples: list[int], lengths: list[int], capacity: int) -> list[list[int]]:
    rows: list[list[int]] = []
    # Rows by the room that is left, and a bit per amount of room of which there is a row: the lowest bit that is high
    # enough is the best fit, without a search.
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    available = 0
    for sample in samples:
        length = lengths[sample]
        fitting = available >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = by_room[room].pop()
            if not by_room[room]:
                available &= ~(1 << room)
            rows[row].append(sample)
        else:
            room, row = capacity, len(rows)
            rows.append([sample])
        by_room[room - length].append(row)
        available |= 1 << (room - length)
    return rows
