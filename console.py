"""A quiet console: NeMo, Lightning and their friends say much at import and in a run that no user can act on."""

import contextlib
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

_LOUD_LOGGERS = (
    "datasets",
    "huggingface_hub",
    "lightning",
    "lightning.pytorch",
    "lightning.pytorch.utilities.rank_zero",
    "lightning.fabric",
    "megatron",
    "megatron.core",
    "modelopt",
    "nv_one_logger",
    "pytorch_lightning",
    "torch.distributed",
    "transformers",
)


def import_nemo_quietly() -> None:
    """Import NeMo's language model collection without its output, then let only errors and our messages through.

    What was swallowed is printed if the import fails. Warnings are off for this process and its children. NeMo's log
    files stay complete.
    """
    hide_warnings()
    with swallowed_output():
        from nemo.collections import llm  # noqa: F401
    # NeMo switches warnings on again.
    hide_warnings()
    log_to_standard_error()
    _let_through_only_errors_and_ours()


def hide_warnings() -> None:
    """Let only errors of libraries through, in this process and its children."""
    warnings.filterwarnings("ignore")
    os.environ["PYTHONWARNINGS"] = "ignore"
    # It sets its own level when it is imported.
    os.environ["HF_HUB_VERBOSITY"] = "error"
    for name in _LOUD_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


def log_to_standard_error() -> None:
    """Let NeMo log on standard error, all levels: standard output is for results, which are JSON where that is asked
    for. NeMo puts there what it logs at level INFO."""
    for handler in _nemo_stream_handlers():
        if sys.__stderr__ is not None:
            handler.stream = sys.__stderr__


def _let_through_only_errors_and_ours() -> None:
    def passes(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR or _is_ours(Path(record.pathname))

    for handler in _nemo_stream_handlers():
        handler.addFilter(passes)
        handler.setFormatter(logging.Formatter("%(message)s"))


def _nemo_stream_handlers() -> list[logging.StreamHandler]:
    """Those of NeMo's logger that write to the console; its files are handlers of other classes."""
    return [h for h in logging.getLogger("nemo_logger").handlers if type(h) is logging.StreamHandler]


def _is_ours(file: Path) -> bool:
    package = Path(__file__).parent
    # A virtual environment may lie in the checkout.
    return file.is_relative_to(package) and "site-packages" not in file.relative_to(package).parts


@contextlib.contextmanager
def swallowed_output() -> Iterator[None]:
    """Keep everything written to standard output and error, by C code too, unless the block raises."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    with tempfile.TemporaryFile() as swallowed:
        os.dup2(swallowed.fileno(), 1)
        os.dup2(swallowed.fileno(), 2)
        failed = True
        try:
            yield
            failed = False
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for descriptor, copy in zip((1, 2), kept, strict=True):
                os.dup2(copy, descriptor)
                os.close(copy)
            if failed:
                swallowed.seek(0)
                sys.stderr.write(swallowed.read().decode(errors="replace"))
