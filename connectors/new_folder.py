"""Folders that appear complete under their name, or not at all."""

import errno
import os
import re
import shutil
import socket
from collections.abc import Iterable
from pathlib import Path

_LEFT = re.compile(r"\.(?P<folder>.+)\.(?P<kind>unfinished|old)-(?P<host>.+)-(?P<process>\d+)")

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def name_full_disk(error: BaseException, folder: Path) -> None:
    """Raise the error of a full disk again with the folder that was written to; others pass.

    Raises:
        OSError: where ``error`` is one of a full disk, a quota or a limit on files.
    """
    if isinstance(error, OSError) and error.errno in _FULL:
        raise OSError(error.errno, f"{folder} could not be written; is the disk full? ({error})") from error


def refuse_existing(folder: Path, overwrite: bool, reads: Iterable[Path] = ()) -> None:
    """Check that a folder may be made, or replaced.

    Args:
        folder: to be made.
        overwrite: whether an existing one, or a file or link of that name, may be replaced.
        reads: folders that the conversion reads.

    Raises:
        FileExistsError: where it exists and may not be replaced.
        ValueError: where replacing it would delete what is read.
    """
    if not os.path.lexists(folder):
        return
    if not overwrite:
        raise FileExistsError(f"{folder} exists; choose another folder or pass overwrite=True")
    for read in reads:
        if read.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{folder} cannot be replaced: {read}, which is read, is in it; choose another folder")


def refuse_unfinished(folder: Path) -> None:
    """Raise ``ValueError`` for a folder that a conversion is writing, or was when it was killed."""
    if _LEFT.fullmatch(folder.resolve().name):
        raise ValueError(f"{folder} is a conversion that did not end; convert again, which removes it")


def unfinished_sibling(folder: Path) -> Path:
    """Name of a folder beside ``folder``, on the same disk, for writing it and then renaming.

    What killed processes of this machine left there for the same ``folder`` is removed.
    """
    siblings = folder.parent.iterdir() if folder.parent.is_dir() else ()
    for left in siblings:
        found = _LEFT.fullmatch(left.name)
        if found is None or (found["folder"], found["host"]) != (folder.name, socket.gethostname()):
            continue
        # An old one without a successor is the only copy of something.
        if not _runs(int(found["process"])) and (found["kind"] == "unfinished" or folder.exists()):
            shutil.rmtree(left, ignore_errors=True)
    return _sibling(folder, "unfinished")


def replace_folder(finished: Path, folder: Path) -> None:
    """Rename ``finished`` to ``folder``; what stood there before is removed once the new one is in place."""
    old = _sibling(folder, "old")
    if os.path.lexists(folder):
        folder.rename(old)
    try:
        finished.rename(folder)
    except OSError:
        if os.path.lexists(old):
            old.rename(folder)
        raise
    if old.is_symlink() or old.is_file():
        old.unlink()
    elif old.exists():
        shutil.rmtree(old)


def _sibling(folder: Path, kind: str) -> Path:
    return folder.with_name(f".{folder.name}.{kind}-{socket.gethostname()}-{os.getpid()}")


def _runs(process: int) -> bool:
    """Whether another process has that id: ids come back, in containers often the same ones."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # Another user's.
        return True
    return process != os.getpid()
