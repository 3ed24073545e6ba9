"""Rows of tokens whose likelihood is asked for: of texts, which are scored whole, and of chats, whose answers are."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from nemo_dllm.collections.diffusion.inference.load import LoadedModel

# Rows of a batch are padded to a common multiple of this.
_LENGTH_STEP = 64


class EvaluatedRow(NamedTuple):
    """Tokens that see each other.

    Attributes:
        tokens: ids.
        scored: per token, whether it counts; the others are given.
        index: of the row, which its noise depends on.
    """

    tokens: list[int]
    scored: list[bool]
    index: int

    @property
    def padded_length(self) -> int:
        """Tokens of the row in a batch."""
        return -(-len(self.tokens) // _LENGTH_STEP) * _LENGTH_STEP


class EvaluatedRows(NamedTuple):
    """Rows, and the UTF-8 bytes behind their scored tokens."""

    rows: list[EvaluatedRow]
    num_bytes: int

    @property
    def num_tokens(self) -> int:
        """Scored ones."""
        return sum(sum(row.scored) for row in self.rows)


def rows_of_texts(model: LoadedModel, texts: Sequence[str], length: int, max_rows: int | None) -> EvaluatedRows:
    """Texts, each cut into rows.

    Where logits score the next position, a row begins with the token before it, a text with the start token; without
    one its first token is not scored.

    Args:
        model: encodes them.
        texts: documents.
        length: tokens per row.
        max_rows: rows to take, from the first; None is all.
    """
    rows: list[EvaluatedRow] = []
    num_bytes = 0.0
    bos = getattr(model.tokenizer, "bos_id", None)
    for text in texts:
        if len(rows) == max_rows:
            break
        tokens = model.encode(text)
        context = [bos] if model.right_shift and bos is not None else []
        used = scored = 0
        while used < len(tokens) and len(rows) != max_rows:
            part = tokens[used : used + length - len(context)]
            row = [*context, *part]
            # With the shift position 0 has no logits: without a start token it is the text's own first token.
            unscored = int(model.right_shift)
            rows.append(EvaluatedRow(row, [place >= unscored for place in range(len(row))], len(rows)))
            used += len(part)
            scored += len(row) - unscored
            context = part[-1:] if model.right_shift else []
        whole = text if used == len(tokens) else model.decode(tokens[:used])
        num_bytes += len(whole.encode()) * scored / max(used, 1)
    return EvaluatedRows(rows, round(num_bytes))


def rows_of_chats(
    model: LoadedModel,
    path: str | Path,
    length: int,
    max_rows: int | None,
    chat_template: str | None = None,
    max_bad_rows: int = 0,
    columns: Mapping[str, str] | None = None,
    split: str | None = None,
) -> EvaluatedRows:
    """Chats as fine-tuning reads them: a row each, cut at its end, whose answers are scored with their end tokens.

    Args:
        model: whose tokenizer, and template, encode them.
        path: of rows with the fields of a chat, see :func:`read_texts`.
        length: tokens per row, at most.
        max_rows: rows to take, from the first; None is all.
        chat_template: Jinja text, or a file with it; None takes the tokenizer's, '' joins prompt and answer.
        max_bad_rows: rows that cannot be used before this gives up.
        columns, split: see :func:`read_texts`.

    Raises:
        ValueError: for rows that cannot be used, and where there is no template.
    """
    from nemo_dllm.collections.diffusion.data.bits_per_byte import count_row_bytes
    from nemo_dllm.collections.diffusion.data.chat_encoder import ChatEncoder
    from nemo_dllm.collections.diffusion.data.chat_template import ChatTemplate
    from nemo_dllm.collections.diffusion.data.sources import find_sources
    from nemo_dllm.collections.diffusion.data.supervised import FittedSamples
    from nemo_dllm.collections.diffusion.data.supervised_tokens import encode_supervised

    if model.tokenizer is None:
        raise ValueError("the checkpoint has no tokenizer, so there is no chat")
    tokenizer = model.tokenizer.tokenizer
    encoder = ChatEncoder(tokenizer, ChatTemplate(tokenizer, chat_template))
    corpus = encode_supervised(find_sources([path], split=split), encoder, columns, max_bad_rows)
    samples = FittedSamples(corpus.samples, length, tokenizer.eos_token_id)
    note_bad_rows(corpus.bad_rows)
    print(f"note: answers are scored, prompts are given: {samples.summary(corpus.sources)}", file=sys.stderr)
    rows = []
    for number in range(min(len(samples), len(samples) if max_rows is None else max_rows)):
        sample = samples.sample(number)
        # With the shift position 0 has no logits.
        sample.loss_mask[: int(model.right_shift)] = False
        rows.append(EvaluatedRow(sample.tokens.tolist(), sample.loss_mask.tolist(), number))
    masked = [{"tokens": torch.tensor(row.tokens), "loss_mask": torch.tensor(row.scored)} for row in rows]
    return EvaluatedRows(rows, count_row_bytes(masked, tokenizer))


def read_texts(
    path: str | Path,
    text_field: str,
    max_bad_rows: int,
    max_rows: int | None,
    columns: Mapping[str, str] | None = None,
    split: str | None = None,
) -> list[str] | None:
    """The texts of a file or folder: of rows with fields that field, of others the whole file; None for chats.

    Args:
        path: of rows (see ``data.sources.has_fields``), or of texts; or ``hf://NAME`` of a dataset on the Hub.
        text_field: field or column with the text.
        max_bad_rows: rows that cannot be used before this gives up.
        max_rows: texts that are needed; None is all.
        columns: how fields of chats are called, see ``data.chat.read_conversation``; rows are chats then.
        split: of datasets with several splits.

    Raises:
        FileNotFoundError, ValueError: there is no text, or a row is no chat; names file, row and field.
    """
    from nemo_dllm.collections.diffusion.data import read_text
    from nemo_dllm.collections.diffusion.data.chat import check_columns, is_conversation
    from nemo_dllm.collections.diffusion.data.documents import first_fields, read_text_rows
    from nemo_dllm.collections.diffusion.data.sources import find_sources, has_fields
    from nemo_dllm.collections.diffusion.data.supervised_tokens import check_conversations

    check_columns(columns or {})
    if not has_fields(path):
        return [document.text for document in read_text(path, field="data").documents]
    sources = find_sources([path], split=split)
    fields = first_fields(sources)
    if columns or (fields.get(text_field) is None and is_conversation(fields)):
        check_conversations(sources, columns, max_bad_rows)
        return None
    found = read_text_rows(sources, text_field, max_bad_rows, max_rows)
    note_bad_rows(found.bad_rows)
    return found.texts


def note_bad_rows(bad_rows: Sequence) -> None:
    """Say on standard error which rows are left out."""
    from nemo_dllm.collections.diffusion.data.bad_rows import describe_bad_rows

    if bad_rows:
        print(f"note: {len(bad_rows)} rows are left out\n{describe_bad_rows(bad_rows)}", file=sys.stderr)
