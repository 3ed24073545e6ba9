"""What a folder with a trained model is, by the names of the files in it.

The standard library is enough for it, so that a folder without a checkpoint is told before anything is loaded.
"""

import json
import re
from collections.abc import Iterable
from enum import Enum
from pathlib import Path


class CheckpointKind(Enum):
    """Layouts of a folder that stands for a checkpoint."""

    RUN = "run"
    NEMO = "NeMo"
    HUGGING_FACE = "Hugging Face"


# As NeMo names checkpoints: "mdlm_tiny--val_loss=6.4284-epoch=0-consumed_samples=1920.0", the last with "-last".
_LAST = "-last"
_VALIDATION_LOSS = re.compile(r"--val_loss=(-?\d+(?:\.\d+)?)")

_WRITTEN_LAST = (".metadata", "metadata.json", "common.pt")

SAFETENSORS_FILE = "model.safetensors"
SAFETENSORS_INDEX = "model.safetensors.index.json"
HF_WEIGHTS = (SAFETENSORS_INDEX, SAFETENSORS_FILE, "pytorch_model.bin.index.json", "pytorch_model.bin")
"""What the weights of a Hugging Face checkpoint are called; the first that is there counts, an index names the rest."""


def is_written(weights: Path) -> bool:
    """Whether the folder ``weights`` of a NeMo checkpoint has the files that are written when all others are."""
    return all((weights / name).is_file() for name in _WRITTEN_LAST)


def checkpoint_kind(path: str | Path, *, best: bool = False) -> CheckpointKind:
    """What a folder is: necessary for a checkpoint, and for a NeMo checkpoint not sufficient, which may be damaged.

    Args:
        path: a NeMo checkpoint (a folder with ``context`` and ``weights``), the folder of a run (with
            ``checkpoints``), or a Hugging Face checkpoint (with ``config.json``).
        best: whether the checkpoint with the lowest validation loss is asked for, which only a run has.

    Raises:
        FileNotFoundError: where there is no such folder, or no checkpoint in it, or one without its weights.
        NotADirectoryError: where it is a file.
        ValueError: where the checkpoint was not written to its end, and for ``best`` of anything but a run.
    """
    path = Path(path)
    if path.is_file():
        raise NotADirectoryError(f"{path} is a file; name the folder of a run or of a checkpoint")
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; name the folder of a run or of a checkpoint")
    if (path / "checkpoints").is_dir():
        if not any(is_written(checkpoint / "weights") for checkpoint in checkpoints_of(path, best=best)):
            raise no_complete_checkpoint(path, best=best)
        return CheckpointKind.RUN
    if best:
        raise ValueError(
            f"best=True chooses among the checkpoints of a run, and {path} is no run: it has no checkpoints"
        )
    if (path / "context").is_dir():
        if not is_written(path / "weights"):
            raise unfinished_checkpoint(path)
        return CheckpointKind.NEMO
    if (path / "config.json").is_file():
        check_hf_weights(path)
        return CheckpointKind.HUGGING_FACE
    raise FileNotFoundError(
        f"{path} holds no checkpoint; name the folder of a run (with `checkpoints`), of a NeMo checkpoint (with "
        "`context` and `weights`) or of a Hugging Face checkpoint (with `config.json`)"
    )


def hf_weights(folder: Path, named: str | None = None) -> Path:
    """The file of a Hugging Face checkpoint's weights, or the index of the files that they are in.

    Args:
        folder, named: as of :func:`check_hf_weights`.

    Raises:
        FileNotFoundError: there is none.
    """
    weights = next((folder / name for name in HF_WEIGHTS if (folder / name).is_file()), None)
    if weights is None:
        others = sorted(file.name for file in folder.glob("*.safetensors"))
        without = f" ({others[0]}{', ...' if len(others) > 1 else ''} is there without an index)" if others else ""
        raise FileNotFoundError(f"{named or folder} has no weights{without}; expected one of {', '.join(HF_WEIGHTS)}")
    return weights


def check_hf_weights(folder: Path, named: str | None = None) -> None:
    """Check that a Hugging Face checkpoint has the files of its weights; an index that cannot be read is not judged.

    Args:
        folder: of the checkpoint.
        named: what errors call it; None is the folder.

    Raises:
        FileNotFoundError: names the files.
    """
    weights = hf_weights(folder, named)
    check_shards(weights, _shards(weights), named)


def check_shards(index: Path, files: Iterable[str], named: str | None = None) -> None:
    """Check that the files of weights are there.

    Args:
        index: names them, and lies beside them.
        files: what it names.
        named: what errors call the folder; None is its path.

    Raises:
        FileNotFoundError: names those that are not.
    """
    absent = [file for file in files if not (index.parent / file).is_file()]
    if absent:
        raise FileNotFoundError(
            f"{named or index.parent} lacks shards that {index.name} names: {', '.join(absent)}; fetch them"
        )


def _shards(weights: Path) -> list[str]:
    """Files that an index names; none for weights without one."""
    if weights.suffix != ".json":
        return []
    try:
        return sorted({str(file) for file in json.loads(weights.read_bytes())["weight_map"].values()})
    except (ValueError, LookupError, TypeError, AttributeError):
        return []


def checkpoints_of(run: Path, *, best: bool = False) -> list[Path]:
    """Folders of a run's checkpoints, complete or not; for ``best`` those of a validation, the lowest loss first."""
    folders = [folder for folder in (run / "checkpoints").iterdir() if folder.is_dir()]
    if not best:
        return folders
    losses = {
        folder: float(loss[1])
        for folder in folders
        if (loss := _VALIDATION_LOSS.search(folder.name)) and not folder.name.endswith(_LAST)
    }
    return sorted(losses, key=losses.__getitem__)


def no_complete_checkpoint(run: Path, *, best: bool = False) -> FileNotFoundError:
    """The error about a run without one."""
    folder = run / "checkpoints"
    if best:
        return FileNotFoundError(
            f"{folder} holds no complete checkpoint with a validation loss in its name; leave out best=True"
        )
    return FileNotFoundError(f"{folder} holds no complete checkpoint; train on, or name another run")


def unfinished_checkpoint(checkpoint: Path) -> ValueError:
    """The error about a NeMo checkpoint that lacks files."""
    return ValueError(f"{checkpoint} was not written to its end; take another checkpoint of its run")
