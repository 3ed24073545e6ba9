"""Folders that appear complete under their name, or not at all."""

import os
import re
import shutil
import socket
from pathlib import Path

_LEFT = re.compile(r"\.(?P<folder>.+)\.(?P<kind>unfinished|old)-(?P<host>.+)-(?P<process>\d+)")


def refuse_existing(folder: Path, overwrite: bool) -> None:
    """Raise ``FileExistsError`` where a folder exists that may not be replaced."""
    if folder.exists() and not overwrite:
        raise FileExistsError(f"{folder} exists; choose another folder or pass overwrite=True")


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
    if folder.exists():
        folder.rename(old)
    try:
        finished.rename(folder)
    except OSError:
        if old.exists():
            old.rename(folder)
        raise
    if old.exists():
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
