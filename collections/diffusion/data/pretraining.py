"""Pretraining rows cut from corpora on disk, in an order that is computed, not stored. Legend: L tokens of a row."""

import bisect
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from nemo_dllm.collections.diffusion.data.indexed import TokenFile
from nemo_dllm.collections.diffusion.data.permutation import Blend, permuted, random_integer
from nemo_dllm.collections.diffusion.data.samples import check_index

# Streams of random numbers.
_ORDER, _CUT, _LENGTH = 0, 1, 2


class RowPiece(NamedTuple):
    """Neighbouring tokens of a stream.

    tokens: int64 [n].
    documents: int64 [n], the document of each.
    is_begin: bool [n], True at begin tokens.
    """

    tokens: np.ndarray
    documents: np.ndarray
    is_begin: np.ndarray


class DocumentStream:
    """Some neighbouring documents of a corpus as one stream, each with a begin token in front if one is named.

    Args:
        corpus: the token file.
        first, last: documents [first, last).
        vocab_size: ids at or above it are an error when they are read.
        bos_token_id: put before every document; None puts nothing.

    Raises:
        ValueError: there is no document, none has a token, the first one has the begin token already, or that is
            outside the vocabulary.
    """

    def __init__(
        self, corpus: TokenFile, first: int, last: int, vocab_size: int, bos_token_id: int | None = None
    ) -> None:
        if not 0 <= first < last <= corpus.num_documents:
            raise ValueError(
                f"{corpus.prefix} has {corpus.num_documents} documents, too few to give each part of `split` one; name "
                "validation_paths, or write more documents"
            )
        if bos_token_id is not None and not 0 <= bos_token_id < vocab_size:
            raise ValueError(
                f"bos_token_id={bos_token_id} is outside the vocabulary of {vocab_size}; name one of its ids"
            )
        self.corpus = corpus
        self.first = first
        self.last = last
        self.vocab_size = vocab_size
        self.bos_token_id = bos_token_id
        self._offset = corpus.document_start(first)
        self.num_tokens = self._begin(last)
        has_tokens = corpus.document_start(last) > self._offset
        if not has_tokens:
            raise ValueError(f"documents {first} to {last - 1} of {corpus.prefix} are empty; change `split`")
        if corpus.read(self._offset, self._offset + 1).tolist() == [bos_token_id]:
            raise ValueError(
                f"documents of {corpus.prefix} begin with bos_token_id={bos_token_id} already; set it to None"
            )

    def read(self, begin: int, length: int) -> RowPiece:
        """The tokens from `begin` on, from the start again behind the end.

        Raises:
            ValueError: an id is outside the vocabulary.
        """
        pieces: list[RowPiece] = []
        while length:
            begin %= self.num_tokens
            piece = self._read_to_end(begin, min(length, self.num_tokens - begin))
            # Each time around, documents are others than the time before.
            pieces.append(piece._replace(documents=piece.documents + len(pieces) * (self.last - self.first)))
            begin, length = begin + len(piece.tokens), length - len(piece.tokens)
        return pieces[0] if len(pieces) == 1 else RowPiece(*map(np.concatenate, zip(*pieces, strict=True)))

    def _begin(self, document: int) -> int:
        """Position in this stream of the first token of a document, the begin token if there is one."""
        added = 0 if self.bos_token_id is None else document - self.first
        return self.corpus.document_start(document) - self._offset + added

    def _read_to_end(self, begin: int, length: int) -> RowPiece:
        document = self.first + bisect.bisect_right(range(self.first, self.last), begin, key=self._begin) - 1
        borders = [self._begin(document)]
        while borders[-1] < begin + length:
            borders.append(self._begin(document + len(borders)))
        positions = np.arange(begin, begin + length)
        numbers = np.searchsorted(borders, positions, side="right") - 1
        is_begin = np.zeros(length, dtype=bool)
        if self.bos_token_id is not None:
            is_begin = np.isin(positions, borders)
        added = 0 if self.bos_token_id is None else document - self.first + (borders[0] < begin)
        start = begin + self._offset - added
        stop = start + length - int(is_begin.sum())
        ids = self.corpus.read(start, stop)
        self.corpus.check_ids(ids, start, self.vocab_size)
        tokens = np.full(length, self.bos_token_id or 0, dtype=np.int64)
        tokens[~is_begin] = ids
        return RowPiece(tokens, document + numbers, is_begin)


