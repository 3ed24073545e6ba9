"""Pieces of a corpus, and rows of them."""

from typing import NamedTuple

from nemo_dllm.collections.diffusion.characters import check_characters


class Part(NamedTuple):
    """A piece of one input.

    source: the file or dataset, as it is named in messages.
    format: name in `sources.FORMATS`.
    size: bytes of the input on disk that the part stands for (an estimate, for progress).
    first_row: number of its first row; rows (lines in files of lines, files of text) count from 1.
    content: the bytes themselves where the input is a stream, else None.
    span: first and last (exclusive) row group or row, where the input has random access.
    split: of a dataset with several, else None.
    """

    source: str
    format: str
    size: int
    first_row: int
    content: bytes | None = None
    span: tuple[int, int] = (0, 0)
    split: str | None = None


class Row(NamedTuple):
    """One document, or what is wrong with it. `text` is None where `problem` says why it cannot be used."""

    number: int
    text: str | None
    problem: str | None = None


class Record(NamedTuple):
    """One row with all its fields, or what is wrong with it. `fields` is None where `problem` says so."""

    number: int
    fields: dict | None
    problem: str | None = None


def text_row(number: int, value: object, text_field: str) -> Row:
    """A row from the value of its text field."""
    if not isinstance(value, str):
        return Row(number, None, f"field {text_field!r} is {type(value).__name__}, not text")
    try:
        check_characters(value, f"field {text_field!r}")
    except ValueError as error:
        return Row(number, None, str(error))
    return Row(number, value)
