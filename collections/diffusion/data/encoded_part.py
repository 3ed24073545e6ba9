"""What a worker process makes of one part: a folder with token ids, document lengths and a report."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing import parent_process
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nemo_dllm.collections.diffusion.data.bad_rows import BadRow, bad_row
from nemo_dllm.collections.diffusion.data.cache import write_folder
from nemo_dllm.collections.diffusion.data.documents import rows_of
from nemo_dllm.collections.diffusion.data.parts import Part, Row
from nemo_dllm.collections.diffusion.data.tokenizer import vocabulary_size

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHARACTERS_PER_CALL = 2**19


@dataclass(frozen=True)
class PartReport:
    """Counts of one part; `empty` are documents without a character, which are left out."""

    documents: int
    tokens: int
    characters: int
    empty: int
    bad_rows: list[BadRow]


@dataclass(frozen=True)
class EncodeOptions:
    """How documents become ids. `dtype` is numpy's uint16 or int32, as Megatron-LM chooses by the vocabulary."""

    tokenizer: "PreTrainedTokenizerBase"
    text_field: str
    eos_token_id: int | None
    bos_token_id: int | None
    dtype: type[np.number]

    @classmethod
    def of(
        cls, tokenizer: "PreTrainedTokenizerBase", text_field: str, append_eos: bool, prepend_bos: bool
    ) -> "EncodeOptions":
        """Options with the ids of the tokenizer.

        Raises:
            ValueError: a token that is asked for is not there.
        """
        from megatron.core.datasets.indexed_dataset import DType

        for name, wanted in (("eos", append_eos), ("bos", prepend_bos)):
            if wanted and getattr(tokenizer, f"{name}_token_id") is None:
                option = {"eos": "append_eos", "bos": "prepend_bos"}[name]
                raise ValueError(f"the tokenizer has no {name}_token; set one, or pass {option}=False")
        return cls(
            tokenizer,
            text_field,
            tokenizer.eos_token_id if append_eos else None,
            tokenizer.bos_token_id if prepend_bos else None,
            DType.optimal_dtype(vocabulary_size(tokenizer)),
        )


_options: EncodeOptions


def start_worker(options: EncodeOptions) -> None:
    """Set up a worker process: one thread, deaf to Ctrl-C, gone when the main process is gone."""
    global _options
    _options = options
    # Each worker is one of many: threads of its own would only get into the others' way.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent_process().join()
    os._exit(1)


def encode_part(part: Part, folder: Path) -> PartReport:
    """Encode a part into `folder`, which appears complete or not at all."""
    reports = []

    def write(unfinished: Path) -> None:
        reports.append(_write_part(part, unfinished, _options))

    write_folder(folder, write)
    return reports[0]


def read_part_report(folder: Path) -> PartReport:
    """The report in the folder of a finished part."""
    fields = json.loads((folder / "report.json").read_text())
    return PartReport(**fields | {"bad_rows": [BadRow(*row) for row in fields["bad_rows"]]})


def _write_part(part: Part, folder: Path, options: EncodeOptions) -> PartReport:
    lengths, bad_rows, empty, characters = [], [], 0, 0
    with open(folder / "tokens.bin", "wb") as file:
        for rows in _batches(rows_of(part, options.text_field)):
            bad_rows += [bad_row(part.source, row.number, row.problem) for row in rows if row.text is None]
            texts = [row.text for row in rows if row.text]
            empty += sum(row.text == "" for row in rows)
            characters += sum(map(len, texts))
            documents = _encode(texts, options)
            lengths += map(len, documents)
            file.write(b"".join(document.tobytes() for document in documents))
    np.save(folder / "lengths.npy", np.array(lengths, dtype=np.int32))
    report = PartReport(len(lengths), sum(lengths), characters, empty, bad_rows)
    (folder / "report.json").write_text(json.dumps(asdict(report)))
    return report


def _batches(rows: Iterator[Row]) -> Iterator[list[Row]]:
    batch, characters = [], 0
    for row in rows:
        batch.append(row)
        characters += len(row.text or "")
        if characters >= _CHARACTERS_PER_CALL:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encode(texts: list[str], options: EncodeOptions) -> list[np.ndarray]:
    if not texts:
        return []
    encoded = options.tokenizer(
        texts, add_special_tokens=False, split_special_tokens=True, return_attention_mask=False, verbose=False
    )["input_ids"]
    before = [] if options.bos_token_id is None else [options.bos_token_id]
    after = [] if options.eos_token_id is None else [options.eos_token_id]
    return [np.array([*before, *ids, *after], dtype=options.dtype) for ids in encoded]
