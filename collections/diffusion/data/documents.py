"""Corpora on disk as parts, and parts as numbered rows: JSONL, Parquet, plain text, Hugging Face datasets.

A part is read and encoded on its own. How a corpus falls into parts depends on the corpus alone.
"""

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from nemo_dllm.collections.diffusion.data.sources import COMPRESSIONS, Source, load_dataset

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


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


def check_columns(sources: Sequence[Source], text_field: str) -> None:
    """Check the schemas of all inputs that have one.

    Raises:
        ValueError: inputs are damaged or lack the column `text_field`; names them.
    """
    problems = []
    for source in sources:
        read_columns = _READERS[source.format].columns
        if read_columns is None:
            continue
        with _naming(source):
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
    with _naming(source):
        yield from _READERS[source.format].parts(source, part_bytes)


def rows_of(part: Part, text_field: str) -> Iterator[Row]:
    """The rows of a part, blank lines left out."""
    return _READERS[part.format].rows(part, text_field)


def records_of(source: Source, part_bytes: int = 2**22) -> Iterator[Record]:
    """All rows of one input with all their fields, blank lines left out.

    Raises:
        ValueError: the format has no fields, or the file is damaged; names the file.
    """
    read = _READERS[source.format].records
    if read is None:
        known = ", ".join(name for name, reader in _READERS.items() if reader.records)
        raise ValueError(f"{source.name}: is of format {source.format}, whose rows have no fields; known: {known}")
    return (record for part in parts_of(source, part_bytes) for record in read(part))


@contextlib.contextmanager
def _naming(source: Source) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (OSError, pa.ArrowInvalid) as error:
        raise ValueError(f"{source.name}: cannot be read as {source.format}: {error}") from error


def _line_parts(source: Source, part_bytes: int) -> Iterator[Part]:
    first_row, before, rest = 1, 0, b""
    for block, position in _blocks(source.name, part_bytes):
        head, newline, tail = block.rpartition(b"\n")
        if not newline:
            rest += block
            continue
        content = rest + head + newline
        if first_row == 1:
            content = content.removeprefix(_BYTE_ORDER_MARK)
        yield Part(source.name, source.format, position - before, first_row, content)
        first_row, before, rest = first_row + content.count(b"\n"), position, tail
    if rest:
        content = rest.removeprefix(_BYTE_ORDER_MARK) if first_row == 1 else rest
        yield Part(source.name, source.format, source.size - before, first_row, content)


def _text_parts(source: Source, part_bytes: int) -> Iterator[Part]:
    content = b"".join(block for block, _ in _blocks(source.name, part_bytes)).removeprefix(_BYTE_ORDER_MARK)
    if content:
        yield Part(source.name, source.format, source.size, 1, content)


def _blocks(name: str, part_bytes: int) -> Iterator[tuple[bytes, int]]:
    """Decompressed bytes, with the position in the file after them."""
    import pyarrow as pa

    with pa.OSFile(name) as file:
        compression = COMPRESSIONS.get(Path(name).suffix)
        # An empty file is not a valid compressed one.
        stream = pa.CompressedInputStream(file, compression) if compression and file.size() else file
        while block := stream.read(part_bytes):
            yield block, file.tell()


def _parquet_parts(source: Source, part_bytes: int) -> Iterator[Part]:
    from pyarrow import parquet

    with parquet.ParquetFile(source.name) as file:
        groups = [file.metadata.row_group(index) for index in range(file.num_row_groups)]
    first_group, first_row, num_rows, size = 0, 1, 0, 0
    for index, group in enumerate(groups):
        num_rows, size = num_rows + group.num_rows, size + group.total_byte_size
        if size >= part_bytes or index == len(groups) - 1:
            span = (first_group, index + 1)
            on_disk = source.size * (span[1] - span[0]) // len(groups)
            yield Part(source.name, source.format, on_disk, first_row, span=span)
            first_group, first_row, num_rows, size = index + 1, first_row + num_rows, 0, 0


