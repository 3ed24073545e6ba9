"""Fine-tuning data as ids: conversations of files and datasets, encoded once and kept on disk."""

import hashlib
import io
import itertools
import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from nemo_dllm.collections.diffusion.characters import check_characters
from nemo_dllm.collections.diffusion.data.bad_rows import (
    BadRow,
    bad_row,
    check_bad_rows,
    check_max_bad_rows,
    describe_bad_rows,
)
from nemo_dllm.collections.diffusion.data.cache import cached_folder, content_key
from nemo_dllm.collections.diffusion.data.chat import Conversation, check_columns, read_conversation
from nemo_dllm.collections.diffusion.data.chat_encoder import ENCODER_VERSION, ChatEncoder, EncodedChat
from nemo_dllm.collections.diffusion.data.documents import records_of
from nemo_dllm.collections.diffusion.data.parts import Record
from nemo_dllm.collections.diffusion.data.sources import Source, load_dataset
from nemo_dllm.collections.diffusion.data.tokenizer import tokenizer_content

# Changes whenever the files of the cache, or the way in which they are made, change.
LAYOUT_VERSION = "2"

# Fields of `SupervisedTokens` that tell where samples are.
_INDEX = ("ends", "first_answers", "rows")

_ROWS_PER_CALL = 512


class SupervisedTokens(NamedTuple):
    """Encoded conversations, one after another, untruncated.

    tokens: [num_tokens] uint32 ids.
    answer: [num_tokens] bool, True where a token is trained.
    ends: [num_samples] int64, the position after each sample's last token.
    first_answers: [num_samples] int64, position of the first answer token within its sample.
    rows: [num_samples, 2] int64, which source and which of its rows a sample is.
    """

    tokens: np.ndarray
    answer: np.ndarray
    ends: np.ndarray
    first_answers: np.ndarray
    rows: np.ndarray

    def starts(self) -> np.ndarray:
        """[num_samples] int64, the position of each sample's first token."""
        return np.concatenate([[0], self.ends[:-1]]) if len(self.ends) else np.zeros(0, np.int64)

    def content_hashes(self) -> np.ndarray:
        """[num_samples] float64 in [0, 1): equal for equal samples, and else as good as random."""
        pieces = zip(self.starts().tolist(), self.ends.tolist(), strict=True)
        digests = (hashlib.blake2b(self.tokens[start:end].tobytes(), digest_size=7).digest() for start, end in pieces)
        return np.array([int.from_bytes(digest, "big") / 2**56 for digest in digests])


class SupervisedCorpus(NamedTuple):
    """What was read.

    samples: the usable rows.
    bad_rows: rows left out, and why.
    sources: names, as `SupervisedTokens.rows` counts them.
    """

    samples: SupervisedTokens
    bad_rows: list[BadRow]
    sources: list[str]


def encode_supervised(
    sources: Sequence[Source], encoder: ChatEncoder, columns: Mapping[str, str] | None = None, max_bad_rows: int = 100
) -> SupervisedCorpus:
    """Encode all rows of the sources.

    Args:
        sources: of formats whose rows have fields.
        encoder: of conversations.
        columns: see `read_conversation`.
        max_bad_rows: rows that cannot be used before this gives up.

    Raises:
        ValueError: there are too many bad rows, or no good one; shows the first bad ones.
    """
    tokens, answer = io.BytesIO(), io.BytesIO()
    index = _write_rows(tokens, answer, sources, encoder, columns, max_bad_rows)
    samples = SupervisedTokens(
        np.frombuffer(tokens.getbuffer(), np.uint32), np.frombuffer(answer.getbuffer(), bool), *index.arrays
    )
    return SupervisedCorpus(samples, index.bad_rows, [source.name for source in sources])


def check_conversations(
    sources: Sequence[Source], columns: Mapping[str, str] | None = None, max_bad_rows: int = 100
) -> None:
    """Find out, without a tokenizer, whether the rows are conversations.

    Args:
        sources, columns, max_bad_rows: see `encode_supervised`.

    Raises:
        ValueError: there are too many that are none; shows the first ones.
    """
    bad_rows: list[BadRow] = []
    for source in sources:
        for record in records_of(source):
            if isinstance(found := _read(record, columns), ValueError):
                bad_rows.append(bad_row(source.name, record.number, str(found)))
                check_bad_rows(bad_rows, max_bad_rows)


