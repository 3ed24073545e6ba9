"""The progress of a run on the console."""

import math

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from nemo_dllm.collections.diffusion.training.metrics import DiffusionMetrics


class RunProgress(ProgressBar):
    """One bar with loss and speed, one line per validation; plain lines where the output is no terminal.

    Args:
        plain_interval: share of the run, in (0, 1], from one plain line to the next.
    """

    def __init__(self, plain_interval: float = 0.1):
        super().__init__()
        self.plain_interval = plain_interval
        self._enabled = True
        self._console: Console | None = None
        self._progress: Progress | None = None

    def disable(self) -> None:
        """Print nothing; Lightning calls this on all ranks but the first."""
        self._enabled = False

    def enable(self) -> None:
        """Print again."""
        self._enabled = True

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Show the bar."""
        if not self._enabled:
            return
        self._console = Console(highlight=False, soft_wrap=True)
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._progress.start()
        self._task = self._progress.add_task(
            "training", total=trainer.max_steps, completed=trainer.global_step, state=""
        )

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module, outputs, batch, batch_idx) -> None:
        """Move the bar."""
        if self._progress is None:
            return
        state = self._state(trainer)
        self._progress.update(self._task, completed=trainer.global_step, state=state)
        if not self._console.is_terminal:
            self._print_plainly(trainer, state)

    def _print_plainly(self, trainer: pl.Trainer, state: str) -> None:
        """A line where metrics are new, and one for the last step."""
        step, logged = trainer.global_step, max(trainer.log_every_n_steps, 1)
        interval = math.ceil(max(round(trainer.max_steps * self.plain_interval), 1) / logged) * logged
        if step % interval == 0 or step == trainer.max_steps:
            self._console.print(f"step {step}/{trainer.max_steps}  {state if step % logged == 0 else ''}".rstrip())

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print the likelihood of the validation data."""
        metrics = _latest_metrics(trainer)
        if self._progress is None or "validation/nll_bound" not in metrics:
            return
        line = f"step {trainer.global_step}: validation NLL bound {metrics['validation/nll_bound']:.3f} nats per token"
        if "validation/bits_per_byte" in metrics:
            line += f", {metrics['validation/bits_per_byte']:.3f} bits per byte"
        if "validation/unigram_bits_per_byte" in metrics:
            line += f" (unigram baseline {metrics['validation/unigram_bits_per_byte']:.3f})"
        self._console.print(line)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Remove the bar."""
        self._stop()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say so where there was nothing left to train."""
        if self._enabled and self._console is None:
            Console(highlight=False, soft_wrap=True).print(
                f"nothing to do: step {trainer.global_step} of trainer.max_steps={trainer.max_steps} is reached; "
                "raise trainer.max_steps to go on"
            )

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Give the terminal back."""
        self._stop()

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()

    @staticmethod
    def _state(trainer: pl.Trainer) -> str:
        metrics = _latest_metrics(trainer)
        if "train/loss" not in metrics:
            return ""
        return f"loss {metrics['train/loss']:.3f}  {metrics['train/tokens_per_second']:,.0f} tokens/s"


def _latest_metrics(trainer: pl.Trainer) -> dict[str, float]:
    for callback in trainer.callbacks:
        if isinstance(callback, DiffusionMetrics):
            return callback.latest
    return {}
