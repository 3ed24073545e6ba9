"""Rows of a data set as a person wants to see them: on a terminal, and as an HTML page."""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TextIO

import numpy as np
import torch

from nemo_dllm.collections.diffusion.data.bad_rows import describe_bad_rows
from nemo_dllm.collections.diffusion.data.chat_encoder import ChatEncoder
from nemo_dllm.collections.diffusion.data.chat_template import ChatTemplate
from nemo_dllm.collections.diffusion.data.indexed import TokenFile, without_suffix
from nemo_dllm.collections.diffusion.data.pretraining import DocumentStream, PretrainingRows
from nemo_dllm.collections.diffusion.data.row_statistics import RowStatistics
from nemo_dllm.collections.diffusion.data.sources import find_sources
from nemo_dllm.collections.diffusion.data.supervised import FittedSamples, PackedRows, PaddedRows, training_order
from nemo_dllm.collections.diffusion.data.supervised_tokens import encode_supervised
from nemo_dllm.collections.diffusion.data.tokenizer import load_tokenizer, vocabulary_size

if TYPE_CHECKING:
    from rich.text import Text
    from transformers import PreTrainedTokenizerBase

    from nemo_dllm.collections.diffusion.data.base_datamodule import DiffusionDataModule

KINDS = {
    "prompt": ("cyan", "seen, never masked"),
    "answer": ("green", "masked and trained"),
    "masked": ("black on yellow", "masked in this draw"),
    "pad": ("dim", "neither seen nor trained"),
}
"""Kinds of tokens, with their style and meaning."""

_BAR_WIDTH = 40
# What a terminal or a browser would act upon instead of showing it: controls, and marks of direction.
_UNSHOWN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


class Piece(NamedTuple):
    """Tokens that only together make characters. kind: in `KINDS`; document: number within the row."""

    text: str
    kind: str
    document: int
    num_tokens: int


class _NoTraining(NamedTuple):
    """What a data module asks a trainer for when there is none."""

    global_step: int = 0
    max_steps: int = 1


def show_data(
    data: "DiffusionDataModule",
    num_samples: int = 3,
    num_rows: int = 1000,
    time: float | None = None,
    seed: int = 0,
    html: str | Path | None = None,
    stream: TextIO | None = None,
) -> RowStatistics:
    """Print what training would read: some rows in colours, and statistics of more of them.

    Args:
        data: a data module of texts, corpora or supervised samples, not yet set up.
        num_samples: rows to print, the first in the order of training.
        num_rows: rows to count, at most.
        time: diffusion time in [0, 1]; hides each trained token with this probability, as the linear schedule does.
        seed: of the hidden tokens.
        html: file to write the same to, as a page.
        stream: where to print; None is standard output.

    Raises:
        ValueError: a number is out of range, or the data has no rows.
    """
    _check_fields(num_samples, num_rows, time)
    data.trainer = _NoTraining()
    data.prepare_data()
    data.setup("fit")
    samples = getattr(data, "training_samples", None)
    notes = [] if samples is None else [f"in all: {samples.summary(data.training_sources)}"]
    dataset = data.training_dataset(num_rows)
    return _show(dataset, data.tokenizer.tokenizer, notes, num_samples, num_rows, time, seed, html, stream)


