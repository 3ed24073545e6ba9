"""A run that is told to end saves before it does."""

import signal

import lightning.pytorch as pl
import torch
from nemo.utils import logging
from nemo.utils.callbacks.dist_ckpt_io import AsyncFinalizableCheckpointIO

EXIT_CODE = 128 + signal.SIGTERM


class SaveOnTermination(pl.Callback):
    """Saves the last checkpoint and ends the run at SIGTERM, which Slurm sends before it takes a job's nodes away.

    The step under way is finished, and a validation too; the same command then goes on from there. It is enough that
    one rank gets the signal: all agree on the step, through messages of the CPU that no step waits for. The exit code
    is 128 + SIGTERM.
    """

    def __init__(self):
        self._received = False
        self._group: torch.distributed.ProcessGroup | None = None
        self._agreement: tuple[torch.distributed.Work, torch.Tensor] | None = None
        self._handler = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Listen. Lightning's own handler would end each rank at a step of its own, without a checkpoint."""
        if trainer.world_size > 1:
            self._group = torch.distributed.new_group(backend="gloo")
        self._handler = signal.signal(signal.SIGTERM, self._receive)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module, outputs, batch, batch_idx) -> None:
        """Save and leave where a rank was told to before the step.

        Raises:
            SystemExit: then, with code 143.
        """
        if not self._agreed():
            return
        logging.warning(f"SIGTERM: saving after step {trainer.global_step}")
        if trainer.checkpoint_callback is not None:
            _save(trainer)
        if self._group is not None:
            # A launcher ends all ranks with the first that leaves, and rank 0 declares the checkpoint finished last.
            torch.distributed.barrier(self._group)
        raise SystemExit(EXIT_CODE)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop listening."""
        self._stop()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Stop listening."""
        self._stop()

    def _receive(self, signum: int, frame: object) -> None:
        self._received = True

    def _agreed(self) -> bool:
        """Whether any rank had the signal at the end of the previous step; on one rank, of this step."""
        if self._group is None:
            return self._received
        agreed = False
        if self._agreement is not None:
            work, received = self._agreement
            work.wait()
            agreed = bool(received)
        received = torch.tensor([int(self._received)], dtype=torch.int32)
        options = {"op": torch.distributed.ReduceOp.MAX, "group": self._group, "async_op": True}
        self._agreement = torch.distributed.all_reduce(received, **options), received
        return agreed

    def _stop(self) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGTERM, self._handler)
            self._handler = None


def _save(trainer: pl.Trainer) -> None:
    """Save, also where no last checkpoint is kept otherwise, and wait for what is written in the background."""
    checkpoint = trainer.checkpoint_callback
    candidates = checkpoint._monitor_candidates(trainer)
    if checkpoint.save_last:
        checkpoint._save_last_checkpoint(trainer, candidates)
    else:
        checkpoint._save_checkpoint(trainer, checkpoint.format_checkpoint_name(candidates))
    writer = trainer.strategy.checkpoint_io
    if isinstance(writer, AsyncFinalizableCheckpointIO):
        writer.maybe_finalize_save_checkpoint(blocking=True)