class PretrainingRows(Dataset):
    """Rows of L tokens from a blend of streams, in consumption order, as many epochs as needed.

    Item i says which stream, and the how-manieth row of it; a stream's row of an epoch stands where a permutation by
    (seed, epoch) says, and an epoch cuts the stream at other places than the last one. All of it follows from
    (seed, i): nothing is stored, and a resume at any position continues the same sequence.

    Items are dicts as of `clean_sample`, with `document_ids` int64 [L] if documents are told apart, and `key_mask`
    bool [L] with random lengths.

    Args:
        streams: one or more.
        weights: of the streams.
        sequence_length: L.
        num_samples: length of the dataset.
        seed: of the order; None reads rows as they stand, and cuts at multiples of L.
        num_counted: items from here on repeat earlier ones and count nothing (fillers); None: all count.
        document_boundaries: tell the documents of a row apart.
        random_length_probability: with it, a row ends at a random place; what follows is neither seen nor trained.

    Raises:
        ValueError: a stream is shorter than one row, or weights do not fit.
    """

    def __init__(
        self,
        streams: Sequence[DocumentStream],
        weights: Sequence[float],
        sequence_length: int,
        num_samples: int,
        seed: int | None,
        num_counted: int | None = None,
        document_boundaries: bool = True,
        random_length_probability: float = 0.0,
    ) -> None:
        self.rows_per_stream = [_count_rows(stream, sequence_length) for stream in streams]
        self.num_rows = sum(self.rows_per_stream)
        self.streams = streams
        self.sequence_length = sequence_length
        self.num_samples = num_samples
        self.seed = seed
        self.num_counted = num_samples if num_counted is None else num_counted
        self.document_boundaries = document_boundaries
        self.random_length_probability = random_length_probability
        self._blend = Blend(weights)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        check_index(index, self.num_samples)
        piece = self._read(int(index) % self.num_counted)
        loss_mask = torch.from_numpy(~piece.is_begin)
        sample = {
            "tokens": torch.from_numpy(piece.tokens),
            "loss_mask": loss_mask & (index < self.num_counted),
            "sample_index": torch.tensor(index, dtype=torch.int64),
        }
        if self.document_boundaries:
            changes = np.diff(piece.documents, prepend=piece.documents[0]) != 0
            sample["document_ids"] = torch.from_numpy(np.cumsum(changes))
        if self.random_length_probability:
            sample["key_mask"] = torch.arange(self.sequence_length) < self._length(int(index))
            sample["loss_mask"] &= sample["key_mask"]
        return sample

    def _read(self, index: int) -> RowPiece:
        source, position = self._blend.place(index)
        stream, (epoch, row) = self.streams[source], divmod(position, self.rows_per_stream[source])
        cut = 0
        if self.seed is not None:
            row = permuted(row, self.rows_per_stream[source], (self.seed, _ORDER, source, epoch))
            cut = random_integer(self.seed, _CUT, source, epoch) % self.sequence_length
        return stream.read(cut + row * self.sequence_length, self.sequence_length)

    def _length(self, index: int) -> int:
        draw = random_integer(self.seed or 0, _LENGTH, index)
        if draw >= self.random_length_probability * 2**64:
            return self.sequence_length
        return 1 + random_integer(draw) % self.sequence_length


def count_unrepeated_rows(streams: Sequence[DocumentStream], weights: Sequence[float], sequence_length: int) -> int:
    """Items of the blend before the first stream is used up."""
    num_rows = [_count_rows(stream, sequence_length) for stream in streams]
    blend = Blend(weights)
    enough = sum(num_rows) + 1
    used_up = bisect.bisect_left(
        range(enough),
        True,
        key=lambda items: any(count > rows for count, rows in zip(blend.counts(items), num_rows, strict=True)),
    )
    return used_up - 1


def _count_rows(stream: DocumentStream, sequence_length: int) -> int:
    if stream.num_tokens < sequence_length:
        raise ValueError(
            f"documents {stream.first} to {stream.last - 1} of {stream.corpus.prefix} have {stream.num_tokens} tokens, "
            f"too few for one sequence of seq_length={sequence_length}; change `split`, or shorten seq_length"
        )
    return stream.num_tokens // sequence_length
