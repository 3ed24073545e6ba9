"""Rows of a data set as a person wants to see them: on a terminal, and as an HTML page."""

from collections.abc import Iterable, Iterator
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TextIO

import numpy as np
import torch

from nemo_dllm.collections.diffusion.data.row_statistics import RowStatistics

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
        ValueError: `time` is out of range, or the data has no rows.
    """
    if time is not None and not 0.0 <= time <= 1.0:
        raise ValueError(f"time={time} must be in [0, 1]; 1 hides everything")
    data.trainer = _NoTraining()
    data.prepare_data()
    data.setup("fit")
    dataset = data.training_dataset(num_rows)
    # From there on rows repeat.
    rows = list(islice(dataset, min(num_rows, dataset.num_rows)))
    statistics = RowStatistics.of(rows)
    samples = getattr(data, "training_samples", None)
    notes = [] if samples is None else [f"in all: {samples.summary(data.training_sources)}"]
    print_rows(rows[:num_samples], statistics, data.tokenizer.tokenizer, time, seed, notes, html, stream)
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
        console.print(line)
    if html is not None:
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
        shown = piece.text if piece.kind == "pad" else piece.text.replace("\n", "↵\n")
        shown = "▒" * piece.num_tokens if piece.kind == "masked" else shown
        text.append(shown, KINDS[piece.kind][0])
    return text


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
