"""The likelihood of a text under a model, bounded from above, with noise that is the same for every model.

Shape letters: B rows, L positions.
"""

import json as json_format
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from nemo_dllm.collections.diffusion.inference.evaluated_rows import (
    EvaluatedRow,
    EvaluatedRows,
    read_texts,
    rows_of_chats,
    rows_of_texts,
)
from nemo_dllm.collections.diffusion.inference.load import LoadedModel, load_checkpoint
from nemo_dllm.collections.diffusion.models.batch import corrupt_batch, to_device
from nemo_dllm.collections.diffusion.models.loss import LossTotals, report

LONGEST_DEFAULT = 2048


@dataclass(frozen=True)
class Evaluation:
    """What a model makes of a text.

    Attributes:
        nll: bound on the negative log-likelihood, in nats per token.
        perplexity: its exponential, a bound on the perplexity per token.
        bits_per_byte: the bound per byte of the scored text, in bits, which compares models across tokenizers.
        tokens: scored ones.
        bytes: of their text, UTF-8.
        rows: of the text.
        seq_length: tokens of a row at most; more context makes a text more likely.
        draws: noise levels per row.
    """

    nll: float
    perplexity: float
    bits_per_byte: float
    tokens: int
    bytes: int
    rows: int
    seq_length: int
    draws: int


def evaluate_texts(
    model: LoadedModel,
    texts: Sequence[str],
    *,
    seq_length: int | None = None,
    batch_size: int = 8,
    num_draws: int = 4,
    max_rows: int | None = None,
    seed: int = 1234,
) -> Evaluation:
    """The likelihood bound (negative ELBO) of texts, each cut into rows that do not see each other.

    The noise of a row depends on the seed, its number and its length alone. Where logits score the next position, a row
    begins with the token before it, a text with the start token; without one its first token is not scored.

    Args:
        model: see ``load_checkpoint``. The bound of a block-causal model is that of block diffusion (Arriola et al.
            2025), of any other one that of masked diffusion (Sahoo et al. 2024).
        texts: documents.
        seq_length: tokens per row; None is those of the training samples, else the model's context, and at most
            ``LONGEST_DEFAULT``.
        batch_size: rows at a time; it does not change the result.
        num_draws: noise levels per row, evenly spread; the bound is a mean over all.
        max_rows: rows to take, from the first; None is all.
        seed: of the noise.

    Raises:
        ValueError: for numbers below 1, rows longer than the model's context, or texts without a token to score.
    """
    _check_numbers(seq_length=seq_length, batch_size=batch_size, num_draws=num_draws, max_rows=max_rows)
    length = _row_length(model, seq_length)
    return evaluate_rows(model, rows_of_texts(model, texts, length, max_rows), length, batch_size, num_draws, seed)


def evaluate_rows(
    model: LoadedModel, evaluated: EvaluatedRows, seq_length: int, batch_size: int, num_draws: int, seed: int
) -> Evaluation:
    """The likelihood bound of rows; arguments as of :func:`evaluate_texts`.

    Raises:
        ValueError: where no token is scored.
    """
    rows, num_bytes, num_tokens = evaluated.rows, evaluated.num_bytes, evaluated.num_tokens
    if num_tokens == 0 or num_bytes == 0:
        raise ValueError("the text has no token to score; give more text")
    # The bound, whatever the training's loss is.
    objective = replace(model.objective, complementary=False, force_mask=False, weight_epsilon=0.0, seed=seed)
    totals = LossTotals.empty(model.device)
    batches = list(_batches(rows, batch_size, num_draws))
    console = Console(stderr=True)
    for batch in track(batches, "evaluate", console=console, transient=True, disable=not console.is_terminal):
        noised = to_device(corrupt_batch(batch, objective, validation=True))
        with torch.no_grad():
            output = model.core(noised.input_ids, attention_mask=noised.pattern, targets=noised.targets)
        totals += LossTotals(report(noised, output))
    nll = float(totals.nll_bound)
    return Evaluation(
        nll=nll,
        perplexity=math.exp(nll),
        bits_per_byte=nll * num_tokens / (math.log(2) * num_bytes),
        tokens=num_tokens,
        bytes=num_bytes,
        rows=len(rows),
        seq_length=seq_length,
        draws=num_draws,
    )


def _check_numbers(**numbers: int | None) -> None:
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1")


def _row_length(model: LoadedModel, seq_length: int | None) -> int:
    length = seq_length
    if length is None:
        length = min(model.sample_length or model.seq_length, model.seq_length, LONGEST_DEFAULT)
    if length > model.seq_length:
        raise ValueError(f"seq_length={length} is longer than the model's context of {model.seq_length}; choose less")
    if model.right_shift and length < 2:
        raise ValueError(f"seq_length={length} leaves nothing to score: the first position of a row has no logits here")
    return length


def _batches(rows: Sequence[EvaluatedRow], batch_size: int, num_draws: int) -> Iterator[dict[str, Any]]:
    """Micro-batches as of a data module, of rows that are padded to the same length: noise depends on it."""
    for length, group in groupby(sorted(rows, key=lambda row: row.padded_length), key=lambda row: row.padded_length):
        drawn = [(row, draw) for row in group for draw in range(num_draws)]
        for start in range(0, len(drawn), batch_size):
            batch = drawn[start : start + batch_size]
            tokens_BL = torch.tensor([row.tokens + [0] * (length - len(row.tokens)) for row, _ in batch])
            lengths_B1 = torch.tensor([[len(row.tokens)] for row, _ in batch])
            scored_BL = torch.tensor([row.scored + [False] * (length - len(row.tokens)) for row, _ in batch])
            yield {
                "tokens": tokens_BL,
                "loss_mask": scored_BL,
                "key_mask": torch.arange(length) < lengths_B1,
                "sample_index": torch.tensor([row.index * num_draws + draw for row, draw in batch]),
            }


def evaluate(
    path: str | Path,
    data: str | Path,
    text_field: str,
    columns: Mapping[str, str] | None,
    split: str | None,
    chat_template: str | None,
    max_bad_rows: int,
    seq_length: int | None,
    batch_size: int,
    num_draws: int,
    max_rows: int | None,
    seed: int,
    json: bool,
    best: bool,
) -> None:
    """Evaluate a checkpoint and print the result; see ``cli.sampling`` for the arguments."""
    _check_numbers(seq_length=seq_length, batch_size=batch_size, num_draws=num_draws, max_rows=max_rows)
    # Before the model is loaded, which takes longer than finding what is wrong with the data.
    texts = read_texts(data, text_field, max_bad_rows, max_rows, columns, split)
    model = load_checkpoint(path, best=best)
    length = _row_length(model, seq_length)
    if texts is None:
        rows = rows_of_chats(model, data, length, max_rows, chat_template, max_bad_rows, columns, split)
    else:
        rows = rows_of_texts(model, texts, length, max_rows)
    found = evaluate_rows(model, rows, length, batch_size, num_draws, seed)
    if json:
        print(json_format.dumps(asdict(found)))
        return
    print(f"bits per byte      {found.bits_per_byte:.4f}")
    print(f"perplexity bound   {found.perplexity:.4f} per token")
    print(f"NLL bound          {found.nll:.4f} nats per token")
    print(
        f"{found.tokens} tokens, {found.bytes} bytes in {found.rows} rows of at most {found.seq_length} tokens, "
        f"{found.draws} noise levels each"
    )
