"""Errors that a user can mend, as both command lines show them: one line on standard error, and exit code 2.

All else is a failure: it keeps its traceback where there is one to keep, and ends with exit code 1.
"""

import contextlib
import errno
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping

USAGE = 2
"""Exit code of what a user can mend, as shells and the parsers of options have it."""

GRACE = 10
"""Seconds in which the first of a run's processes says what is wrong, before the others exit: who started them ends all
with the first that fails."""

_OF_DISKS = frozenset(getattr(errno, name) for name in ("ENOSPC", "EDQUOT", "EFBIG"))
_OF_PLACES = frozenset(
    getattr(errno, name) for name in ("EACCES", "EPERM", "EROFS", "ENOTDIR", "EISDIR", "EEXIST", "ENAMETOOLONG")
)
"""What the system says of a place that cannot be written, whoever wanted to; it must be named."""

_BUILDING = "\n\nFiddle context:"
"""Before the paragraph that fiddle appends where a recipe cannot be built: a setting has no meaning."""


def is_for_users(error: BaseException) -> bool:
    """Whether one of our checks raised it, the reader of arguments, a constructor that a recipe calls, or a disk."""
    if type(error).__module__.startswith("nemo_run.cli"):
        return True
    if is_of_building(error):
        return True
    if _is_of_a_place(error):
        return True
    if not isinstance(error, ValueError | OSError):
        return False
    traceback = error.__traceback__
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    module = traceback.tb_frame.f_globals.get("__name__", "")
    return module.partition(".")[0] in ("nemo_dllm", "nemo_run")


def is_of_building(error: BaseException) -> bool:
    """Whether a constructor that a recipe calls has raised it."""
    return _BUILDING in str(error)


def _is_of_a_place(error: BaseException) -> bool:
    if not isinstance(error, OSError):
        return False
    return error.errno in _OF_DISKS or (error.errno in _OF_PLACES and error.filename is not None)


def one_line(error: BaseException) -> str:
    """The message, with the place in the recipe where fiddle, which builds recipes, appends a paragraph on it."""
    if _is_of_a_place(error):
        return ": ".join(str(part) for part in (error.filename, error.strerror) if part is not None)
    message, _, fiddle_context = str(error).partition(_BUILDING)
    place = fiddle_context.partition(" at <root>.")[2].partition(" ")[0]
    return f"{place}: {message}" if place else message


def in_options(message: str, options: Mapping[str, str]) -> str:
    """A message about Python arguments in the words of a command line: ``top_k=0`` as ``--top-k=0``.

    Names of one word are words of the language too, so that they count only with a value behind them.

    Args:
        message: names arguments.
        options: how the command line calls each of them, such as ``--top-k``.
    """
    for name, option in sorted(options.items(), key=lambda pair: -len(pair[0])):
        if option.startswith("--"):
            message = re.sub(rf"(?<![\w.-]){name}=True\b", option, message)
            message = re.sub(rf"(?<![\w.-]){name}=False\b", f"--no-{option[2:]}", message)
        behind = r"\b" if "_" in name else "(?==)"
        message = re.sub(rf"(?<![\w.-]){name}{behind}", option, message)
    return message


def _is_of_a_value(error: BaseException) -> bool:
    return isinstance(error, ValueError | FileNotFoundError | NotADirectoryError)


@contextlib.contextmanager
def refused_once(is_refusal: Callable[[BaseException], bool] = _is_of_a_value) -> Iterator[None]:
    """Let an error of the settings, which all processes of a run find, come from the one that :func:`has_the_word`.

    The others exit with code 1, a moment later.

    Args:
        is_refusal: tells such an error from others, which any process raises.
    """
    try:
        yield
    except Exception as error:
        if not is_refusal(error) or has_the_word():
            raise
        raise SystemExit(1) from None


def has_the_word() -> bool:
    """Whether this is the process of a run that says what is wrong with it; all but the first wait before.

    It is the first of all. Where that finds nothing wrong, and nobody ends the others meanwhile, it is the first of a
    node, which may lack what others have.
    """
    if is_first_process():
        return True
    time.sleep(GRACE)
    local = next((os.environ[name] for name in ("LOCAL_RANK", "SLURM_LOCALID") if name in os.environ), None)
    return local == "0"


def is_first_process() -> bool:
    """By what torchrun, srun and Lightning set; True for a process that is alone."""
    for rank in ("RANK", "SLURM_PROCID"):
        if rank in os.environ:
            return os.environ[rank] == "0"
    return os.environ.get("NODE_RANK", "0") == os.environ.get("LOCAL_RANK", "0") == "0"
