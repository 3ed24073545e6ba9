"""Rows of several runs as the rows of one: one operation, ``join_rows``, which each part of a run does for itself.

``join_rows`` is a class method that gets ``Picked`` rows of parts of that class, and makes a part of these rows alone.
Each row goes on as it would have done where it was; the parts that it comes from are not used any more, and may become
the joined one. Scorers get the canvas of the new run too, and caches its width. A part that cannot do it has no such
method, and neither can then what holds it, which names it in ``row_parts``.

Shape letters: C columns (positions, slots, tokens of the vocabulary).
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from nemo_dllm.collections.diffusion.sampling.device import on_cpu, on_device


class Picked(NamedTuple):
    """Some rows of a run, or of a part of one.

    Attributes:
        part: what they are rows of.
        rows: their numbers there.
    """

    part: Any
    rows: Sequence[int]


class Placed(NamedTuple):
    """All picked rows of one part.

    Attributes:
        part: what they are rows of.
        rows: their numbers there.
        places: their numbers in what is joined.
    """

    part: Any
    rows: list[int]
    places: list[int]


def by_part(picked: Sequence[Picked]) -> list[Placed]:
    """The picked rows, each part once."""
    groups, place = {}, 0
    for part, rows in picked:
        group = groups.setdefault(id(part), Placed(part, [], []))
        group.rows.extend(rows)
        group.places.extend(range(place, place + len(rows)))
        place += len(rows)
    return list(groups.values())


def can_join_rows(part: Any) -> bool:
    """Whether rows of a part can be moved: it has ``join_rows``, and so have its ``row_parts``, if any."""
    return hasattr(part, "join_rows") and all(can_join_rows(inner) for inner in getattr(part, "row_parts", ()))


def keeps_places(part: Any, rows: int, columns: int) -> bool:
    """Whether rows that stay where they are, and others in places that are free, cost less than all rows moved.

    That is so for rows in a cache, whose memory is for so many rows and columns, and not much larger (``suits``).
    """
    caches = list(_caches(part))
    return bool(caches) and all(cache.suits(rows, columns) for cache in caches)


def _caches(part: Any) -> Iterator[Any]:
    if hasattr(part, "suits"):
        yield part
    for inner in getattr(part, "row_parts", ()):
        yield from _caches(inner)


def join_attribute(picked: Sequence[Picked], name: str, *size: Any) -> Any:
    """The picked rows of a part of parts, joined as its class does it."""
    inner = attribute_of(picked, name)
    return type(inner[0].part).join_rows(inner, *size)


def attribute_of(picked: Sequence[Picked], name: str) -> list[Picked]:
    """The same rows of what parts keep under a name."""
    return [Picked(getattr(part, name), rows) for part, rows in picked]


def pick_items(picked: Sequence[Picked]) -> list[Any]:
    """The picked items of several lists, in order."""
    return [items[row] for items, rows in picked for row in rows]


def stack_rows(picked: Sequence[Picked], columns: int | None = None) -> Tensor | None:
    """The picked rows of several tensors under each other.

    Args:
        picked: rows of tensors [rows, C, ...], or of None, which stands for zeros.
        columns: cut the second dimension to this size, or fill it with zeros; None leaves all sizes as they are.

    Returns:
        A new tensor; None where there is nothing but None.
    """
    known = next((tensor for tensor, _ in picked if tensor is not None), None)
    if known is None:
        return None
    sizes = known.shape[1:] if columns is None else (columns, *known.shape[2:])
    whole = known.new_zeros(sum(len(rows) for _, rows in picked), *sizes)
    for tensor, rows, places in by_part(picked):
        if tensor is None:
            continue
        room = whole
        if columns is not None:
            tensor, room = tensor[:, :columns], whole[:, : tensor.shape[1]]
        # Lists as an index would make the CPU wait for the device.
        rows_N, places_N = (on_device(on_cpu(of), tensor.device) for of in (rows, places))
        room.index_copy_(0, places_N, tensor.index_select(0, rows_N))
    return whole
