"""What all data modules share: batch sizes, the position in the data, loaders and the trainer's limits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from nemo.collections.common.tokenizers.tokenizer_spec import TokenizerSpec
from nemo.lightning.data import WrappedDataLoader
from nemo.lightning.io.mixin import IOMixin
from nemo.lightning.pytorch.plugins import MegatronDataSampler
from torch.utils.data import Dataset

from nemo_dllm.collections.diffusion.data.batch_sizes import check_batch_sizes
from nemo_dllm.collections.diffusion.data.tokenizer import load_nemo_tokenizer


class DiffusionDataModule(pl.LightningDataModule, IOMixin):
    """Feeds a Megatron trainer with samples whose index is their position in consumption order.

    Subclasses provide `training_dataset` and `validation_dataset`; do not instantiate this one. Resume is exact, also
    with another micro-batch or data-parallel size: the checkpoint holds the number of consumed samples.

    Args:
        seq_length: tokens per sample.
        micro_batch_size: samples per forward pass of one rank.
        global_batch_size: samples per optimizer step.
        num_workers: processes that load samples; None is 2 with a CUDA device, else 0 (in the training process).
        output_log: log `consumed_samples` and `global_batch_size` every step; NeMo's checkpoint names use the former.

    Raises:
        ValueError: a size is below 1, or the global batch is not a multiple of the micro-batch.
    """

    def __init__(
        self,
        seq_length: int,
        micro_batch_size: int,
        global_batch_size: int,
        num_workers: int | None = None,
        output_log: bool = True,
    ) -> None:
        super().__init__()
        if seq_length < 1:
            raise ValueError(f"seq_length={seq_length} must be at least 1")
        check_batch_sizes(global_batch_size, micro_batch_size)
        self.seq_length = seq_length
        self.micro_batch_size = micro_batch_size
        self.global_batch_size = global_batch_size
        self.num_workers = num_workers
        self.data_sampler = MegatronDataSampler(
            seq_len=seq_length,
            micro_batch_size=micro_batch_size,
            global_batch_size=global_batch_size,
            output_log=output_log,
        )
        self._limits_in_microbatches: dict[str, int | float] = {}
        self._tokenizer: str | Path | TokenizerSpec | None = None

    @property
    def tokenizer(self) -> TokenizerSpec:
        """NeMo's tokenizer; that of a Hugging Face folder or name is loaded on first use.

        Raises:
            ValueError: there is none.
            FileNotFoundError: its folder does not exist.
        """
        self._tokenizer = load_nemo_tokenizer(self._tokenizer)
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: str | Path | TokenizerSpec | None) -> None:
        self._tokenizer = tokenizer

    def io_transform_args(self, init_fn: Callable, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Arguments as NeMo writes them beside each checkpoint, which knows no paths, only strings."""
        arguments = super().io_transform_args(init_fn, *args, **kwargs)
        return {name: _paths_to_strings(value) for name, value in arguments.items()}

    def training_dataset(self, num_samples: int) -> Dataset:
        """The first `num_samples` samples in consumption order."""
        raise NotImplementedError

    def validation_dataset(self) -> Dataset:
        """The validation rows, a multiple of the global batch size."""
        raise NotImplementedError

    def setup(self, stage: str) -> None:
        """Build the validation data, whose size the trainer's limits refer to; a fresh trainer starts at sample 0."""
        if self.trainer.global_step == 0:
            self._start_at(consumed_samples=0, global_step=0)
        self._validation_dataset = self.validation_dataset()

    def train_dataloader(self) -> WrappedDataLoader:
        """Samples from the current position to the end of training.

        Raises:
            ValueError: the trainer has no `max_steps`.
        """
        if self.trainer.max_steps < 1:
            raise ValueError(f"trainer.max_steps={self.trainer.max_steps} must be the number of optimizer steps")
        consumed_samples = self.consumed_samples
        self._start_at(consumed_samples, self.trainer.global_step)
        # One step at least: the loader of a finished run is built too, and the sampler refuses to be empty.
        steps = max(self.trainer.max_steps - self.trainer.global_step, 1)
        return self._dataloader(self.training_dataset(consumed_samples + steps * self.global_batch_size), "train")

    def val_dataloader(self) -> WrappedDataLoader:
        """The validation rows."""
        return self._dataloader(self._validation_dataset, "validation")

    def test_dataloader(self) -> WrappedDataLoader:
        """The validation rows; there is no third split."""
        return self._dataloader(self._validation_dataset, "test")

    @property
    def consumed_samples(self) -> int:
        """Training samples consumed since the start of training, across resumes."""
        steps = self.trainer.global_step - self.data_sampler.init_global_step
        return self.data_sampler.init_consumed_samples + steps * self.global_batch_size

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: the position, as samples and as the optimizer step at which it was reached."""
        return {"consumed_samples": self.consumed_samples, "global_step": self.trainer.global_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the saved position."""
        self._start_at(**state_dict)

    def reconfigure_limit_batches(self) -> None:
        """Turn the trainer's limits from global batches into micro-batches, which Lightning counts.

        NeMo calls this at each start of the trainer; a limit that was turned before stays.
        """
        from megatron.core.num_microbatches_calculator import get_num_microbatches

        num_validation_batches = len(self._validation_dataset) // self.global_batch_size
        for name, num_global_batches in {
            "limit_train_batches": self.trainer.max_steps,
            "limit_val_batches": num_validation_batches,
            "limit_test_batches": num_validation_batches,
            "num_sanity_val_steps": num_validation_batches,
        }.items():
            limit = getattr(self.trainer, name)
            if limit == self._limits_in_microbatches.get(name):
                continue
            if isinstance(limit, float):
                if not 0.0 < limit < 1.0:  # nothing, everything, or infinity
                    continue
                limit = max(1, int(num_global_batches * limit))
            self._limits_in_microbatches[name] = limit * get_num_microbatches()
            setattr(self.trainer, name, self._limits_in_microbatches[name])

    def _start_at(self, consumed_samples: int, global_step: int) -> None:
        self.data_sampler.init_consumed_samples = consumed_samples
        self.data_sampler.init_global_step = global_step

    def _dataloader(self, dataset: Dataset, mode: str) -> WrappedDataLoader:
        has_cuda = torch.cuda.is_available()
        num_workers = (2 if has_cuda else 0) if self.num_workers is None else self.num_workers
        return WrappedDataLoader(
            mode=mode,
            dataset=dataset,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=has_cuda,
        )


def _paths_to_strings(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [_paths_to_strings(item) for item in value]
    return value
