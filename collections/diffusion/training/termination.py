"""A run that is told to end saves before it does."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import lightning.pytorch as pl
import torch
from nemo.utils import logging
from nemo.utils.callbacks.dist_ckpt_io import AsyncFinalizableCheckpointIO

from nemo_dllm.collections.diffusion.training.checkpoints import latest_checkpoint

# What the last line of a run calls them.
_ENDED_BY = {signal.SIGINT: "interrupted", signal.SIGTERM: "ended by SIGTERM"}
_ANNOUNCEMENT = b"\nCtrl-C: the run ends after this step, and saves; Ctrl-C again ends it at once\n"


def exit_code_of(number: int) -> int:
    """Of a process that a signal ends."""
    return 128 + number


@contextlib.contextmanager
def interrupts_end_with_their_code() -> Iterator[None]:
    """Let an interrupt end the process with 130, where Lightning's trainer, which catches it, ends it with 1."""
    try:
        yield
    except SystemExit as ended:
        if isinstance(ended.__context__, KeyboardInterrupt):
            raise SystemExit(exit_code_of(signal.SIGINT)) from None
        raise


class SaveOnTermination(pl.Callback):
    """Saves the last checkpoint and ends the run at Ctrl-C, or SIGTERM, which Slurm sends before it takes nodes away.

    The step under way is finished, and a validation too; the same command then goes on from there. It is enough that
    one rank gets the signal: all agree on the step, through messages of the CPU that no step waits for. The exit code
    is 128 and the number of the signal: 130 or 143. A second Ctrl-C, and one before the first step, ends the run at
    once.
    """

    def __init__(self):
        self._received = 0
        self._is_training = False
        self._process: int | None = None
        self._is_first_rank = False
        self._group: torch.distributed.ProcessGroup | None = None
        self._agreement: tuple[torch.distributed.Work, torch.Tensor] | None = None
        self._handlers: dict[int, object] = {}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Listen to Ctrl-C, before there are processes that load data: a terminal interrupts those too.

        Who has let it be ignored, as a shell does for processes in its background, still does.
        """
        self._process, self._is_first_rank = os.getpid(), trainer.is_global_zero
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            self._listen(signal.SIGINT)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Listen to SIGTERM. Lightning's own handler would end each rank at a step of its own, without a checkpoint."""
        if trainer.world_size > 1:
            self._group = torch.distributed.new_group(backend="gloo")
        self._is_training = True
        self._listen(signal.SIGTERM)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module, outputs, batch, batch_idx) -> None:
        """Save and leave where a rank was told to before the step.

        Raises:
            SystemExit: then, with code 130 or 143.
        """
        received = self._agreed()
        if not received:
            return
        logging.warning(f"{signal.Signals(received).name}: saving after step {trainer.global_step}")
        if trainer.checkpoint_callback is not None:
            _save(trainer)
        if self._group is not None:
            # A launcher ends all ranks with the first that leaves, and rank 0 declares the checkpoint finished last.
            torch.distributed.barrier(self._group)
            # Lightning's would kill this process where it sees that others have left.
            getattr(trainer.strategy.launcher, "procs", []).clear()
        raise SystemExit(exit_code_of(received))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop listening."""
        self._stop()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Stop listening; at the end of a run that was told to end, say how far it came."""
        self._stop()
        if isinstance(exception, KeyboardInterrupt | SystemExit) and trainer.is_global_zero:
            code = getattr(exception, "code", exit_code_of(signal.SIGINT))
            for number, ended in _ENDED_BY.items():
                if code == exit_code_of(number):
                    print(f"{ended} at step {trainer.global_step} of {trainer.max_steps}; {_how_to_go_on(trainer)}")

    def _receive(self, number: int, frame: object) -> None:
        """Note the signal; raise KeyboardInterrupt where there is nothing to wait for.

        Processes that load samples or write a checkpoint have this handler from the run, which needs them to finish.
        """
        is_run = os.getpid() == self._process
        if number == signal.SIGINT and (self._received or is_run and not self._is_training):
            raise KeyboardInterrupt
        self._received = number
        if number == signal.SIGINT and is_run and self._is_first_rank:
            # What is being printed when a signal arrives keeps its lock.
            os.write(2, _ANNOUNCEMENT)

    def _agreed(self) -> int:
        """The signal that any rank had at the end of the previous step; on one rank, of this step. 0 for none."""
        if self._group is None:
            return self._received
        agreed = 0
        if self._agreement is not None:
            work, received = self._agreement
            work.wait()
            agreed = int(received)
        received = torch.tensor([self._received], dtype=torch.int32)
        options = {"op": torch.distributed.ReduceOp.MAX, "group": self._group, "async_op": True}
        self._agreement = torch.distributed.all_reduce(received, **options), received
        return agreed

    def _listen(self, number: int) -> None:
        self._handlers[number] = signal.signal(number, self._receive)

    def _stop(self) -> None:
        self._is_training = False
        while self._handlers:
            signal.signal(*self._handlers.popitem())


def _how_to_go_on(trainer: pl.Trainer) -> str:
    folder = getattr(trainer.checkpoint_callback, "dirpath", None)
    checkpoint = folder and latest_checkpoint(Path(folder))
    if not checkpoint:
        return "there is no checkpoint yet, and the same command starts anew"
    if checkpoint.is_relative_to(Path.cwd()):
        checkpoint = checkpoint.relative_to(Path.cwd())
    return f"the last checkpoint is at {checkpoint}, from which the same command goes on"


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