def show_files(
    path: str | Path,
    tokenizer: "str | Path | PreTrainedTokenizerBase",
    *,
    seq_length: int = 2048,
    columns: Mapping[str, str] | None = None,
    split: str | None = None,
    chat_template: str | Path | None = None,
    loss_turns: str = "all",
    block_size: int | None = None,
    packing: bool = False,
    max_bad_rows: int = 100,
    num_samples: int = 3,
    num_rows: int = 1000,
    time: float | None = None,
    seed: int = 0,
    html: str | Path | None = None,
    stream: TextIO | None = None,
) -> RowStatistics:
    """Like `show_data`, of files: an encoded corpus (a path without suffix), or what `SupervisedDataModule` reads.

    Needs no NeMo, and keeps nothing on disk.

    Args:
        path: of the corpus, the file, the folder or the dataset.
        tokenizer: Hugging Face tokenizer folder or name, or the tokenizer.
        seq_length, columns, split, chat_template, loss_turns, block_size, packing, max_bad_rows: see
            `SupervisedDataModule`.
        num_samples, num_rows, time, seed, html, stream: see `show_data`; the seed is that of the order too.

    Raises:
        ValueError, FileNotFoundError: the data or the template are unusable.
    """
    _check_fields(num_samples, num_rows, time)
    if seq_length < 1:
        raise ValueError(f"seq_length={seq_length} must be at least 1")
    # Before the tokenizer is asked for at the Hub, which takes long where there is no network.
    sources = [] if is_corpus(path) else find_sources([path], split=split)
    tokenizer = load_tokenizer(tokenizer)
    if not sources:
        corpus = TokenFile(path)
        stream_of_documents = DocumentStream(corpus, 0, corpus.num_documents, vocabulary_size(tokenizer))
        dataset = PretrainingRows([stream_of_documents], [1.0], seq_length, num_rows, seed)
        notes = [f"in all: {corpus.num_documents:,} documents, {corpus.num_tokens:,} tokens"]
    else:
        encoder = ChatEncoder(tokenizer, ChatTemplate(tokenizer, chat_template, loss_turns))
        found = encode_supervised(sources, encoder, columns, max_bad_rows)
        samples = FittedSamples(found.samples, seq_length, tokenizer.eos_token_id, block_size)
        order = training_order(samples, seed)
        dataset = PackedRows(samples, num_rows, seed) if packing else PaddedRows(samples, num_rows, order, 1)
        notes = [f"in all: {samples.summary(found.sources)}"]
        if found.bad_rows:
            notes += [f"{len(found.bad_rows):,} rows cannot be used:", describe_bad_rows(found.bad_rows)]
    return _show(dataset, tokenizer, notes, num_samples, num_rows, time, seed, html, stream)


def is_corpus(path: str | Path) -> bool:
    """Whether a path is that of an encoded corpus, or of one of its files."""
    return Path(f"{without_suffix(path)}.idx").exists()


def _check_fields(num_samples: int, num_rows: int, time: float | None) -> None:
    for name, value, least in (("num_samples", num_samples, 0), ("num_rows", num_rows, 1)):
        if value < least:
            raise ValueError(f"{name}={value} must be at least {least}")
    if time is not None and not 0.0 <= time <= 1.0:
        raise ValueError(f"time={time} must be in [0, 1]; 1 hides everything")


def _show(dataset, tokenizer, notes, num_samples, num_rows, time, seed, html, stream) -> RowStatistics:
    # From there on rows repeat.
    rows = [dataset[index] for index in range(min(num_rows, dataset.num_rows))]
    statistics = RowStatistics.of(rows)
    print_rows(rows[:num_samples], statistics, tokenizer, time, seed, notes, html, stream)
    return statistics