def _dataset_parts(source: Source, part_bytes: int) -> Iterator[Part]:
    dataset = load_dataset(source.name, source.split)
    rows_per_part = max(1, part_bytes * len(dataset) // max(source.size, 1))
    for start in range(0, len(dataset), rows_per_part):
        stop = min(start + rows_per_part, len(dataset))
        size = source.size * (stop - start) // len(dataset)
        yield Part(source.name, source.format, size, start + 1, span=(start, stop), split=source.split)


def _parquet_columns(source: Source) -> list[str]:
    from pyarrow import parquet

    return parquet.read_schema(source.name).names


def _dataset_columns(source: Source) -> list[str]:
    return load_dataset(source.name, source.split).column_names


def _json_rows(part: Part, text_field: str) -> Iterator[Row]:
    for number, fields, problem in _json_records(part):
        if problem:
            yield Row(number, None, problem)
        elif text_field not in fields:
            known = ", ".join(map(repr, itertools.islice(fields, 8)))
            yield Row(number, None, f"no field {text_field!r}, only {known}")
        else:
            yield _value_row(number, fields[text_field], text_field)


def _json_records(part: Part) -> Iterator[Record]:
    for number, line in _lines(part):
        try:
            row = json.loads(line)
        except UnicodeDecodeError as error:
            yield Record(number, None, _not_utf8(error))
        except json.JSONDecodeError as error:
            whole_array = " (an array over many lines? write one object per line)" if line[:1] == b"[" else ""
            yield Record(number, None, f"broken JSON, {error.msg} at column {error.colno}{whole_array}")
        except RecursionError:
            yield Record(number, None, "broken JSON, nested too deeply")
        else:
            problem = None if isinstance(row, dict) else f"a JSON {type(row).__name__}, not an object"
            yield Record(number, None if problem else row, problem)


def _value_row(number: int, value: object, text_field: str) -> Row:
    if not isinstance(value, str):
        return Row(number, None, f"field {text_field!r} is {type(value).__name__}, not text")
    try:
        value.encode()
    except UnicodeEncodeError:
        return Row(number, None, f"field {text_field!r} has half of a surrogate pair")
    return Row(number, value)


def _line_rows(part: Part, text_field: str) -> Iterator[Row]:
    return (_decoded_row(number, line) for number, line in _lines(part))


def _text_rows(part: Part, text_field: str) -> Iterator[Row]:
    yield Row(1, None, "binary, it has NUL bytes") if b"\0" in part.content else _decoded_row(1, part.content)


def _lines(part: Part) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(part.content.split(b"\n"), start=part.first_row):
        if stripped := line.strip():
            yield number, stripped if part.format == "jsonl" else line.removesuffix(b"\r")


def _decoded_row(number: int, content: bytes) -> Row:
    try:
        return Row(number, content.decode())
    except UnicodeDecodeError as error:
        return Row(number, None, _not_utf8(error))


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"not UTF-8, byte 0x{error.object[error.start]:02x} at column {error.start + 1}"


def _parquet_rows(part: Part, text_field: str) -> Iterator[Row]:
    from pyarrow import parquet

    with parquet.ParquetFile(part.source) as file:
        column = file.read_row_groups(list(range(*part.span)), columns=[text_field]).column(0)
    return _column_rows(part, column.to_pylist(), text_field)


def _dataset_rows(part: Part, text_field: str) -> Iterator[Row]:
    dataset = load_dataset(part.source, part.split).select_columns([text_field])
    return _column_rows(part, dataset[slice(*part.span)][text_field], text_field)


def _parquet_records(part: Part) -> Iterator[Record]:
    from pyarrow import parquet

    with parquet.ParquetFile(part.source) as file:
        fields = file.read_row_groups(list(range(*part.span))).to_pylist()
    return itertools.starmap(Record, enumerate(fields, start=part.first_row))


def _dataset_records(part: Part) -> Iterator[Record]:
    rows = load_dataset(part.source, part.split).select(range(*part.span))
    return itertools.starmap(Record, enumerate(rows, start=part.first_row))


def _column_rows(part: Part, values: Sequence[object], text_field: str) -> Iterator[Row]:
    return (_value_row(number, value, text_field) for number, value in enumerate(values, start=part.first_row))


_READERS = {
    "jsonl": Reader(_line_parts, _json_rows, _json_records),
    "parquet": Reader(_parquet_parts, _parquet_rows, _parquet_records, _parquet_columns),
    "text": Reader(_text_parts, _text_rows),
    "lines": Reader(_line_parts, _line_rows),
    "dataset": Reader(_dataset_parts, _dataset_rows, _dataset_records, _dataset_columns),
}
