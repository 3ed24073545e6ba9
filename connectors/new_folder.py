"""Folders that appear complete under their name, or not at all."""

import errno
import os
import re
import shutil
import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

_LEFT = re.compile(r"\.(?P<folder>.+)\.(?P<kind>unfinished|old)-(?P<host>.+)-(?P<process>\d+)")

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What a folder is renamed to exists, and is no empty folder.
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


def name_full_disk(error: BaseException, folder: Path) -> None:
    """Raise the error of a full disk again with the folder that was written to; others pass.

    Raises:
        OSError: where ``error`` is one of a full disk, a quota or a limit on files, or of torch's writers, which do not
            say what it was.
    """
    if isinstance(error, CheckpointException):
        number, reason = errno.EIO, [line for line in str(error).splitlines() if line.strip(" )")][-1]
    elif isinstance(error, shutil.Error):  # Of a whole tree: for each file its old place, its new one, and a text.
        reason = error.args[0][0][2]
        number = next((number for number in _FULL if f"[Errno {number}]" in reason), None)
    else:
        reason = str(error)
        number = error.errno if isinstance(error, OSError) and error.errno in _FULL else None
    if number is not None:
        raise OSError(number, f"{folder} could not be written; is the disk full? ({reason})") from error


def refuse_existing(folder: Path, overwrite: bool, reads: Iterable[Path] = ()) -> None:
    """Check that a folder may be made, or replaced, and can be.

    Args:
        folder: to be made.
        overwrite: whether an existing one, or a file or link of that name, may be replaced.
        reads: folders that the conversion reads.

    Raises:
        FileExistsError: where it exists and may not be replaced.
        ValueError: where replacing it would delete what is read, it is a mount point, or has no name.
        OSError: where nothing can be written beside it; of the kind that says why.
    """
    if os.path.lexists(folder):
        if not overwrite:
            raise FileExistsError(f"{folder} exists; choose another folder or pass overwrite=True")
        for read in reads:
            if read.resolve().is_relative_to(folder.resolve()):
                raise ValueError(f"{folder} cannot be replaced: {read}, which is read, is in it; choose another folder")
        if os.path.ismount(folder):
            raise ValueError(f"{folder} cannot be replaced: it is a mount point; name a folder in it")
    if folder.name in ("", ".."):
        raise ValueError(f"{folder} is no name that a folder can be made under; name it")
    _check_can_make(folder)


def _check_can_make(folder: Path) -> None:
    """Find out now, and not after hours."""
    parent = next(parent for parent in folder.absolute().parents if os.path.lexists(parent))
    probe = parent / _sibling(folder, "unfinished").name
    try:
        probe.mkdir(exist_ok=True)
    except OSError as error:
        reason = f"{error.strerror}: {parent}"
        raise OSError(error.errno, f"{folder} cannot be made ({reason}); choose another folder") from error
    with suppress(OSError):  # A killed process may have left it full.
        probe.rmdir()


def refuse_unfinished(folder: Path) -> None:
    """Raise ``ValueError`` for a folder that a conversion is writing, or was when it was killed."""
    if _LEFT.fullmatch(folder.resolve().name):
        raise ValueError(f"{folder} is a conversion that did not end; convert again, which removes it")


def unfinished_sibling(folder: Path) -> Path:
    """Name of a folder beside ``folder``, on the same disk, for writing it and then renaming.

    What killed processes of this machine left there for the same ``folder`` is removed.
    """
    _remove_left(folder)
    return _sibling(folder, "unfinished")


def _remove_left(folder: Path) -> None:
    siblings = folder.parent.iterdir() if folder.parent.is_dir() else ()
    for left in siblings:
        found = _LEFT.fullmatch(left.name)
        if found is None or (found["folder"], found["host"]) != (folder.name, socket.gethostname()):
            continue
        # An old one without a successor is the only copy of something.
        if not _runs(int(found["process"])) and (found["kind"] == "unfinished" or folder.exists()):
            with suppress(OSError):
                _remove(left)


def place_folder(finished: Path, folder: Path, overwrite: bool) -> None:
    """Rename ``finished`` to ``folder``; what stood there before is removed once the new one is in place.

    Raises:
        FileExistsError: where ``overwrite`` is False and another process has made ``folder`` meanwhile, which stays;
            ``finished`` is removed.
    """
    old = _sibling(folder, "old")
    while True:
        if overwrite:
            with suppress(FileNotFoundError):
                folder.rename(old)
        try:
            finished.rename(folder)
        except OSError as error:
            if error.errno not in _TAKEN:
                if os.path.lexists(old):
                    old.rename(folder)
                raise
            if not overwrite:
                shutil.rmtree(finished)
                raise FileExistsError(
                    f"{folder} has been made by another process meanwhile; use it, or choose another folder"
                ) from error
            _remove(old)  # Another one was put in its place between the two.
        else:
            _remove(old)
            _remove_left(folder)
            return


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


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
