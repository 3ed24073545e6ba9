"""Looking a name up in a table, with one form of error for all of them."""

from collections.abc import Mapping
from typing import TypeVar

Entry = TypeVar("Entry")


def look_up(field: str, name: str, table: Mapping[str, Entry]) -> Entry:
    """Return ``table[name]``; ``ValueError`` names ``field``, the unknown ``name`` and the known ones."""
    if not isinstance(name, str) or name not in table:
        raise ValueError(f"{field}={name!r} is unknown; known: {', '.join(sorted(table))}")
    return table[name]
