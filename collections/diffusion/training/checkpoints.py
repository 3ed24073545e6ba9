"""Folders of checkpoints: which are whole, which one is the latest, and when all ranks see it."""

import json
import pickle
import re
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import lightning.pytorch as pl
import torch
from nemo.lightning.pytorch.callbacks import ModelCheckpoint
from nemo.utils import logging
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException

from nemo_dllm.collections.diffusion.checkpoint_folder import is_written

# Seconds between attempts to read.
_DELAYS = (1, 2, 4, 8)
# In which all nodes should see what one has written.
_VISIBLE_WITHIN_SECONDS = 300

# What reading other bytes raises. A disk or a network that fails is no damage; where it keeps failing, the run ends:
# going on from an older checkpoint would lose steps.
_DAMAGE = (
    ValueError,
    EOFError,
    zipfile.BadZipFile,
    pickle.UnpicklingError,
    AttributeError,
    IndexError,
    KeyError,
    TypeError,
)


class CommonModelCheckpoint(ModelCheckpoint):
    """NeMo's ``ModelCheckpoint``, whose ranks go by what rank 0 finds in the folder.

    At the start of a run rank 0 removes checkpoints beyond ``save_top_k``, and all ranks meet at a barrier for each.
    One that looks into the folder after that would count fewer, miss a barrier and hang in another collective.
    """

    @property
    def _saved_checkpoint_paths(self) -> list[Path]:
        found = [list(super()._saved_checkpoint_paths)]
        if torch.distributed.is_initialized():
            torch.distributed.broadcast_object_list(found, src=0)
        return found[0]

    def format_checkpoint_name(
        self, metrics: dict[str, torch.Tensor], filename: str | None = None, ver: int | None = None
    ) -> str:
        """Lightning's, without a loss where none has been validated yet, of which it would make 0."""
        filename = filename or self.filename
        if self.monitor not in metrics:
            filename = re.sub(rf"{{{self.monitor}\b[^}}]*}}-?", "", filename)
        return super().format_checkpoint_name(metrics, filename, ver)

    def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        """Save.

        Raises:
            OSError: where what writes the files could not.
        """
        try:
            super()._save_checkpoint(trainer, filepath)
        except (OSError, CheckpointException) as error:
            # Of the first rank that failed. A full disk is, for torch's archives, a wrong position in a file.
            reason = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
            if isinstance(reason, OSError) and reason.errno is not None:
                message = f"could not be written: {reason.strerror}; the checkpoints before it are whole"
                raise OSError(reason.errno, message, filepath) from error
            raise OSError(
                f"{filepath} could not be written; is the disk full? The checkpoints before it are whole "
                f"({' '.join(str(reason).split())})"
            ) from error


def is_complete(checkpoint: Path) -> bool:
    """Whether a checkpoint folder was written to its end."""
    return damage_of(checkpoint) is None


def damage_of(checkpoint: Path) -> str | None:
    """What keeps a checkpoint folder from being read; None where all its files are there, readable, and long enough.

    The bytes of tensors are not looked at.
    """
    weights = checkpoint / "weights"
    if not is_written(weights) or ModelCheckpoint.is_checkpoint_unfinished(checkpoint):
        return "was not written to its end"
    try:
        for file in (weights / "metadata.json", checkpoint / "context" / "io.json"):
            if file.is_file():
                json.loads(file.read_text())
        # Checked, not loaded: what is not used is not run.
        with zipfile.ZipFile(weights / "common.pt") as archive:
            broken = archive.testzip()
        stored = FileSystemReader(weights).read_metadata().storage_data.values()
    except _DAMAGE as error:
        return f"is damaged: {type(error).__name__} {error}"
    if broken is not None:
        return f"is damaged: common.pt, in {broken}"
    lengths = {}
    for item in stored:
        lengths[item.relative_path] = max(lengths.get(item.relative_path, 0), item.offset + item.length)
    for name, length in lengths.items():
        file = weights / name
        if not file.is_file() or file.stat().st_size < length:
            return f"is damaged: {name} is {'shorter than it was' if file.is_file() else 'not there'}"
    return None


def latest_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint in ``folder`` that was written last; later ones are passed over with a message."""
    candidates = [path for path in folder.glob("*") if path.is_dir()]
    for path in sorted(candidates, key=_written_at, reverse=True):
        damage = damage_of(path)
        if damage is None:
            return path
        logging.warning(f"{path} {damage}; it is not used")
    return None


def _written_at(checkpoint: Path) -> int:
    """Nanoseconds."""
    metadata = checkpoint / "weights" / ".metadata"
    return (metadata if metadata.exists() else checkpoint).stat().st_mtime_ns


def patiently(read: Callable[[], Path | None]) -> Path | None:
    """What ``read`` returns; it is called again after 1, 2, 4 and 8 seconds where the file system fails.

    Raises:
        OSError: where it still fails.
    """
    for delay in _DELAYS:
        try:
            return read()
        except OSError as error:
            logging.warning(f"{error}; trying again in {delay} s")
            time.sleep(delay)
    return read()


def seen_by(rank: int, checkpoint: Path) -> Path:
    """A checkpoint that rank 0 found, once this rank sees it too.

    Raises:
        FileNotFoundError: where it does not after five minutes.
    """
    deadline = time.monotonic() + _VISIBLE_WITHIN_SECONDS
    while not is_written(checkpoint / "weights"):
        if time.monotonic() > deadline:
            raise FileNotFoundError(
                f"rank {rank} does not see {checkpoint}, which rank 0 goes on from; put the folder of the run "
                "(log.log_dir) on a file system that all nodes share"
            )
        time.sleep(1)
    return checkpoint
