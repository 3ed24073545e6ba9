"""Rows that cannot be used: which, and why, in few words however many there are."""

import re
from collections.abc import Sequence
from typing import NamedTuple

# Of one reason; rows may hold anything, and reasons quote them.
_MOST_CHARACTERS = 400
_MOST_KINDS = 5
# What is particular to a row: numbers, what is quoted, and all that follows the first comma.
_PARTICULAR = re.compile(r"'[^']*'|\"[^\"]*\"|\d+")


class BadRow(NamedTuple):
    """A row that cannot be used. `row` counts from 1 and is the line in files of lines."""

    source: str
    row: int
    reason: str

    def __str__(self) -> str:
        return f"{self.source}:{self.row}: {self.reason}"

    @property
    def kind(self) -> str:
        """The reason without what is particular to the row."""
        return _PARTICULAR.sub("…", self.reason.partition(",")[0])


def bad_row(source: str, row: int, reason: str) -> BadRow:
    """A bad row whose reason is one line of bearable length."""
    reason = " ".join(reason.split())
    return BadRow(source, row, reason if len(reason) <= _MOST_CHARACTERS else f"{reason[:_MOST_CHARACTERS]}…")


def check_bad_rows(bad_rows: Sequence[BadRow], max_bad_rows: int) -> None:
    """Raise ValueError, with counts and examples, if there are more than `max_bad_rows`."""
    if len(bad_rows) > max_bad_rows:
        raise ValueError(
            f"{len(bad_rows):,} rows cannot be used, more than max_bad_rows={max_bad_rows}; mend the input, or raise "
            f"the limit to leave them out. They are:\n{describe_bad_rows(bad_rows)}"
        )


def check_max_bad_rows(max_bad_rows: int) -> None:
    """Raise ValueError for a negative limit."""
    if max_bad_rows < 0:
        raise ValueError(f"max_bad_rows={max_bad_rows} must be at least 0, which stops at the first bad row")


def describe_bad_rows(bad_rows: Sequence[BadRow]) -> str:
    """A line per kind with its count and first row, the most frequent kinds; what is not shown is counted."""
    kinds: dict[str, list[BadRow]] = {}
    for row in bad_rows:
        kinds.setdefault(row.kind, []).append(row)
    most_frequent = sorted(kinds.values(), key=len, reverse=True)
    lines = [f"  {len(rows):,} x {rows[0].reason.partition(',')[0]}, the first: {rows[0]}" for rows in most_frequent]
    hidden = most_frequent[_MOST_KINDS:]
    if hidden:
        lines[_MOST_KINDS:] = [
            f"  and {sum(map(len, hidden)):,} of {len(hidden)} more kinds, the first: {hidden[0][0]}"
        ]
    return "\n".join(lines)
