"""Whether a setting's value is of the type that its field is declared with, and what else it should be."""

from collections.abc import Callable, Iterable
from numbers import Integral, Real
from types import NoneType
from typing import Any, NamedTuple, get_args, get_origin


class _Kind(NamedTuple):
    holds: Callable[[Any], bool]
    one: str
    several: str


def _is_number(value: Any, kind: type) -> bool:
    # Python counts True and False among the whole numbers.
    return isinstance(value, kind) and not isinstance(value, bool)


_KINDS = {
    int: _Kind(lambda value: _is_number(value, Integral), "a whole number", "whole numbers"),
    float: _Kind(lambda value: _is_number(value, Real), "a number", "numbers"),
    bool: _Kind(lambda value: isinstance(value, bool), "True or False", "truth values"),
    str: _Kind(lambda value: isinstance(value, str), "a text", "texts"),
}


def _of_python(value: Any, wanted: type) -> Any:
    """The same value, where another library's number holds it: JSON and checkpoints know Python's alone."""
    return value if isinstance(value, (int, float, str)) else wanted(value)


def of_type(name: str, value: Any, annotation: Any) -> Any:
    """The value of a setting; other sequences than tuples become tuples, and numpy's numbers Python's.

    Args:
        name: of the field.
        value: that a user gave.
        annotation: of the field: int, float, bool, str, a tuple of one of them of any length, or one with ``| None``.
            Values of all other fields are let pass.

    Raises:
        ValueError: it is of another type.
    """
    types = get_args(annotation) if get_origin(annotation) is not tuple else ()
    if value is None and NoneType in types:
        return None
    wanted = next((part for part in types if part is not NoneType), annotation)
    if len(set(types) - {NoneType}) > 1:
        return value
    if get_origin(wanted) is not tuple:
        kind = _KINDS.get(wanted)
        if kind is None:
            return value
        if not kind.holds(value):
            raise ValueError(f"{name}={value!r} must be {kind.one}" + (" or None" if NoneType in types else ""))
        return _of_python(value, wanted)
    part = get_args(wanted)[0]
    kind = _KINDS[part]
    if isinstance(value, str):
        raise ValueError(f"{name}={value!r} is a single text; give a tuple of {kind.several}")
    if not isinstance(value, Iterable) or not all(map(kind.holds, value := tuple(value))):
        raise ValueError(f"{name}={value!r} must be a tuple of {kind.several}")
    return tuple(_of_python(one, part) for one in value)
