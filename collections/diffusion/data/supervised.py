"""Supervised samples as rows for training: padded one by one, or packed. Legend: L tokens of a row."""

from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from nemo_dllm.collections.diffusion.data.order import EpochOrder, length_grouped_permutation
from nemo_dllm.collections.diffusion.data.packed import epoch_permutation
from nemo_dllm.collections.diffusion.data.packing import Packs, pack_by_length
from nemo_dllm.collections.diffusion.data.samples import check_index
from nemo_dllm.collections.diffusion.data.supervised_tokens import SupervisedTokens


class FittedSample(NamedTuple):
    """One sample as it enters a row. tokens: int64 [n]; loss_mask: bool [n], True where a token is trained."""

    tokens: np.ndarray
    loss_mask: np.ndarray


class FittedSamples:
    """Samples cut to a length and filled up to whole blocks.

    Too long samples lose their end. A sample that would keep no token of an answer is left out: it would train
    nothing, and a batch of such samples has no loss.

    Args:
        corpus: encoded conversations.
        seq_length: most tokens of a sample.
        end_token_id: the tokenizer's end-of-text token, which fills blocks.
        block_size: of block diffusion; fills each sample with trained end tokens to a multiple of it. None: no fill.
        drop_too_long: leave samples out instead of cutting them.
        chosen: [k] samples of the corpus to use; None takes all.

    Raises:
        ValueError: `seq_length` is not a multiple of `block_size`, or no sample is left.
    """

    def __init__(
        self,
        corpus: SupervisedTokens,
        seq_length: int,
        end_token_id: int,
        block_size: int | None = None,
        drop_too_long: bool = False,
        chosen: np.ndarray | None = None,
    ) -> None:
        if block_size is not None and (block_size < 1 or seq_length % block_size):
            raise ValueError(
                f"seq_length={seq_length} is not a multiple of block_size={block_size}; change one of them"
            )
        self.corpus = corpus
        self.seq_length = seq_length
        self.end_token_id = end_token_id
        self._starts = corpus.starts()
        full_lengths = np.asarray(corpus.ends) - self._starts
        chosen = np.arange(len(full_lengths)) if chosen is None else chosen
        kept = np.minimum(full_lengths, seq_length)
        too_long = full_lengths[chosen] > seq_length
        unanswered = too_long & (np.asarray(corpus.first_answers)[chosen] >= seq_length)
        dropped = too_long if drop_too_long else unanswered
        self.chosen = chosen[~dropped]
        self.num_unanswered = int(unanswered.sum())
        self.num_dropped = int(dropped.sum())
        self.num_truncated = int((too_long & ~dropped).sum())
        self.first_dropped = corpus.rows[chosen[dropped][0]].tolist() if dropped.any() else None
        if len(self.chosen) == 0:
            raise ValueError(
                f"none of {len(chosen)} samples has an answer within seq_length={seq_length} tokens; raise it"
            )
        self._kept = kept[self.chosen]
        block = block_size or 1
        self.lengths = -(-self._kept // block) * block
        self.num_tokens = int(self._kept.sum())

    def __len__(self) -> int:
        return len(self.chosen)

    def sample(self, number: int) -> FittedSample:
        """The sample, `lengths[number]` tokens."""
        start, kept, length = self._starts[self.chosen[number]], self._kept[number], self.lengths[number]
        tokens = np.full(length, self.end_token_id, dtype=np.int64)
        loss_mask = np.ones(length, dtype=bool)
        tokens[:kept] = self.corpus.tokens[start : start + kept]
        loss_mask[:kept] = self.corpus.answer[start : start + kept]
        return FittedSample(tokens, loss_mask)

    def summary(self, sources: list[str]) -> str:
        """One line for a person."""
        line = f"{len(self):,} samples of {int(self.lengths.sum()):,} tokens, {self.num_truncated:,} cut"
        if not self.num_dropped:
            return line
        source, row = self.first_dropped
        reason = "longer than" if self.num_dropped > self.num_unanswered else "without an answer within"
        place = f"the first: {sources[source]}:{row}"
        return f"{line}, {self.num_dropped:,} left out, {reason} {self.seq_length} tokens, {place}"


class PaddedRows(Dataset):
    """One sample per row, padded on the right as far as the longest of its global batch.

    All micro-batches of a global batch have one shape, so that neither shapes nor trained pads depend on how ranks
    share it. Training item i is `order.at(i)`; items are dicts as of `clean_sample`, with `key_mask` where pads are
    not trained.

    Args:
        samples: what to read.
        num_samples: length of the dataset.
        order: of the samples, epoch after epoch; None is their own.
        global_batch_size: items per optimizer step.
        num_counted: items from here on repeat earlier ones and count nothing (fillers); None: all count.
        first_index: an item with which an optimizer step begins.
        pad_to_multiple_of: rows end at a multiple of it, at most L; None pads all rows to L.
        supervise_padding: pads are end tokens to be trained and attended to (LLaDA's way); else neither.
    """

    def __init__(
        self,
        samples: FittedSamples,
        num_samples: int,
        order: EpochOrder | None,
        global_batch_size: int,
        num_counted: int | None = None,
        first_index: int = 0,
        pad_to_multiple_of: int | None = None,
        supervise_padding: bool = False,
    ) -> None:
        self.samples = samples
        self.num_rows = len(samples)
        self.num_samples = num_samples
        self.num_counted = num_samples if num_counted is None else num_counted
        self.order = order
        self.global_batch_size = global_batch_size
        self.first_index = first_index
        self.pad_to_multiple_of = pad_to_multiple_of
        self.supervise_padding = supervise_padding
        # Of the global batch read last, by its first item: each of its items asks for it.
        self._width_of_batch = (-1, 0)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        check_index(index, self.num_samples)
        tokens, loss_mask = self.samples.sample(self._sample_number(index))
        width, length = self._width(index), len(tokens)
        row = {
            "tokens": _padded(tokens, width, self.samples.end_token_id),
            "loss_mask": _padded(loss_mask, width, self.supervise_padding),
            "sample_index": torch.tensor(index, dtype=torch.int64),
        }
        if not self.supervise_padding:
            row["key_mask"] = torch.arange(width) < length
        if index >= self.num_counted:
            row["loss_mask"] = torch.zeros(width, dtype=torch.bool)
        return row

    def _sample_number(self, index: int) -> int:
        if self.order is None:
            return index % self.num_counted
        order, position = self.order.at(index)
        return int(order[position])

    def _width(self, index: int) -> int:
        if self.pad_to_multiple_of is None:
            return self.samples.seq_length
        begin = index - (index - self.first_index) % self.global_batch_size
        stop = min(begin + self.global_batch_size, self.num_samples)
        begin = max(begin, 0)
        if self._width_of_batch[0] != begin:
            longest = max(int(self.samples.lengths[self._sample_number(item)]) for item in range(begin, stop))
            width = min(-(-longest // self.pad_to_multiple_of) * self.pad_to_multiple_of, self.samples.seq_length)
            self._width_of_batch = (begin, width)
        return self._width_of_batch[1]


class PackedRows(Dataset):
    """Several samples per row of L tokens, told apart by `document_ids`.

    Every epoch packs anew, into as many rows. Item i is row i % num_rows of epoch i // num_rows.

    Args:
        samples: what to read.
        num_samples: length of the dataset.
        seed: of the packs and their order; None packs and reads in the samples' own order.
        num_counted: as of `PaddedRows`.
        supervise_padding: the rest of a row is end tokens of its last sample, trained like an answer's; else it is
            neither seen nor trained.
    """

    def __init__(
        self,
        samples: FittedSamples,
        num_samples: int,
        seed: int | None,
        num_counted: int | None = None,
        supervise_padding: bool = False,
    ) -> None:
        self.samples = samples
        self.supervise_padding = supervise_padding
        self.num_samples = num_samples
        self.num_counted = num_samples if num_counted is None else num_counted
        self.seed = seed
        self.num_rows = len(self._packs(0).ends)
        self._order = EpochOrder(self.num_rows, self._packs)

    @property
    def efficiency(self) -> float:
        """Share of the positions that hold a sample's token, in (0, 1]."""
        return float(self.samples.lengths.sum()) / (self.num_rows * self.samples.seq_length)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        check_index(index, self.num_samples)
        packs, row = self._order.at(index % self.num_counted)
        members = [self.samples.sample(number) for number in packs.row(row).tolist()]
        lengths = [len(member.tokens) for member in members]
        width, trained = self.samples.seq_length, self.supervise_padding
        loss_mask = _padded(np.concatenate([member.loss_mask for member in members]), width, trained)
        row = {
            "tokens": _padded(np.concatenate([m.tokens for m in members]), width, self.samples.end_token_id),
            "loss_mask": loss_mask & (index < self.num_counted),
            "sample_index": torch.tensor(index, dtype=torch.int64),
            "document_ids": _padded(np.repeat(np.arange(len(members)), lengths), width, len(members) - trained),
        }
        if not trained:
            row["key_mask"] = torch.arange(width) < sum(lengths)
        return row

    def _packs(self, epoch: int) -> Packs:
        seed = None if self.seed is None else (self.seed, epoch)
        return pack_by_length(self.samples.lengths, self.samples.seq_length, seed)


def training_order(samples: FittedSamples, seed: int, length_group_size: int | None = None) -> EpochOrder:
    """Shuffled anew in every epoch; with a group size, samples of similar lengths follow each other."""
    if length_group_size is None:
        return EpochOrder(len(samples), partial(epoch_permutation, len(samples), seed))
    grouped = partial(length_grouped_permutation, samples.lengths, seed, group_size=length_group_size)
    return EpochOrder(len(samples), grouped)


def count_packed_rows(samples: FittedSamples) -> int:
    """Rows that packing makes of the samples, whatever the seed."""
    return len(pack_by_length(samples.lengths, samples.seq_length).ends)


def _padded(values: np.ndarray, width: int, value: int | bool) -> torch.Tensor:
    row = np.full(width, value, dtype=values.dtype)
    row[: len(values)] = values
    return torch.from_numpy(row)
