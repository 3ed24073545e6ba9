"""A content-addressed cache of folders that processes may fill at the same time."""

import errno
import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_OF_NUMPY = re.compile(r"\d+ requested and \d+ written")


def content_key(parts: Iterable[str | bytes]) -> str:
    """Hash an ordered list of strings into a folder name (32 hex digits).

    Every part is preceded by its length, so that moving a border between two parts changes the key.
    """
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        digest.update(len(content).to_bytes(8, "big"))
        digest.update(content)
    return digest.hexdigest()[:32]


@contextmanager
def full_disk_named(folder: Path) -> Iterator[None]:
    """Say of a full disk, or a used-up quota, where it is."""
    try:
        yield
    except OSError as error:
        # numpy's own has no number, only how much of what it was to write it wrote.
        if error.errno not in _FULL and not (error.errno is None and _OF_NUMPY.fullmatch(str(error))):
            raise
        number = error.errno or errno.ENOSPC
        raise OSError(number, f"{os.strerror(number)} while writing in '{folder}': make room there") from error


def write_folder(folder: Path, write: Callable[[Path], None]) -> Path:
    """Write a folder so that it appears complete or not at all.

    Args:
        folder: the final place; must not exist.
        write: fills the empty folder that it is given, a hidden sibling of the final place.

    Raises:
        FileExistsError: the folder exists, or another process finished it first. Its content is left as it is.
        OSError: the disk is full; nothing of the folder stays.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.parent / f".{folder.name}.{uuid.uuid4().hex}"
    unfinished.mkdir()
    try:
        with full_disk_named(folder.parent):
            write(unfinished)
        try:
            os.rename(unfinished, folder)
        except OSError as error:
            if not folder.exists():
                raise
            raise FileExistsError(
                f"folder='{folder}' exists; choose another name, or delete it to write it anew"
            ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def cached_folder(folder: Path, write: Callable[[Path], None]) -> Path:
    """Return the folder, written now unless it exists.

    Processes that miss at the same time all do the work; the first to finish is kept. The name must therefore
    determine the content (see `content_key`).
    """
    if not folder.exists():
        try:
            write_folder(folder, write)
        except FileExistsError:
            if not folder.is_dir():
                raise
    return folder