def cached_supervised(
    sources: Sequence[Source],
    encoder: ChatEncoder,
    cache_dir: str | Path,
    columns: Mapping[str, str] | None = None,
    max_bad_rows: int = 100,
) -> SupervisedCorpus:
    """Like `encode_supervised`, but encoded once per content of files, tokenizer, template and mask policy, and memory
    mapped from then on: of a set of any size, memory holds the index only, 32 bytes per sample.
    """
    template = encoder.template
    policy = [template.loss_turns, template.jinja, template.template_arguments, dict(columns or {}), max_bad_rows]
    key = content_key(
        [
            LAYOUT_VERSION,
            ENCODER_VERSION,
            json.dumps(policy, sort_keys=True, default=str),
            *tokenizer_content(encoder.tokenizer),
            *(part for source in sources for part in (source.name, source.format, _content_digest(source))),
        ]
    )

    def write(folder: Path) -> None:
        with open(folder / "tokens", "wb") as tokens, open(folder / "answer", "wb") as answer:
            index = _write_rows(tokens, answer, sources, encoder, columns, max_bad_rows)
        for name, values in zip(_INDEX, index.arrays, strict=True):
            np.save(folder / f"{name}.npy", values)
        about = {"bad_rows": index.bad_rows, "sources": [source.name for source in sources]}
        (folder / "rows.json").write_text(json.dumps(about))

    folder = cached_folder(Path(cache_dir) / "supervised" / key, write)
    samples = SupervisedTokens(
        np.memmap(folder / "tokens", np.uint32, "r"),
        np.memmap(folder / "answer", bool, "r"),
        *(np.load(folder / f"{name}.npy", mmap_mode="r") for name in _INDEX),
    )
    about = json.loads((folder / "rows.json").read_text())
    return SupervisedCorpus(samples, [BadRow(*row) for row in about["bad_rows"]], about["sources"])


class _Index(NamedTuple):
    """What is known of encoded rows beside their tokens; `arrays` are the fields `_INDEX` of `SupervisedTokens`."""

    arrays: tuple[np.ndarray, np.ndarray, np.ndarray]
    bad_rows: list[BadRow]


def _write_rows(
    tokens: BinaryIO,
    answer: BinaryIO,
    sources: Sequence[Source],
    encoder: ChatEncoder,
    columns: Mapping[str, str] | None,
    max_bad_rows: int,
) -> _Index:
    check_columns(columns or {})
    check_max_bad_rows(max_bad_rows)
    # Arrays, not lists of Python's integers, which would take several times the memory.
    lengths, first_answers, rows = array("q"), array("q"), array("q")
    bad_rows: list[BadRow] = []
    for number, source in enumerate(sources):
        for record, sample in _encode_source(source, encoder, columns):
            if isinstance(sample, ValueError):
                bad_rows.append(bad_row(source.name, record.number, str(sample)))
                check_bad_rows(bad_rows, max_bad_rows)
            else:
                tokens.write(np.array(sample.ids, dtype=np.uint32).tobytes())
                answer.write(np.array(sample.answer, dtype=bool).tobytes())
                lengths.append(len(sample.ids))
                first_answers.append(sample.answer.index(True))
                rows.extend((number, record.number))
    if not lengths:
        names = ", ".join(source.name for source in sources[:5]) + (", ..." if len(sources) > 5 else "")
        raise ValueError(
            f"{names}: no row of {len(sources)} inputs can be used\n{describe_bad_rows(bad_rows)}".rstrip()
        )
    arrays = (np.cumsum(lengths), np.array(first_answers), np.array(rows).reshape(-1, 2))
    return _Index(arrays, bad_rows)


def _encode_source(
    source: Source, encoder: ChatEncoder, columns: Mapping[str, str] | None
) -> Iterator[tuple[Record, EncodedChat | ValueError]]:
    records = records_of(source)
    while batch := list(itertools.islice(records, _ROWS_PER_CALL)):
        read = [_read(record, columns) for record in batch]
        encoded = iter(encoder.encode_all([item for item in read if isinstance(item, Conversation)]))
        for record, item in zip(batch, read, strict=True):
            yield record, item if isinstance(item, ValueError) else next(encoded)


def _read(record: Record, columns: Mapping[str, str] | None) -> Conversation | ValueError:
    if record.problem:
        return ValueError(record.problem)
    try:
        for name, value in record.fields.items():
            _check_field(name, value)
        return read_conversation(record.fields, columns)
    except RecursionError:
        return ValueError("nested too deeply")
    except ValueError as error:
        return error


def _check_field(name: str, value: object) -> None:
    check_characters(name, f"the name of field {name!r}")
    if isinstance(value, str):
        check_characters(value, f"field {name!r}")
    else:
        check_characters(json.dumps(value, ensure_ascii=False, default=str), f"field {name!r} as JSON")


def _content_digest(source: Source) -> bytes:
    if source.format == "dataset":
        return load_dataset(source.name, source.split)._fingerprint.encode()
    with open(source.name, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
