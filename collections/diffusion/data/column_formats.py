"""Parquet files and Hugging Face datasets, whose rows have columns and can be read from anywhere."""

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from nemo_dllm.collections.diffusion.data.parts import Part, Record, Row, text_row
from nemo_dllm.collections.diffusion.data.sources import Source, load_dataset

if TYPE_CHECKING:
    import pyarrow as pa


def parquet_parts(source: Source, part_bytes: int) -> Iterator[Part]:
    from pyarrow import parquet

    with parquet.ParquetFile(source.name) as file:
        names = file.schema_arrow.names
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"{source.name}: has several columns of the name {', '.join(repeated)}; rename them")
        groups = [file.metadata.row_group(index) for index in range(file.num_row_groups)]
    first_group, first_row, num_rows, size = 0, 1, 0, 0
    for index, group in enumerate(groups):
        num_rows, size = num_rows + group.num_rows, size + group.total_byte_size
        if size >= part_bytes or index == len(groups) - 1:
            span = (first_group, index + 1)
            on_disk = source.size * (span[1] - span[0]) // len(groups)
            yield Part(source.name, source.format, on_disk, first_row, span=span)
            first_group, first_row, num_rows, size = index + 1, first_row + num_rows, 0, 0


def dataset_parts(source: Source, part_bytes: int) -> Iterator[Part]:
    dataset = load_dataset(source.name, source.split)
    rows_per_part = max(1, part_bytes * len(dataset) // max(source.size, 1))
    for start in range(0, len(dataset), rows_per_part):
        stop = min(start + rows_per_part, len(dataset))
        size = source.size * (stop - start) // len(dataset)
        yield Part(source.name, source.format, size, start + 1, span=(start, stop), split=source.split)


def parquet_columns(source: Source) -> list[str]:
    from pyarrow import parquet

    return parquet.read_schema(source.name).names


def dataset_columns(source: Source) -> list[str]:
    return load_dataset(source.name, source.split).column_names


def parquet_rows(part: Part, text_field: str) -> Iterator[Row]:
    from pyarrow import parquet

    with parquet.ParquetFile(part.source) as file:
        column = file.read_row_groups(list(range(*part.span)), columns=[text_field]).column(0)
    values = enumerate(_values(column), start=part.first_row)
    return (
        Row(number, None, _unreadable(value)) if isinstance(value, Exception) else text_row(number, value, text_field)
        for number, value in values
    )


def dataset_rows(part: Part, text_field: str) -> Iterator[Row]:
    dataset = load_dataset(part.source, part.split).select_columns([text_field])
    values = enumerate(dataset[slice(*part.span)][text_field], start=part.first_row)
    return (text_row(number, value, text_field) for number, value in values)


def parquet_records(part: Part) -> Iterator[Record]:
    from pyarrow import parquet

    with parquet.ParquetFile(part.source) as file:
        table = file.read_row_groups(list(range(*part.span)))
    rows = enumerate(_values(table.to_struct_array()), start=part.first_row)
    return itertools.starmap(_record, rows)


def dataset_records(part: Part) -> Iterator[Record]:
    rows = load_dataset(part.source, part.split).select(range(*part.span))
    return itertools.starmap(_record, enumerate(rows, start=part.first_row))


def _values(column: "pa.ChunkedArray") -> Iterator[object]:
    """Python's values; an error in the place of what is declared as text or a date and is none: no writer checks it."""
    for scalar in column:
        try:
            yield scalar.as_py()
        except (ValueError, OverflowError) as error:
            yield error


def _record(number: int, fields: dict | Exception) -> Record:
    if isinstance(fields, Exception):
        return Record(number, None, _unreadable(fields))
    return Record(number, {name: _without_nulls(value) for name, value in fields.items()})


def _without_nulls(value: object) -> object:
    """Without the fields that are null within lists and objects: a column gives each of them the fields of all."""
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _unreadable(error: Exception) -> str:
    if not isinstance(error, UnicodeDecodeError):
        return f"a value cannot be read, {error}"
    return f"not UTF-8, byte 0x{error.object[error.start]:02x} at place {error.start + 1} of a field"
