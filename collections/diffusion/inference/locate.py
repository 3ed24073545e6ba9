"""Which checkpoint a path stands for."""

import re
from enum import Enum
from pathlib import Path
from typing import NamedTuple


class CheckpointKind(Enum):
    """Layouts of a checkpoint folder."""

    NEMO = "NeMo"
    HUGGING_FACE = "Hugging Face"


class Checkpoint(NamedTuple):
    """A folder with a model in it."""

    path: Path
    kind: CheckpointKind


# As NeMo names checkpoints: "mdlm_tiny--val_loss=6.4284-epoch=0-consumed_samples=1920.0", the last with "-last".
_LAST = "-last"
_VALIDATION_LOSS = re.compile(r"--val_loss=(-?\d+(?:\.\d+)?)")


def locate_checkpoint(path: str | Path, *, best: bool = False) -> Checkpoint:
    """Find the checkpoint that a path stands for.

    Args:
        path: a NeMo checkpoint (a folder with ``context`` and ``weights``), the folder of a run (with
            ``checkpoints``), or a Hugging Face checkpoint (with ``config.json``).
        best: of a run, take the checkpoint with the lowest validation loss instead of the latest one.

    Raises:
        FileNotFoundError: where there is no such folder, or no complete checkpoint in it.
        ValueError: where the checkpoint was not written to its end, and for ``best`` of anything but a run.
    """
    from nemo_dllm.collections.diffusion.training.checkpoints import is_complete

    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; name the folder of a run or of a checkpoint")
    if (path / "checkpoints").is_dir():
        return Checkpoint(_of_run(path / "checkpoints", best), CheckpointKind.NEMO)
    if best:
        raise ValueError(
            f"best=True chooses among the checkpoints of a run, and {path} is no run: it has no checkpoints"
        )
    if (path / "context").is_dir():
        if not is_complete(path):
            raise ValueError(f"{path} was not written to its end; take another checkpoint of its run")
        return Checkpoint(path, CheckpointKind.NEMO)
    if (path / "config.json").is_file():
        return Checkpoint(path, CheckpointKind.HUGGING_FACE)
    raise FileNotFoundError(
        f"{path} holds no checkpoint; name the folder of a run (with `checkpoints`), of a NeMo checkpoint (with "
        "`context` and `weights`) or of a Hugging Face checkpoint (with `config.json`)"
    )


def _of_run(folder: Path, best: bool) -> Path:
    from nemo_dllm.collections.diffusion.training.checkpoints import is_complete, latest_checkpoint

    if not best:
        latest = latest_checkpoint(folder)
        if latest is None:
            raise FileNotFoundError(f"{folder} holds no complete checkpoint; train on, or name another run")
        return latest
    losses = {
        checkpoint: float(loss[1])
        for checkpoint in folder.iterdir()
        if (loss := _VALIDATION_LOSS.search(checkpoint.name)) and not checkpoint.name.endswith(_LAST)
    }
    complete = [checkpoint for checkpoint in losses if is_complete(checkpoint)]
    if not complete:
        raise FileNotFoundError(
            f"{folder} holds no complete checkpoint with a validation loss in its name; leave out best=True"
        )
    return min(complete, key=losses.__getitem__)
