"""Megatron-LM's .bin and .idx files: token streams with documents, memory mapped."""

import bisect
import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nemo_dllm.collections.diffusion.data.tokenizer import load_tokenizer, vocabulary_size

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_TOKENS_PER_READ = 2**24
# Codes of Megatron's numpy types; 6 and 7 are floats, which are no ids.
_INTEGER_TYPES = (1, 2, 3, 4, 5, 8)


class TokenFile:
    """One corpus as a stream of tokens that documents cut into pieces. Opening it reads the index's header only.

    Args:
        prefix: path of the two files, without suffix.

    Raises:
        FileNotFoundError: one of the files does not exist.
        ValueError: the index is damaged, or belongs to another .bin.
    """

    def __init__(self, prefix: str | Path) -> None:
        from megatron.core.datasets.indexed_dataset import DType, IndexedDataset

        self.prefix = without_suffix(prefix)
        for file in (f"{self.prefix}.bin", f"{self.prefix}.idx"):
            if not os.path.exists(file):
                raise FileNotFoundError(f"'{file}' does not exist; name the path of a .bin and .idx pair, no suffix")
        _check_index_file(self.prefix)
        self._dataset = IndexedDataset(self.prefix)
        self._item_size = DType.size(self._dataset.index.dtype)
        self.num_documents = len(self._dataset.document_indices) - 1
        self.num_tokens = os.path.getsize(f"{self.prefix}.bin") // self._item_size
        self._check_sizes()

    def document_start(self, document: int) -> int:
        """Position in the stream of a document's first token; `num_tokens` for the one after the last."""
        sequence = int(self._dataset.document_indices[document])
        if sequence == len(self._dataset):
            return self.num_tokens
        return int(self._dataset.index.sequence_pointers[sequence]) // self._item_size

    def document_at(self, position: int) -> int:
        """The document that holds the token at a position of the stream."""
        return bisect.bisect_right(range(self.num_documents), position, key=self.document_start) - 1

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of the stream, in the file's integer type, memory mapped."""
        dtype = self._dataset.index.dtype
        return self._dataset.bin_reader.read(dtype=dtype, count=stop - start, offset=start * self._item_size)

    def check_tokens(self, vocab_size: int) -> None:
        """Read the whole stream once.

        Raises:
            ValueError: a token id is outside [0, vocab_size); names its place.
        """
        for start in range(0, self.num_tokens, _TOKENS_PER_READ):
            self.check_ids(self.read(start, min(start + _TOKENS_PER_READ, self.num_tokens)), start, vocab_size)

    def check_ids(self, ids: np.ndarray, start: int, vocab_size: int) -> None:
        """Check ids that were read from `start` on.

        Raises:
            ValueError: an id is outside [0, vocab_size); names its place.
        """
        if len(ids) == 0 or (ids.max() < vocab_size and ids.min() >= 0):
            return
        offset = int(np.flatnonzero((ids >= vocab_size) | (ids < 0))[0])
        document = self.document_at(start + offset)
        raise ValueError(
            f"{self.prefix}.bin: token {start + offset - self.document_start(document)} of document {document} is "
            f"{ids[offset]}, outside the vocabulary of {vocab_size}; it was written with another tokenizer"
        )

    def check_index(self) -> None:
        """Read the whole index once.

        Raises:
            ValueError: it is damaged; names the place.
        """
        index = self._dataset.index
        lengths = index.sequence_lengths.astype(np.int64)
        pointers = np.concatenate([[0], np.cumsum(lengths)[:-1]]) * self._item_size
        borders = np.asarray(self._dataset.document_indices)
        wrong = {
            "sequence": np.flatnonzero((lengths < 0) | (pointers != index.sequence_pointers)),
            "document": np.flatnonzero(np.diff(borders) < 0),
        }
        for name, places in wrong.items():
            if len(places):
                raise ValueError(f"{self.prefix}.idx: {name} {places[0]} does not begin where it should; write it anew")

    def _check_sizes(self) -> None:
        index = self._dataset.index
        stop = int(index.sequence_pointers[-1]) + int(index.sequence_lengths[-1]) * self._item_size
        size = os.path.getsize(f"{self.prefix}.bin")
        if stop != size:
            raise ValueError(
                f"{self.prefix}.bin has {size} bytes, but {self.prefix}.idx describes {stop}: one of them is cut short "
                "or belongs to another corpus; write both anew"
            )


def without_suffix(path: str | Path) -> str:
    """The prefix of a corpus, whichever of its files is named."""
    return str(path).removesuffix(".bin").removesuffix(".idx")


def check_corpus(prefix: str | Path, tokenizer: "str | Path | PreTrainedTokenizerBase") -> str:
    """Read a corpus once from end to end; returns a line about what it holds.

    Raises:
        FileNotFoundError, ValueError: files are missing or damaged, or hold ids that the tokenizer does not have.
    """
    corpus, vocab_size = TokenFile(prefix), vocabulary_size(load_tokenizer(tokenizer))
    corpus.check_index()
    corpus.check_tokens(vocab_size)
    mean = corpus.num_tokens / corpus.num_documents
    return (
        f"{corpus.num_documents:,} documents, {corpus.num_tokens:,} tokens, {mean:,.0f} per document, all ids below "
        f"{vocab_size}"
    )


def _check_index_file(prefix: str) -> None:
    """What Megatron's reader takes for granted, told in words."""
    file = f"{prefix}.idx"
    size = os.path.getsize(file)
    with open(file, "rb") as stream:
        head = stream.read(_HEADER.size)
    if len(head) < _HEADER.size or not head.startswith(_MAGIC):
        raise ValueError(f"{file} is not an index of Megatron-LM; write it anew with `preprocess`")
    _, version, dtype_code, num_sequences, num_documents = _HEADER.unpack(head)
    if version != 1 or dtype_code not in _INTEGER_TYPES:
        raise ValueError(
            f"{file} has version {version} and token type {dtype_code}, known are version 1 and the integer types "
            f"{', '.join(map(str, _INTEGER_TYPES))}"
        )
    if num_sequences == 0:
        raise ValueError(f"{file} lists no documents; the corpus is empty")
    expected = _HEADER.size + 12 * num_sequences + 8 * num_documents
    if size == expected + num_sequences:
        raise ValueError(
            f"{file} is of a multimodal corpus (a mode per sequence follows the documents); only text can be trained on"
        )
    if size != expected:
        raise ValueError(f"{file} has {size} bytes instead of {expected}: it is cut short or damaged; write it anew")
    borders = np.memmap(file, np.int64, "r", offset=_HEADER.size + 12 * num_sequences, shape=(num_documents,))
    if num_documents < 2 or borders[0] != 0 or borders[-1] != num_sequences:
        raise ValueError(f"{file}: its documents do not cover its {num_sequences} sequences; write it anew")
    if os.path.getsize(f"{prefix}.bin") == 0:
        raise ValueError(f"{prefix}.bin is empty; write it anew")
