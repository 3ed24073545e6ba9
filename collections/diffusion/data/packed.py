"""Pretraining rows: documents encoded, joined into one token stream and cut into rows of equal length.

Legend: L tokens per row.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from nemo_dllm.collections.diffusion.data.cache import cached_folder, content_key
from nemo_dllm.collections.diffusion.data.samples import check_index, clean_sample, document_ids
from nemo_dllm.collections.diffusion.data.tokenizer import tokenizer_content, vocabulary_size

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Changes whenever the files of a token cache, or the way in which they are made, change.
LAYOUT_VERSION = "1"

_DOCUMENTS_PER_BATCH = 256


class PackedTokens(NamedTuple):
    """Encoded documents in one stream; each document is followed by the end-of-text token.

    tokens: [num_tokens] uint16 (uint32 for vocabularies beyond 65,536), memory mapped when read from the cache.
    document_ends: [num_documents] int64, the stream position after each document's end-of-text token.
    """

    tokens: np.ndarray
    document_ends: np.ndarray


def encode_documents(texts: Sequence[str], tokenizer: "PreTrainedTokenizerBase") -> PackedTokens:
    """Encode and join documents.

    Special strings inside a text are encoded as ordinary text, so that the end-of-text id stands only where it was
    appended and the mask id nowhere. The tokenizer's own begin and end tokens are not added.

    Args:
        texts: at least one document.
        tokenizer: a Hugging Face tokenizer with an end-of-text token.

    Raises:
        ValueError: the tokenizer has no `eos_token`.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "the tokenizer has no eos_token to put between documents; set one, e.g. tokenizer.eos_token = '</s>'"
        )
    dtype = np.uint16 if vocabulary_size(tokenizer) <= 2**16 else np.uint32
    documents = [
        np.array([*ids, tokenizer.eos_token_id], dtype=dtype)
        for batch in _batches(texts)
        for ids in tokenizer(
            batch, add_special_tokens=False, split_special_tokens=True, return_attention_mask=False, verbose=False
        )["input_ids"]
    ]
    return PackedTokens(np.concatenate(documents), np.cumsum([len(ids) for ids in documents]))


def cached_tokens(texts: Sequence[str], tokenizer: "PreTrainedTokenizerBase", cache_dir: str | Path) -> PackedTokens:
    """Like `encode_documents`, but encoded once per (texts, tokenizer, layout) and memory mapped from then on."""
    key = content_key([LAYOUT_VERSION, *tokenizer_content(tokenizer), *texts])

    def write(folder: Path) -> None:
        packed = encode_documents(texts, tokenizer)
        for field, array in packed._asdict().items():
            np.save(folder / f"{field}.npy", array)

    folder = cached_folder(Path(cache_dir) / "tokens" / key, write)
    return PackedTokens(*(np.load(folder / f"{field}.npy", mmap_mode="r") for field in PackedTokens._fields))


def epoch_permutation(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    """The order of rows in one epoch, [num_rows] int64, as a function of its arguments alone."""
    return np.random.default_rng((seed, epoch)).permutation(num_rows)


class PackedTextDataset(Dataset):
    """Training samples in consumption order, as many epochs as needed.

    Sample i is row permutation(seed, epoch)[i % num_rows] of epoch i // num_rows: every epoch has every row once,
    and i alone decides the sample, so a resume at any position continues the same sequence.

    Items are `clean_sample`s with `sample_index` = i.

    Args:
        tokens: [num_tokens] integer stream; what is left after the last full row is not used.
        sequence_length: L.
        num_samples: length of the dataset, across epochs.
        seed: of the order; non-negative.
        shuffle: False reads the rows in stream order in every epoch.
        document_ends: see `PackedTokens`; samples then have `document_ids` as well. None: a row is one text.

    Raises:
        ValueError: the stream is shorter than one row.
        IndexError: (on access) the index is outside [0, num_samples).
    """

    def __init__(
        self,
        tokens: np.ndarray,
        sequence_length: int,
        num_samples: int,
        seed: int,
        shuffle: bool = True,
        document_ends: np.ndarray | None = None,
    ) -> None:
        self.rows = _Rows(tokens, sequence_length, document_ends, "training")
        self.num_rows = len(self.rows)
        self.num_samples = num_samples
        self.seed = seed
        self.shuffle = shuffle
        # One epoch's order at a time; it is only ever looked up in consumption order, give or take a batch.
        self._order: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        check_index(index, self.num_samples)
        epoch, position = divmod(int(index), self.num_rows)
        row = int(self._epoch_order(epoch)[position]) if self.shuffle else position
        return self.rows.sample(row, index)

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, epoch_permutation(self.num_rows, self.seed, epoch))
        return self._order[1]


class ValidationDataset(Dataset):
    """Rows in stream order, each once; items are `clean_sample`s with `sample_index` = row.

    Fillers: the length is rounded up to a multiple of `multiple_of` with repeated rows whose `loss_mask` is all False.
    They add nothing to the sum or the count of a loss, so that the result does not depend on the batch size.

    Args:
        tokens: [num_tokens] integer stream.
        sequence_length: L.
        num_rows: how many rows from the start to use; None, or more than there are, uses all.
        multiple_of: the global batch size.
        document_ends: as in `PackedTextDataset`.

    Raises:
        ValueError: the stream is shorter than one row.
        IndexError: (on access) the index is outside the dataset.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        sequence_length: int,
        num_rows: int | None = None,
        multiple_of: int = 1,
        document_ends: np.ndarray | None = None,
    ) -> None:
        self.rows = _Rows(tokens, sequence_length, document_ends, "validation")
        self.num_rows = len(self.rows) if num_rows is None else min(num_rows, len(self.rows))
        self.num_samples = -(-self.num_rows // multiple_of) * multiple_of

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        check_index(index, self.num_samples)
        sample = self.rows.sample(index % self.num_rows, index)
        if index >= self.num_rows:
            sample["loss_mask"] = torch.zeros_like(sample["loss_mask"])
        return sample


class _Rows:
    """The full rows of a token stream."""

    def __init__(self, tokens: np.ndarray, sequence_length: int, document_ends: np.ndarray | None, split: str) -> None:
        if len(tokens) < sequence_length:
            raise ValueError(
                f"the {split} text has {len(tokens)} tokens, too few for one sequence of seq_length={sequence_length}; "
                f"use a longer text or seq_length={len(tokens)} at most"
            )
        self.tokens, self.sequence_length, self.document_ends = tokens, sequence_length, document_ends

    def __len__(self) -> int:
        return len(self.tokens) // self.sequence_length

    def sample(self, row: int, index: int) -> dict[str, torch.Tensor]:
        start = row * self.sequence_length
        sample = clean_sample(self.tokens[start : start + self.sequence_length], index)
        if self.document_ends is not None:
            sample["document_ids"] = document_ids(self.document_ends, start, self.sequence_length)
        return sample


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    for start in range(0, len(texts), _DOCUMENTS_PER_BATCH):
        yield list(texts[start : start + _DOCUMENTS_PER_BATCH])
