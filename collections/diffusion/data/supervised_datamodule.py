"""The Lightning data module for supervised fine-tuning."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from nemo.collections.common.tokenizers.huggingface.auto_tokenizer import AutoTokenizer
from nemo.lightning.base import NEMO_DATASETS_CACHE
from nemo.utils import logging
from torch.utils.data import Dataset

from nemo_dllm.collections.diffusion.data.bad_rows import check_max_bad_rows, describe_bad_rows
from nemo_dllm.collections.diffusion.data.base_datamodule import DiffusionDataModule
from nemo_dllm.collections.diffusion.data.bits_per_byte import count_row_bytes
from nemo_dllm.collections.diffusion.data.chat import check_columns
from nemo_dllm.collections.diffusion.data.chat_encoder import ChatEncoder
from nemo_dllm.collections.diffusion.data.chat_template import LOSS_TURNS, ChatTemplate
from nemo_dllm.collections.diffusion.data.order import EpochOrder
from nemo_dllm.collections.diffusion.data.sources import find_sources
from nemo_dllm.collections.diffusion.data.supervised import (
    FittedSamples,
    PackedRows,
    PaddedRows,
    count_packed_rows,
    training_order,
)
from nemo_dllm.collections.diffusion.data.supervised_tokens import SupervisedCorpus, cached_supervised
from nemo_dllm.collections.diffusion.data.text import check_validation_fraction

BUILT_IN = Path(__file__).with_name("questions.jsonl")
"""Questions with answers: enough to see that a fine-tuning starts, not to learn from."""


class SupervisedDataModule(DiffusionDataModule):
    """Supervised fine-tuning on chats, prompts with completions, or instructions.

    Only answers are masked and trained, the token that ends each included; prompts never are.

    Args:
        path: files (.jsonl, .parquet; .gz or .zst), folders, or Hugging Face datasets, one or a list; None reads a few
            questions of our own, written to be joined as they stand (`chat_template=""`).
        tokenizer: Hugging Face tokenizer folder or name, or NeMo's AutoTokenizer; None is set to that of the checkpoint
            which the run starts from.
        validation_path: the same for validation; None keeps a share of the samples back.
        validation_fraction: that share, in (0, 1). Equal samples are never on both sides.
        columns: how fields of `chat.FIELDS` are called in the data, e.g. {"prompt": "question"}.
        split, validation_split: of datasets with several splits.
        chat_template: Jinja text, or a file with it; None takes the tokenizer's. See `ChatTemplate`.
        template_arguments: further variables of the template, e.g. {"enable_thinking": False}.
        loss_turns: "all" turns of the assistant are trained, or only the "last".
        block_size: of block diffusion; fills each sample with trained end tokens to a multiple of it.
        supervise_padding: pads are trained end tokens, as LLaDA has it; False neither shows nor trains them. In packed
            rows they belong to the last sample.
        packing: several samples per row, told apart.
        pad_to_multiple_of: pad to the longest row of the global batch, rounded up; None pads to `seq_length`, which
            pipeline parallelism needs.
        group_by_length: batches of samples with similar lengths.
        drop_too_long: leave samples out that are longer than `seq_length`, instead of cutting them.
        num_val_rows: validation rows in use; None uses all.
        max_bad_rows: rows that cannot be used before this gives up.
        seed: of the order; non-negative.
        cache_dir: None uses a folder in NeMo's dataset cache.
        seq_length, micro_batch_size, global_batch_size, num_workers, output_log: see `DiffusionDataModule`.

    Raises:
        ValueError: (at construction) fields are out of range or contradict each other; (on first use) the data or the
            template are unusable.
        FileNotFoundError: (on first use) a path does not exist.
    """

    def __init__(
        self,
        path: str | Path | Sequence[str | Path] | None = None,
        tokenizer: str | Path | AutoTokenizer | None = None,
        seq_length: int = 2048,
        micro_batch_size: int = 1,
        global_batch_size: int = 32,
        validation_path: str | Path | Sequence[str | Path] | None = None,
        validation_fraction: float = 0.05,
        # dict, not Mapping: the command line of nemo_run reads no other.
        columns: dict[str, str] | None = None,
        split: str | None = None,
        validation_split: str | None = None,
        chat_template: str | Path | None = None,
        template_arguments: dict[str, Any] | None = None,
        loss_turns: str = "all",
        block_size: int | None = None,
        supervise_padding: bool = False,
        packing: bool = False,
        pad_to_multiple_of: int | None = None,
        group_by_length: bool = False,
        drop_too_long: bool = False,
        num_val_rows: int | None = None,
        max_bad_rows: int = 100,
        seed: int = 1234,
        num_workers: int | None = None,
        cache_dir: str | Path | None = None,
        output_log: bool = True,
    ) -> None:
        super().__init__(seq_length, micro_batch_size, global_batch_size, num_workers, output_log)
        self.path = path
        self.validation_path = validation_path
        self.validation_fraction = validation_fraction
        self.columns = columns
        self.split = split
        self.validation_split = validation_split
        self.chat_template = chat_template
        self.template_arguments = template_arguments
        self.loss_turns = loss_turns
        self.block_size = block_size
        self.supervise_padding = supervise_padding
        self.packing = packing
        self.pad_to_multiple_of = pad_to_multiple_of
        self.group_by_length = group_by_length
        self.drop_too_long = drop_too_long
        self.num_val_rows = num_val_rows
        self.max_bad_rows = max_bad_rows
        self.seed = seed
        self.cache_dir = Path(cache_dir) if cache_dir else NEMO_DATASETS_CACHE / "diffusion_supervised"
        self.tokenizer = tokenizer
        # The groups that the order is made of; a resumed run keeps those with which it began.
        self._length_group_size = global_batch_size
        self._check_fields()

    def _check_fields(self) -> None:
        check_validation_fraction(self.validation_fraction)
        check_columns(self.columns or {})
        check_max_bad_rows(self.max_bad_rows)
        if self.loss_turns not in LOSS_TURNS:
            raise ValueError(f"loss_turns={self.loss_turns!r} is unknown; known: {', '.join(LOSS_TURNS)}")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must not be negative")
        for name in ("num_val_rows", "pad_to_multiple_of", "block_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1, or None")
        for name in ("block_size", "pad_to_multiple_of"):
            if self.seq_length % (getattr(self, name) or 1):
                raise ValueError(f"seq_length={self.seq_length} is not a multiple of {name}={getattr(self, name)}")
        for name in ("group_by_length", "pad_to_multiple_of"):
            if self.packing and getattr(self, name):
                raise ValueError(f"packing=True leaves no room for {name}={getattr(self, name)}; set one of them only")

    def prepare_data(self) -> None:
        """Fill the cache; Lightning calls this in one process per node before the others read it."""
        self._encode()

    def setup(self, stage: str) -> None:
        """Map the samples into memory, and build the validation data."""
        corpus, validation = self._encode()
        parts = (None, None) if validation else self._split(corpus)
        self.training_sources = corpus.sources
        self.training_samples = self._fit(corpus, parts[0], "training")
        self.validation_samples = self._fit(validation or corpus, parts[1], "validation")
        super().setup(stage)

    def training_dataset(self, num_samples: int) -> Dataset:
        """The first `num_samples` samples in consumption order."""
        if self.packing:
            dataset = PackedRows(
                self.training_samples, num_samples, self.seed, supervise_padding=self.supervise_padding
            )
            logging.info(f"packing: {dataset.num_rows} rows, {dataset.efficiency:.1%} of their positions in use")
            return dataset
        group_size = self._length_group_size if self.group_by_length else None
        order = training_order(self.training_samples, self.seed, group_size)
        return self._padded_rows(self.training_samples, num_samples, order, first_index=self.consumed_samples)

    def validation_dataset(self) -> Dataset:
        """The validation rows, filled up to a multiple of the global batch size by rows that do not count."""
        samples = self.validation_samples
        available = count_packed_rows(samples) if self.packing else len(samples)
        num_rows = min(available, self.num_val_rows or available)
        num_samples = -(-num_rows // self.global_batch_size) * self.global_batch_size
        if self.packing:
            return PackedRows(samples, num_samples, None, num_rows, supervise_padding=self.supervise_padding)
        return self._padded_rows(samples, num_samples, None, num_counted=num_rows)

    @cached_property
    def num_validation_bytes(self) -> int:
        """UTF-8 bytes of the validation tokens that count; needs `setup`."""
        return count_row_bytes(self._validation_dataset, self.tokenizer.tokenizer)

    def state_dict(self) -> dict[str, Any]:
        """The position, and what the order depends on."""
        return super().state_dict() | {"length_group_size": self._length_group_size}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the saved position, in the saved order."""
        self._length_group_size = state_dict["length_group_size"]
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "length_group_size"})

    def _padded_rows(
        self, samples: FittedSamples, num_samples: int, order: EpochOrder | None, **position: int
    ) -> PaddedRows:
        return PaddedRows(
            samples,
            num_samples,
            order,
            self.global_batch_size,
            pad_to_multiple_of=self.pad_to_multiple_of,
            supervise_padding=self.supervise_padding,
            **position,
        )

    def _encode(self) -> tuple[SupervisedCorpus, SupervisedCorpus | None]:
        hugging_face = self.tokenizer.tokenizer
        template = ChatTemplate(hugging_face, self.chat_template, self.loss_turns, self.template_arguments)
        encoder = ChatEncoder(hugging_face, template)

        def read(path: str | Path | Sequence[str | Path], split: str | None) -> SupervisedCorpus:
            sources = find_sources([path] if isinstance(path, str | Path) else path, split=split)
            return cached_supervised(sources, encoder, self.cache_dir, self.columns, self.max_bad_rows)

        validation = None if self.validation_path is None else read(self.validation_path, self.validation_split)
        return read(BUILT_IN if self.path is None else self.path, self.split), validation

    def _split(self, corpus: SupervisedCorpus) -> tuple[np.ndarray, np.ndarray]:
        """Training and validation samples; each goes where the hash of its tokens says."""
        hashes = corpus.samples.content_hashes()
        # One side would be empty: the smallest hash goes to validation.
        border = max(self.validation_fraction, float(np.nextafter(hashes.min(), 1)))
        training, validation = np.flatnonzero(hashes >= border), np.flatnonzero(hashes < border)
        if len(training) == 0:
            raise ValueError(
                f"path={self.path} has {len(hashes)} samples, {len(np.unique(hashes))} of them different, too few to "
                f"keep validation_fraction={self.validation_fraction} of them back; name a validation_path"
            )
        return training, validation

    def _fit(self, corpus: SupervisedCorpus, chosen: np.ndarray | None, name: str) -> FittedSamples:
        end = self.tokenizer.tokenizer.eos_token_id
        samples = FittedSamples(
            corpus.samples, self.seq_length, end, self.block_size, drop_too_long=self.drop_too_long, chosen=chosen
        )
        logging.info(f"{name}: {samples.summary(corpus.sources)}")
        if corpus.bad_rows:
            logging.warning(f"{len(corpus.bad_rows):,} rows cannot be used:\n{describe_bad_rows(corpus.bad_rows)}")
        return samples
