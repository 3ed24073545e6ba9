"""Corpora on disk as parts, and parts as numbered rows: JSONL, Parquet, plain text, Hugging Face datasets.

A part is read and encoded on its own. How a corpus falls into parts depends on the corpus alone.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from nemo_dllm.collections.diffusion.data import column_formats, line_formats
from nemo_dllm.collections.diffusion.data.bad_rows import (
    BadRow,
    bad_row,
    check_bad_rows,
    check_max_bad_rows,
    describe_bad_rows,
)
from nemo_dllm.collections.diffusion.data.parts import Part, Record, Row
from nemo_dllm.collections.diffusion.data.sources import Source


class TextRows(NamedTuple):
    """Texts of rows, and the rows that have none, with the reason."""

    texts: list[str]
    bad_rows: list[BadRow]


class Reader(NamedTuple):
    """How one format is cut and read.

    parts: (source, part_bytes) -> parts.
    rows: (part, text_field) -> rows.
    records: part -> records; None where rows have no fields.
    columns: source -> names of its columns; None where only the rows tell.
    """

    parts: Callable[[Source, int], Iterator[Part]]
    rows: Callable[[Part, str], Iterator[Row]]
    records: Callable[[Part], Iterator[Record]] | None = None
    columns: Callable[[Source], Sequence[str]] | None = None


def check_text_column(sources: Sequence[Source], text_field: str) -> None:
    """Check the schemas of all inputs that have one.

    Raises:
        ValueError: inputs are damaged or lack the column `text_field`; names them.
    """
    problems = []
    for source in sources:
        read_columns = _READERS[source.format].columns
        if read_columns is None:
            continue
        with _naming(source.name, source.format):
            columns = read_columns(source)
        if text_field not in columns:
            problems.append(f"{source.name} has {', '.join(columns)}")
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(
            f"text_field={text_field!r} is not a column of {len(problems)} inputs: {'; '.join(problems[:5])}{more}"
        )


def parts_of(source: Source, part_bytes: int) -> Iterator[Part]:
    """Cut one input into parts of about `part_bytes`, in order.

    Raises:
        ValueError: the file is damaged; names the file.
    """
    with _naming(source.name, source.format):
        yield from _READERS[source.format].parts(source, part_bytes)


def rows_of(part: Part, text_field: str) -> Iterator[Row]:
    """The rows of a part, blank lines left out.

    Raises:
        ValueError: the file is damaged; names the file.
    """
    with _naming(part.source, part.format):
        yield from _READERS[part.format].rows(part, text_field)


def records_of(source: Source, part_bytes: int = 2**22) -> Iterator[Record]:
    """All rows of one input with all their fields, blank lines left out.

    Raises:
        ValueError: the format has no fields, or the file is damaged; names the file.
    """
    read = _READERS[source.format].records
    if read is None:
        known = ", ".join(name for name, reader in _READERS.items() if reader.records)
        raise ValueError(
            f"{source.name}: is of format {source.format}, whose rows have no fields; known: {known}. Texts are "
            "encoded first (nemo-dllm data preprocess), and shown as a corpus"
        )
    for part in parts_of(source, part_bytes):
        with _naming(part.source, part.format):
            yield from read(part)


def first_fields(sources: Sequence[Source]) -> Mapping[str, Any]:
    """The first row that can be read; empty where none can.

    Raises:
        ValueError: see `records_of`.
    """
    records = itertools.chain.from_iterable(map(records_of, sources))
    return next((record.fields for record in records if record.fields is not None), {})


def read_text_rows(
    sources: Sequence[Source], text_field: str = "text", max_bad_rows: int = 0, max_texts: int | None = None
) -> TextRows:
    """The texts of rows, empty ones left out.

    Args:
        sources: to read, in order.
        text_field: field or column with the text.
        max_bad_rows: rows that cannot be used before this gives up.
        max_texts: texts to read, from the first; None is all.

    Raises:
        ValueError: a file is damaged or lacks the column, there are too many bad rows, or no good one; names file, row
            and field.
    """
    check_max_bad_rows(max_bad_rows)
    check_text_column(sources, text_field)
    found = TextRows([], [])
    for part in itertools.chain.from_iterable(parts_of(source, 2**22) for source in sources):
        for row in rows_of(part, text_field):
            if len(found.texts) == max_texts:
                return found
            if row.problem:
                found.bad_rows.append(bad_row(part.source, row.number, row.problem))
                check_bad_rows(found.bad_rows, max_bad_rows)
            elif row.text:
                found.texts.append(row.text)
    if not found.texts:
        names = ", ".join(source.name for source in sources[:5])
        raise ValueError(f"{names}: no row has a text\n{describe_bad_rows(found.bad_rows)}".rstrip())
    return found


@contextlib.contextmanager
def _naming(name: str, format: str) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise ValueError(
            f"{name}: cannot be read as {format}: {str(error).rstrip('.')}; it is damaged, or something else: mend it, "
            "or leave it out"
        ) from error


_READERS = {
    "jsonl": Reader(line_formats.json_parts, line_formats.json_rows, line_formats.json_records),
    "parquet": Reader(
        column_formats.parquet_parts,
        column_formats.parquet_rows,
        column_formats.parquet_records,
        column_formats.parquet_columns,
    ),
    "text": Reader(line_formats.text_parts, line_formats.text_rows),
    "lines": Reader(line_formats.line_parts, line_formats.line_rows),
    "dataset": Reader(
        column_formats.dataset_parts,
        column_formats.dataset_rows,
        column_formats.dataset_records,
        column_formats.dataset_columns,
    ),
}