def print_rows(
    rows: Iterable[dict[str, torch.Tensor]],
    statistics: RowStatistics,
    tokenizer: "PreTrainedTokenizerBase",
    time: float | None = None,
    seed: int = 0,
    notes: Iterable[str] = (),
    html: str | Path | None = None,
    stream: TextIO | None = None,
) -> None:
    """Print rows and statistics; arguments as of `show_data`, `notes` being further lines below the statistics."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    console = Console(file=stream, record=html is not None, highlight=False)
    legend = (Text(f" {kind} ", style) + Text(f" {meaning}   ", "default") for kind, (style, meaning) in KINDS.items())
    console.print(Text.assemble(*legend))
    for row in rows:
        trained, total = int(row["loss_mask"].sum()), len(row["tokens"])
        title = f"sample {int(row['sample_index'])}: {total} tokens, {trained} trained"
        title += f", t = {time:g}" if time is not None else ""
        console.print(Panel(_coloured(pieces_of(row, tokenizer, time, seed)), title=title, title_align="left"))
    for line in [*_described(statistics), *notes]:
        console.print(line, soft_wrap=True, markup=False)
    if html is not None:
        Path(html).parent.mkdir(parents=True, exist_ok=True)
        console.save_html(str(html), inline_styles=True)


def pieces_of(
    row: dict[str, torch.Tensor], tokenizer: "PreTrainedTokenizerBase", time: float | None = None, seed: int = 0
) -> list[Piece]:
    """The tokens of a row as readable pieces with their kinds, runs of pads as one piece.

    Args:
        row: as data sets give it.
        tokenizer: for the text.
        time, seed: see `show_data`.
    """
    length = len(row["tokens"])
    documents = row.get("document_ids", torch.zeros(length, dtype=torch.int64)).tolist()
    tokens = zip(row["tokens"].tolist(), _kinds(row, time, seed), documents, strict=True)
    return [
        piece
        for (kind, document), group in groupby(tokens, key=lambda token: token[1:])
        for piece in _pieces_of_run([token for token, _, _ in group], kind, document, tokenizer)
    ]


def _kinds(row: dict[str, torch.Tensor], time: float | None, seed: int) -> list[str]:
    loss_mask = row["loss_mask"]
    key_mask = row.get("key_mask", torch.ones_like(loss_mask))
    masked = torch.zeros_like(loss_mask)
    if time is not None:
        generator = np.random.default_rng((seed, int(row["sample_index"])))
        masked = loss_mask & torch.from_numpy(generator.random(len(loss_mask)) < time)
    flags = zip(masked.tolist(), loss_mask.tolist(), key_mask.tolist(), strict=True)
    return ["masked" if m else "answer" if trained else "prompt" if real else "pad" for m, trained, real in flags]


def _pieces_of_run(
    tokens: list[int], kind: str, document: int, tokenizer: "PreTrainedTokenizerBase"
) -> Iterator[Piece]:
    if kind == "pad":
        yield Piece(f"\n{tokenizer.decode(tokens[:1])} x {len(tokens)}", kind, document, len(tokens))
        return
    waiting: list[int] = []
    for position, token in enumerate(tokens, start=1):
        waiting.append(token)
        text = tokenizer.decode(waiting, clean_up_tokenization_spaces=False)
        # A token may be part of a character.
        if not text.endswith("\ufffd") or position == len(tokens):
            yield Piece(text, kind, document, len(waiting))
            waiting = []


def _coloured(pieces: list[Piece]) -> "Text":
    from rich.text import Text

    text = Text()
    for previous, piece in zip([None, *pieces], pieces, strict=False):
        if previous is not None and previous.document != piece.document and piece.kind != "pad":
            text.append(f"\n--- document {piece.document}\n", "bold")
        shown = piece.text if piece.kind == "pad" else _visible(piece.text).replace("\n", "↵\n")
        shown = "▒" * piece.num_tokens if piece.kind == "masked" else shown
        text.append(shown, KINDS[piece.kind][0])
    return text


def _visible(text: str) -> str:
    """Controls as their pictures (Unicode has them from 0x2400 on), the rest of what acts as its number."""
    return _UNSHOWN.sub(
        lambda match: chr(0x2400 + ord(match[0])) if match[0] < " " else f"\\u{ord(match[0]):04x}", text
    )


def _described(statistics: RowStatistics) -> list[str]:
    lengths = statistics.document_lengths
    per_row = len(lengths) / statistics.rows
    lines = [
        f"{statistics.rows:,} rows of {statistics.positions:,} positions: {statistics.supervised:.1%} trained, "
        f"{statistics.padding:.1%} padding, {statistics.unsupervised_rows:,} rows without a trained token",
        f"{len(lengths):,} documents, {per_row:.1f} per row, {statistics.duplicates:,} duplicates, "
        f"lengths {lengths.min()} to {lengths.max()}, mean {lengths.mean():.0f}",
    ]
    histogram = statistics.histogram()
    most = max(count for _, _, count in histogram)
    width = len(str(histogram[-1][1]))
    for shortest, longest, count in histogram:
        bar = "█" * round(_BAR_WIDTH * count / most)
        lines.append(f"  {shortest:{width}} to {longest:{width}} {bar} {count:,}")
    return lines
