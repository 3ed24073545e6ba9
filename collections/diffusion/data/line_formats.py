"""Files of lines and of text, read as streams, compressed or not: JSON lines, lines, and texts."""

import codecs
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

from nemo_dllm.collections.diffusion.data.parts import Part, Record, Row, text_row
from nemo_dllm.collections.diffusion.data.sources import Source, compression_of


def line_parts(source: Source, part_bytes: int) -> Iterator[Part]:
    first_row, before, rest = 1, 0, b""
    for block, position in _blocks(source.name, part_bytes):
        head, newline, tail = block.rpartition(b"\n")
        if not newline:
            rest += block
            continue
        content = rest + head + newline
        if first_row == 1:
            content = content.removeprefix(codecs.BOM_UTF8)
        yield Part(source.name, source.format, position - before, first_row, content)
        first_row, before, rest = first_row + content.count(b"\n"), position, tail
    if rest:
        content = rest.removeprefix(codecs.BOM_UTF8) if first_row == 1 else rest
        yield Part(source.name, source.format, source.size - before, first_row, content)


def json_parts(source: Source, part_bytes: int) -> Iterator[Part]:
    """JSON objects, one per line, or in one array, whose rows are then its elements."""
    first_block = next(_blocks(source.name, part_bytes), (b"", 0))[0]
    begins_array = first_block.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["
    elements = _array_elements(source, part_bytes) if begins_array else None
    if elements is None:
        yield from line_parts(source, part_bytes)
        return
    first_row = 1
    while first_row <= len(elements):
        lines, size = [], 0
        for position in range(first_row - 1, len(elements)):
            lines.append(json.dumps(elements[position]).encode())
            size += len(lines[-1])
            if size >= part_bytes:
                break
        on_disk = source.size * len(lines) // len(elements)
        yield Part(source.name, source.format, on_disk, first_row, b"\n".join(lines))
        first_row += len(lines)


def _array_elements(source: Source, part_bytes: int) -> list | None:
    """The elements of the one array that the file is, or None: a line may be an array too.

    Raises:
        ValueError: the file's name says that it is one value (.json), and it breaks below its first line.
    """
    try:
        content = json.loads(b"".join(block for block, _ in _blocks(source.name, part_bytes)))
    except json.JSONDecodeError as error:
        if error.lineno == 1 or ".json" not in Path(source.name.lower()).suffixes:
            return None
        raise ValueError(
            f"{source.name}:{error.lineno}: the array that the file is breaks, {error.msg} at column {error.colno}; "
            "mend it, or write an object per line"
        ) from error
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, list) and any(isinstance(element, dict) for element in content) else None


def text_parts(source: Source, part_bytes: int) -> Iterator[Part]:
    content = b"".join(block for block, _ in _blocks(source.name, part_bytes)).removeprefix(codecs.BOM_UTF8)
    if content:
        yield Part(source.name, source.format, source.size, 1, content)


def _blocks(name: str, part_bytes: int) -> Iterator[tuple[bytes, int]]:
    """Decompressed bytes, with the position in the file after them."""
    import pyarrow as pa

    with pa.OSFile(name) as file:
        compression = compression_of(Path(name))
        # An empty file is not a valid compressed one.
        stream = pa.CompressedInputStream(file, compression) if compression and file.size() else file
        while block := stream.read(part_bytes):
            yield block, file.tell()


def json_rows(part: Part, text_field: str) -> Iterator[Row]:
    for number, fields, problem in json_records(part):
        if problem:
            yield Row(number, None, problem)
        elif text_field not in fields:
            known = ", ".join(map(repr, itertools.islice(fields, 8)))
            yield Row(number, None, f"no field {text_field!r}, only {known}")
        else:
            yield text_row(number, fields[text_field], text_field)


def json_records(part: Part) -> Iterator[Record]:
    for number, line in _lines(part):
        try:
            # `json` itself takes bytes for UTF-16 where they look like it. Files put together have marks inside.
            row = json.loads(line.removeprefix(codecs.BOM_UTF8).decode())
        except UnicodeDecodeError as error:
            yield Record(number, None, _not_utf8(error))
        except json.JSONDecodeError as error:
            yield Record(number, None, f"broken JSON, {error.msg} at column {error.colno}")
        except RecursionError:
            yield Record(number, None, "broken JSON, nested too deeply")
        except ValueError:
            yield Record(number, None, "broken JSON, a number with more digits than can be read")
        else:
            problem = None if isinstance(row, dict) else f"a JSON {type(row).__name__}, not an object"
            yield Record(number, None if problem else row, problem)


def line_rows(part: Part, text_field: str) -> Iterator[Row]:
    return (_decoded_row(number, line) for number, line in _lines(part))


def text_rows(part: Part, text_field: str) -> Iterator[Row]:
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
