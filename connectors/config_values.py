"""What the values of a config.json may be: kinds of values, and those of the fields that all families have."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Kind(NamedTuple):
    """A kind of values."""

    fits: Callable[[Any], bool]
    text: str
    """What errors call it."""


def _is_whole(value: Any) -> bool:
    return type(value) is int


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_list_of_whole(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_whole, value))


ANYTHING = Kind(lambda value: True, "anything")
COUNT = Kind(lambda value: _is_whole(value) and value >= 1, "a whole number, 1 or more")
COUNT_OR_ZERO = Kind(lambda value: _is_whole(value) and value >= 0, "a whole number, 0 or more")
POSITIVE = Kind(lambda value: _is_number(value) and value > 0, "a number above 0")
NOT_NEGATIVE = Kind(lambda value: _is_number(value) and value >= 0, "a number, 0 or more")
SHARE = Kind(lambda value: _is_number(value) and 0 <= value <= 1, "a number from 0 to 1")
FLAG = Kind(lambda value: isinstance(value, bool), "true or false")
NAME = Kind(lambda value: isinstance(value, str), "text")
NAMES = Kind(lambda value: isinstance(value, list) and all(isinstance(v, str) for v in value), "a list of names")
NUMBERS = Kind(_is_list_of_whole, "a list of whole numbers")
FIELDS = Kind(lambda value: isinstance(value, dict), "an object with fields")
TOKENS = Kind(lambda value: _is_whole(value) or _is_list_of_whole(value), "the id of a token, or a list of them")

OF_ALL_FAMILIES: Mapping[str, Kind] = {
    "rope_theta": POSITIVE,
    "rope_scaling": FIELDS,
    "rope_parameters": FIELDS,
    "layer_types": NAMES,
    "bos_token_id": TOKENS,
    "eos_token_id": TOKENS,
    "pad_token_id": TOKENS,
    "unk_token_id": TOKENS,
    # Of diffusion models.
    "block_size": COUNT,
    "right_shift_logits": FLAG,
    "ar_loss_weight": NOT_NEGATIVE,
    "block_start": NAME,
}


def misfits(fields: Mapping[str, Any], kinds: Mapping[str, Kind]) -> list[str]:
    """The values that are not of their kind, each with what it must be; fields without a kind may be anything."""
    return [
        f"{name}={fields[name]!r} (must be {kind.text})"
        for name, kind in kinds.items()
        if name in fields and not kind.fits(fields[name])
    ]
