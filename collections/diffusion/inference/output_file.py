"""Files of results: whole under their name, or under another one as far as they came."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


def check_can_write(path: str | Path, field: str = "output") -> None:
    """Check that a file can be written, before there is anything to write.

    Args:
        path: of the file.
        field: what the user gave it as, for errors.

    Raises:
        FileNotFoundError: its folder does not exist.
        IsADirectoryError: it is a folder.
        PermissionError: nothing may be written there.
    """
    path = Path(path)
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"{field}={path} is in a folder that does not exist; make it first")
    if path.is_dir():
        raise IsADirectoryError(f"{field}={path} is a folder; name a file")
    unfinished = _unfinished(path)
    is_new = unfinished is not None and not unfinished.exists()
    try:
        for file in filter(None, (path if path.exists() else None, unfinished)):
            open(file, "a").close()
    except OSError as error:
        raise PermissionError(f"{field}={path} cannot be written ({error.strerror}); name another file") from error
    if is_new:
        unfinished.unlink()


@contextmanager
def unfinished_file(path: str | Path) -> Iterator[Path]:
    """Where to write a file that appears under its name when all of it is there; one of that name stays until then.

    What was written before an error or an interruption stays beside it, under the name with ``.unfinished``, and
    standard error says so; nothing does where nothing was written. Devices and pipes are written as it comes.
    """
    path = Path(path)
    unfinished = _unfinished(path)
    if unfinished is None:
        yield path
        return
    try:
        yield unfinished
    except BaseException:
        if unfinished.exists() and unfinished.stat().st_size:
            print(f"note: what was written until then is in {unfinished}", file=sys.stderr)
        else:
            unfinished.unlink(missing_ok=True)
        raise
    os.replace(unfinished, path.resolve())


@contextmanager
def whole_file(path: str | Path) -> Iterator[TextIO]:
    """UTF-8 text to be written as of :func:`unfinished_file`."""
    with unfinished_file(path) as unfinished, open(unfinished, "w", encoding="utf-8") as file:
        yield file


def _unfinished(path: Path) -> Path | None:
    """Where a file is written; None for what is no file, such as a device, which is written as it is."""
    if path.exists() and not path.is_file():
        return None
    path = path.resolve()
    return path.with_name(f"{path.name}.unfinished")
