"""Parquet files and Hugging Face datasets, whose rows have columns and can be read from anywhere."""

import itertools
from collections.abc import Iterator, Sequence

from nemo_dllm.collections.diffusion.data.parts import Part, Record, Row, text_row
from nemo_dllm.collections.diffusion.data.sources import Source, load_dataset


def parquet_parts(source: Source, part_bytes: int) -> Iterator[Part]:
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
    return _column_rows(part, column.to_pylist(), text_field)


def dataset_rows(part: Part, text_field: str) -> Iterator[Row]:
    dataset = load_dataset(part.source, part.split).select_columns([text_field])
    return _column_rows(part, dataset[slice(*part.span)][text_field], text_field)


def parquet_records(part: Part) -> Iterator[Record]:
    from pyarrow import parquet

    with parquet.ParquetFile(part.source) as file:
        fields = file.read_row_groups(list(range(*part.span))).to_pylist()
    return itertools.starmap(Record, enumerate(fields, start=part.first_row))


def dataset_records(part: Part) -> Iterator[Record]:
    rows = load_dataset(part.source, part.split).select(range(*part.span))
    return itertools.starmap(Record, enumerate(rows, start=part.first_row))


def _column_rows(part: Part, values: Sequence[object], text_field: str) -> Iterator[Row]:
    return (text_row(number, value, text_field) for number, value in enumerate(values, start=part.first_row))
