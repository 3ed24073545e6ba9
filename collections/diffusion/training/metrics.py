"""Metrics of a diffusion run, to every logger of the trainer."""

import math
import time

import lightning.pytorch as pl
import torch
from megatron.core import parallel_state

from nemo_dllm.collections.diffusion.models.loss import DiffusionLossReduction, LossTotals
from nemo_dllm.collections.diffusion.training.flops import H200_BF16_FLOPS, train_flops_per_token


def likelihood_metrics(totals: LossTotals, prefix: str) -> dict[str, float]:
    """Loss, likelihood bound (nats per token), perplexity bound, mask ratio, and NLL by time, as floats.

    Times are in ten equal steps over (0, 1]; ``nll_at_t0.1`` is the mean negative log-likelihood of tokens masked at
    times in (0, 0.1]. Empty steps are left out. ``next_token_nll`` is that of an added next-token loss. Waits for the
    device.
    """
    nll_bound = totals.nll_bound.item()
    metrics = {
        f"{prefix}/loss": totals.loss.item(),
        f"{prefix}/nll_bound": nll_bound,
        f"{prefix}/perplexity_bound": math.exp(min(nll_bound, 700.0)),
        f"{prefix}/mask_ratio": totals.mask_ratio.item(),
    }
    bucket_nll = totals.bucket_nll.tolist()
    for index, nll in enumerate(bucket_nll, start=1):
        if not math.isnan(nll):
            metrics[f"{prefix}/nll_at_t{index / len(bucket_nll):.1f}"] = nll
    next_token_nll = totals.next_token_nll.item()
    if not math.isnan(next_token_nll):
        metrics[f"{prefix}/next_token_nll"] = next_token_nll
    return metrics


class DiffusionMetrics(pl.Callback):
    """Logs training metrics every ``trainer.log_every_n_steps`` steps and validation metrics after each validation.

    Training: loss, likelihood and perplexity bound, mask ratio, NLL by time, gradient norm, learning rate, tokens per
    second, MFU, peak memory (GB). Validation: the same likelihood metrics over all rows, and bits per byte, beside
    those of the training text's token frequencies alone, where the data module knows the bytes of its validation rows.

    Args:
        peak_flops: FLOP/s of one device, the denominator of the MFU; without CUDA no MFU is logged.
    """

    def __init__(self, peak_flops: float = H200_BF16_FLOPS):
        self.peak_flops = peak_flops
        self.train_totals: LossTotals | None = None
        self.validation_totals: LossTotals | None = None
        self.latest: dict[str, float] = {}
        """The metrics that were logged last, training and validation."""
        self._unigram_bits_per_byte: float | None = None
        self._logged_step = 0
        self._logged_time = 0.0
        self._paused_time: float | None = None

    def on_megatron_reduce_microbatches_end(self, step, loss_reduction: DiffusionLossReduction) -> None:
        """Called on the last pipeline stage once a global batch is done."""
        if step.trainer.training:
            self.train_totals = loss_reduction.totals
        elif self.validation_totals is None:
            self.validation_totals = loss_reduction.totals
        else:
            self.validation_totals += loss_reduction.totals

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        self._logged_step, self._logged_time = trainer.global_step, time.perf_counter()
        self._paused_time = None

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module, batch, batch_idx) -> None:
        """Go on with the clock, which stands still for validations and checkpoints."""
        if self._paused_time is not None:
            self._logged_time += time.perf_counter() - self._paused_time
            self._paused_time = None

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict) -> None:
        """Stop the clock."""
        self._pause()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module, outputs, batch, batch_idx) -> None:
        """Log every ``trainer.log_every_n_steps`` optimizer steps."""
        steps = trainer.global_step - self._logged_step
        if steps == 0 or trainer.global_step % trainer.log_every_n_steps:
            return
        metrics = likelihood_metrics(_from_last_stage(self.train_totals), "train")
        for source, name in (("grad_norm", "train/gradient_norm"), ("lr", "train/learning_rate")):
            if source in trainer.callback_metrics:
                metrics[name] = float(trainer.callback_metrics[source])
        metrics.update(self._throughput(trainer, pl_module, steps))
        self._log(trainer, metrics)
        self._logged_step, self._logged_time = trainer.global_step, time.perf_counter()

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clock and forget the previous validation."""
        self._pause()
        self.validation_totals = None

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the sums over all validation rows."""
        totals = _from_last_stage(self.validation_totals)
        # NeMo's own value, which names and ranks checkpoints, is a mean over global batches that gives the first of
        # them a weight of one and the others that of a micro-batch.
        pl_module.log("val_loss", totals.loss.float(), on_epoch=True)
        metrics = likelihood_metrics(totals, "validation")
        # None where the data module does not know, and no text behind special tokens alone.
        if num_bytes := getattr(trainer.datamodule, "num_validation_bytes", None):
            metrics["validation/bits_per_byte"] = totals.nll_bound_sum.item() / num_bytes / math.log(2)
        if hasattr(trainer.datamodule, "unigram_bits_per_byte"):
            if self._unigram_bits_per_byte is None:
                self._unigram_bits_per_byte = trainer.datamodule.unigram_bits_per_byte()
            metrics["validation/unigram_bits_per_byte"] = self._unigram_bits_per_byte
        self._log(trainer, metrics)

    def _pause(self) -> None:
        if self._paused_time is None:
            self._paused_time = time.perf_counter()

    def _throughput(self, trainer: pl.Trainer, pl_module, steps: int) -> dict[str, float]:
        data = trainer.datamodule
        seconds = (time.perf_counter() - self._logged_time) / steps
        tokens_per_second = data.global_batch_size * data.seq_length / seconds
        metrics = {"train/tokens_per_second": tokens_per_second, "train/step_seconds": seconds}
        if torch.cuda.is_available():
            objective = pl_module.objective
            flops = train_flops_per_token(
                pl_module.config, pl_module.logical_vocab_size, data.seq_length, objective.block_size, objective.views
            )
            metrics["train/mfu"] = tokens_per_second * flops / (self.peak_flops * trainer.world_size)
            metrics["train/peak_memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
        return metrics

    def _log(self, trainer: pl.Trainer, metrics: dict[str, float]) -> None:
        self.latest.update(metrics)
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)


def _from_last_stage(totals: LossTotals | None) -> LossTotals:
    """The last pipeline stage's totals, on every rank of its pipeline."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return totals
    if totals is None:
        totals = LossTotals.empty(torch.cuda.current_device())
    source = parallel_state.get_pipeline_model_parallel_last_rank()
    torch.distributed.broadcast(totals.report, src=source, group=parallel_state.get_pipeline_model_parallel_group())
    return totals
