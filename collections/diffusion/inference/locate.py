"""Which checkpoint a path stands for."""

from pathlib import Path
from typing import NamedTuple

from nemo_dllm.collections.diffusion.checkpoint_folder import (
    CheckpointKind,
    checkpoint_kind,
    checkpoints_of,
    no_complete_checkpoint,
    unfinished_checkpoint,
)


class Checkpoint(NamedTuple):
    """A folder with a model in it."""

    path: Path
    kind: CheckpointKind
    """``NEMO`` or ``HUGGING_FACE``."""


def locate_checkpoint(path: str | Path, *, best: bool = False) -> Checkpoint:
    """Find the checkpoint that a path stands for.

    Args:
        path: see :func:`checkpoint_kind`.
        best: of a run, take the checkpoint with the lowest validation loss instead of the latest one.

    Raises:
        FileNotFoundError, NotADirectoryError, ValueError: see :func:`checkpoint_kind`; and where no checkpoint is
            complete.
    """
    from nemo_dllm.collections.diffusion.training.checkpoints import is_complete

    path = Path(path)
    kind = checkpoint_kind(path, best=best)
    if kind is CheckpointKind.RUN:
        return Checkpoint(_of_run(path, best), CheckpointKind.NEMO)
    if kind is CheckpointKind.NEMO and not is_complete(path):
        raise unfinished_checkpoint(path)
    return Checkpoint(path, kind)


def _of_run(run: Path, best: bool) -> Path:
    from nemo_dllm.collections.diffusion.training.checkpoints import is_complete, latest_checkpoint

    if best:
        found = next(filter(is_complete, checkpoints_of(run, best=True)), None)
    else:
        found = latest_checkpoint(run / "checkpoints")
    if found is None:
        raise no_complete_checkpoint(run, best=best)
    return found
