"""The Lightning data module for pretraining on corpora in Megatron-LM's .bin and .idx files."""

import math
import os
from collections.abc import Sequence
from functools import cached_property
from numbers import Real
from pathlib import Path

from nemo.collections.common.tokenizers.huggingface.auto_tokenizer import AutoTokenizer
from nemo.lightning.data import WrappedDataLoader

from nemo_dllm.collections.diffusion.data.base_datamodule import DiffusionDataModule
from nemo_dllm.collections.diffusion.data.bits_per_byte import count_row_bytes
from nemo_dllm.collections.diffusion.data.indexed import TokenFile, without_suffix
from nemo_dllm.collections.diffusion.data.permutation import Blend
from nemo_dllm.collections.diffusion.data.pretraining import DocumentStream, PretrainingRows, count_unrepeated_rows
from nemo_dllm.collections.diffusion.data.tokenizer import vocabulary_size

SPLITS = ("training", "validation", "test")


class PretrainingDataModule(DiffusionDataModule):
    """Pretraining on a blend of encoded corpora, as `preprocess` or Megatron-LM writes them.

    Opening a corpus reads its index's header; no other index is built, so there is nothing to wait for and nothing for
    ranks to race for. Workers map the files and keep nothing.

    Args:
        paths: of corpora, without suffix; one or a list.
        tokenizer: Hugging Face tokenizer folder or name that the corpora were encoded with, or NeMo's AutoTokenizer;
            None is set to that of the checkpoint which the run starts from.
        weights: share of each corpus in the samples, in any unit; None goes by their training tokens.
        split: shares of documents for training, validation and test, in the order of the corpus.
        validation_paths: corpora for validation; `split` then says nothing about training corpora but their test share.
        bos_token_id: put before every document, never masked, for models that predict a token from its left neighbour;
            None puts nothing.
        document_boundaries: positions, attention and blocks begin anew with each document of a row; False takes a row
            for one text.
        random_length_probability: share of rows that end at a random place, in [0, 1]; shapes stay.
        num_val_rows: validation rows in use; None uses all of which none repeats.
        seed: of the order; non-negative.
        seq_length, micro_batch_size, global_batch_size, num_workers, output_log: see `DiffusionDataModule`.

    Raises:
        ValueError: (at construction) a field is out of range; (at setup) a corpus is damaged or too short.
        FileNotFoundError: (at setup) a file does not exist.
    """

    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        tokenizer: str | Path | AutoTokenizer | None = None,
        weights: Sequence[float] | None = None,
        seq_length: int = 2048,
        micro_batch_size: int = 4,
        global_batch_size: int = 32,
        split: Sequence[float] = (0.98, 0.02, 0.0),
        validation_paths: str | Path | Sequence[str | Path] | None = None,
        bos_token_id: int | None = None,
        document_boundaries: bool = True,
        random_length_probability: float = 0.0,
        num_val_rows: int | None = 256,
        seed: int = 1234,
        num_workers: int | None = None,
        output_log: bool = True,
    ) -> None:
        super().__init__(seq_length, micro_batch_size, global_batch_size, num_workers, output_log)
        self.paths = paths
        self.weights = weights
        self.split = split
        self.validation_paths = validation_paths
        self.bos_token_id = bos_token_id
        self.document_boundaries = document_boundaries
        self.random_length_probability = random_length_probability
        self.num_val_rows = num_val_rows
        self.seed = seed
        self.tokenizer = tokenizer
        self._check_fields()

    def _check_fields(self) -> None:
        shares = self.split if isinstance(self.split, Sequence) else ()
        are_numbers = all(isinstance(share, Real) and 0 <= share < math.inf for share in shares)
        if len(shares) != len(SPLITS) or not are_numbers or not shares[0]:
            raise ValueError(
                f"split={self.split} must be shares of {', '.join(SPLITS)}, the first above 0, e.g. (0.98, 0.02, 0)"
            )
        if self.split[1] <= 0 and self.validation_paths is None:
            raise ValueError(f"split={self.split} leaves no validation; give it a share, or name validation_paths")
        if not 0.0 <= self.random_length_probability <= 1.0:
            raise ValueError(f"random_length_probability={self.random_length_probability} must be in [0, 1]")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must not be negative")
        if self.num_val_rows is not None and self.num_val_rows < 1:
            raise ValueError(f"num_val_rows={self.num_val_rows} must be at least 1, or None for all")
        for name in ("paths", "validation_paths"):
            _check_paths(name, _listed(getattr(self, name) or ()))
        if not _listed(self.paths):
            raise ValueError("paths=[] names no corpus; give the path of a .bin and .idx pair, no suffix")
        if self.weights is not None:
            Blend(self.weights)
            if len(self.weights) != len(_listed(self.paths)):
                raise ValueError(f"{len(self.weights)} weights for {len(_listed(self.paths))} paths; give one per path")

    def setup(self, stage: str) -> None:
        """Open the corpora and build the validation data."""
        corpora = [TokenFile(path) for path in _listed(self.paths)]
        shares = self.split if self.validation_paths is None else (self.split[0] + self.split[1], 0.0, self.split[2])
        self._streams = {name: [] for name, share in zip(SPLITS, shares, strict=True) if share > 0}
        for corpus in corpora:
            borders = _borders(corpus.num_documents, shares)
            for name, first, last in zip(SPLITS, borders, borders[1:], strict=False):
                if name in self._streams:
                    self._streams[name].append(self._stream(corpus, first, last))
        self._weights = self.weights or [stream.num_tokens for stream in self._streams["training"]]
        self._validation_weights = self._weights
        if self.validation_paths is not None:
            corpora = [TokenFile(path) for path in _listed(self.validation_paths)]
            self._streams["validation"] = [self._stream(corpus, 0, corpus.num_documents) for corpus in corpora]
            self._validation_weights = [stream.num_tokens for stream in self._streams["validation"]]
        super().setup(stage)

    def training_dataset(self, num_samples: int) -> PretrainingRows:
        """The first `num_samples` samples in consumption order."""
        return PretrainingRows(
            self._streams["training"],
            self._weights,
            self.seq_length,
            num_samples,
            self.seed,
            document_boundaries=self.document_boundaries,
            random_length_probability=self.random_length_probability,
        )

    def validation_dataset(self) -> PretrainingRows:
        """The validation rows, filled up to a multiple of the global batch size by rows that do not count."""
        return self._rows_as_they_stand("validation", self._validation_weights)

    @cached_property
    def num_validation_bytes(self) -> int:
        """UTF-8 bytes of the validation tokens that count; needs `setup`."""
        return count_row_bytes(self._validation_dataset, self.tokenizer.tokenizer)

    def test_dataloader(self) -> WrappedDataLoader:
        """The rows of the test share; those of validation if there is none."""
        if "test" not in self._streams:
            return super().test_dataloader()
        return self._dataloader(self._rows_as_they_stand("test", self._weights), "test")

    def _rows_as_they_stand(self, name: str, weights: Sequence[float]) -> PretrainingRows:
        available = count_unrepeated_rows(self._streams[name], weights, self.seq_length)
        num_rows = min(available, self.num_val_rows or available)
        num_samples = -(-num_rows // self.global_batch_size) * self.global_batch_size
        return PretrainingRows(
            self._streams[name],
            weights,
            self.seq_length,
            num_samples,
            seed=None,
            num_counted=num_rows,
            document_boundaries=self.document_boundaries,
        )

    def _stream(self, corpus: TokenFile, first: int, last: int) -> DocumentStream:
        return DocumentStream(corpus, first, last, self._vocabulary_size, self.bos_token_id)

    @cached_property
    def _vocabulary_size(self) -> int:
        return vocabulary_size(self.tokenizer.tokenizer)


def _borders(num_documents: int, shares: Sequence[float]) -> list[int]:
    """Where each split's documents begin, and the end; a split with a share has a document where there are enough."""
    wanted = [share > 0 for share in shares]
    borders = [0]
    for part, share in enumerate(shares):
        exact = borders[-1] + round(num_documents * share / sum(shares))
        still_needed = sum(wanted[part + 1 :])
        borders.append(max(borders[-1] + wanted[part], min(exact, num_documents - still_needed)))
    last = max(part for part, share in enumerate(shares) if share > 0)
    return [*borders[: last + 1], *([num_documents] * (len(shares) - last))]


def _check_paths(name: str, paths: Sequence[str | Path]) -> None:
    files = [os.path.realpath(without_suffix(path)) for path in paths]
    for path, file in zip(paths, files, strict=True):
        if (times := files.count(file)) > 1:
            raise ValueError(f"{name} has '{path}' {times} times; name it once, with the sum of its weights")


def _listed(paths: str | Path | Sequence[str | Path]) -> list[str | Path]:
    return [paths] if isinstance(paths, str | Path) else list(paths)
