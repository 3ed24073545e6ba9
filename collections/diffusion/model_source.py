"""What names a model that others have trained: a folder here, or a repository of the Hugging Face Hub.

The standard library is enough for it, so that a folder that is not there is told before anything is loaded.
"""

import difflib
import re
from pathlib import Path

from nemo_dllm.collections.diffusion.checkpoint_folder import check_hf_weights

HUB = "hf://"

KEPT_FOLDER = "start"
"""Of what a run keeps of the model that it started from, in the run's folder."""

# In the folder of a Hugging Face and of a NeMo checkpoint.
_OF_MODELS = ("config.json", "context")
_REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*")
# Some old ones have no owner.
_ON_THE_HUB = re.compile(rf"{_REPOSITORY.pattern}|\w[\w.-]*")


def source_path(source: str | Path, field: str = "source", *, with_weights: bool = False) -> Path:
    """The folder that a text stands for, or the name of a repository, in case there is one.

    Args:
        source: path of a folder, ``OWNER/NAME`` or ``hf://NAME`` of a repository; a folder of that name comes first.
            ``hf://`` may stand before a path too, as NeMo has it.
        field: what the user gave it as, for errors.
        with_weights: whether a folder needs its weights too, which a run that goes on does not.

    Raises:
        FileNotFoundError: where it is neither; nobody is asked for what is no name of a repository. And where the
            folder holds no model, as that of a run, which holds several, or lacks its weights.
        NotADirectoryError: where it is a file.
    """
    text = str(source)
    path = Path(text.removeprefix(HUB))
    if text.removeprefix(HUB) and path.is_dir():
        if not any((path / name).exists() for name in _OF_MODELS):
            raise FileNotFoundError(_without_model(path, f"{field}={text}"))
        if with_weights and not (path / "context").exists():
            check_hf_weights(path, f"{field}={text}")
        return path
    if path.is_file():
        raise NotADirectoryError(f"{field}={text} is a file; name the folder that it lies in")
    if (_ON_THE_HUB if text.startswith(HUB) else _REPOSITORY).fullmatch(text.removeprefix(HUB)):
        return path
    near = difflib.get_close_matches(path.name, _folders_in(path.parent), n=1)
    guess = f"did you mean {path.parent / near[0]}, or " if near else "name one that is there, or "
    raise FileNotFoundError(
        f"{field}={text} is no folder that is there; {guess}a model of the Hugging Face Hub, as OWNER/NAME or {HUB}NAME"
    )


def is_hub_name(text: str) -> bool:
    """Whether a repository of the Hub may have this name, old ones without an owner among them."""
    return _ON_THE_HUB.fullmatch(text) is not None


def _without_model(folder: Path, named: str) -> str:
    checkpoints = folder / "checkpoints"
    if checkpoints.is_dir():
        return f"{named} is the folder of a run; name one of its checkpoints, in {checkpoints}"
    return (
        f"{named} holds no model; name the folder of a Hugging Face checkpoint (with `config.json`) or of a NeMo "
        "checkpoint (with `context` and `weights`)"
    )


def _folders_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []


def keeps_start(log_dir: str | Path | None, name: str | None) -> bool:
    """Whether a run has been started from another model already, and may go on without that.

    Args:
        log_dir: where runs are; None is NeMo's folder.
        name: of the run.
    """
    folder = Path(log_dir or "nemo_experiments") / (name or "default")
    # NeMo may put a version between.
    return any(next(folder.glob(kept), None) for kept in (KEPT_FOLDER, f"*/{KEPT_FOLDER}"))
