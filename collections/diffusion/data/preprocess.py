"""From texts to Megatron-LM's .bin and .idx files: parts encoded by many processes, joined in order."""

import contextlib
import fcntl
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nemo_dllm.collections.diffusion.data.bad_rows import check_bad_rows, check_max_bad_rows
from nemo_dllm.collections.diffusion.data.cache import content_key, full_disk_named
from nemo_dllm.collections.diffusion.data.documents import check_text_column, parts_of
from nemo_dllm.collections.diffusion.data.encoded_part import (
    EncodeOptions,
    PartReport,
    encode_part,
    read_part_report,
    start_worker,
)
from nemo_dllm.collections.diffusion.data.indexed import without_suffix
from nemo_dllm.collections.diffusion.data.parts import Part
from nemo_dllm.collections.diffusion.data.preprocess_report import PreprocessReport, ProgressLine
from nemo_dllm.collections.diffusion.data.sources import Source, find_sources
from nemo_dllm.collections.diffusion.data.tokenizer import load_tokenizer, tokenizer_content

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Changes whenever the files of a part, or the way in which they are made, change.
PARTS_VERSION = "1"

_MIN_PART_BYTES, _MAX_PART_BYTES = 2**20, 2**24
_MAX_PARTS = 4096


def preprocess(
    inputs: str | Path | Sequence[str | Path],
    output_prefix: str | Path,
    tokenizer: "str | Path | PreTrainedTokenizerBase",
    *,
    format: str | None = None,
    text_field: str = "text",
    split: str | None = None,
    workers: int | None = None,
    append_eos: bool = True,
    prepend_bos: bool = False,
    max_bad_rows: int = 100,
    overwrite: bool = False,
    progress: bool | None = None,
) -> PreprocessReport:
    """Encode a corpus into `output_prefix`.bin and .idx, which Megatron-LM and `PretrainingDataModule` read.

    The files are the same whatever the number of workers. A run that was stopped goes on when it is started again with
    the same arguments: finished parts stay in `output_prefix`.parts until all are joined. Worker processes import the
    main module: call this below `if __name__ == "__main__":`.

    Args:
        inputs: files, folders, or datasets; see `find_sources`. Files may end in .gz or .zst.
        output_prefix: path without suffix; that of the .bin or the .idx is taken for it.
        tokenizer: Hugging Face tokenizer folder or name, or the tokenizer.
        format: of all inputs, one of `sources.FORMATS`; None goes by their names.
        text_field: field or column with the text; special strings in it are encoded as ordinary text.
        split: of datasets with several splits.
        workers: processes; None is one per core that this process may use.
        append_eos, prepend_bos: put the tokenizer's end / begin token after / before each document.
        max_bad_rows: rows that cannot be used before this gives up.
        overwrite: replace an existing output.
        progress: show a progress bar on standard error; None does so on a terminal.

    Returns:
        counts, and which rows were left out and why; also in `output_prefix`.report.json.

    Raises:
        FileExistsError, FileNotFoundError: the output exists and `overwrite` is False; an input does not exist.
        ValueError: too many bad rows, a damaged file, nothing to encode, or parts of other settings in the way.
        OSError: the disk is full. Finished parts stay.
    """
    prefix = Path(without_suffix(output_prefix))
    if not overwrite and prefix.with_name(f"{prefix.name}.idx").exists():
        raise FileExistsError(f"'{prefix}.idx' exists; choose another output_prefix, or pass overwrite=True")
    workers = _check_numbers(workers, max_bad_rows)
    sources = find_sources([inputs] if isinstance(inputs, (str, Path)) else inputs, format, split)
    check_text_column(sources, text_field)
    options = EncodeOptions.of(load_tokenizer(tokenizer), text_field, append_eos, prepend_bos)
    parts_folder = prefix.with_name(f"{prefix.name}.parts")
    with _kept_parts_told(parts_folder), _locked(parts_folder), full_disk_named(prefix.parent):
        start = time.perf_counter()
        reports = _encode(sources, parts_folder, options, workers, max_bad_rows, progress)
        report = PreprocessReport.of(sources, reports, time.perf_counter() - start)
        if not report.documents:
            raise ValueError(f"{len(sources)} inputs hold no document: {report.summary()}")
        _join(prefix, parts_folder, len(reports), options.dtype)
        prefix.with_name(f"{prefix.name}.report.json").write_text(report.to_json())
        shutil.rmtree(parts_folder)
    return report


def _check_numbers(workers: int | None, max_bad_rows: int) -> int:
    """The number of workers."""
    check_max_bad_rows(max_bad_rows)
    if workers is None:
        return len(os.sched_getaffinity(0))
    if workers < 1:
        raise ValueError(f"workers={workers} must be at least 1")
    return workers


def _encode(
    sources: Sequence[Source],
    parts_folder: Path,
    options: EncodeOptions,
    workers: int,
    max_bad_rows: int,
    progress: bool | None,
) -> list[PartReport]:
    """Encode what is not there yet; reports in the order of the parts."""
    total = sum(source.size for source in sources)
    part_bytes = min(max(total // _MAX_PARTS, _MIN_PART_BYTES), _MAX_PART_BYTES)
    _check_plan(parts_folder, sources, options, part_bytes)
    reports: dict[int, PartReport] = {}
    pending: dict[Future, tuple[int, Part]] = {}

    def collect(futures: set[Future]) -> None:
        for future in futures:
            index, part = pending.pop(future)
            keep(index, part.size, _report_of(future))

    def keep(index: int, size: int, report: PartReport) -> None:
        reports[index] = report
        line.advance(size, report.tokens)
        check_bad_rows([row for index in sorted(reports) for row in reports[index].bad_rows], max_bad_rows)

    with ProgressLine(total, progress, sys.stderr) as line, _pool(workers, options) as pool:
        parts = (part for source in sources for part in parts_of(source, part_bytes))
        for index, part in enumerate(parts):
            folder = parts_folder / f"{index:08}"
            if folder.exists():
                keep(index, part.size, read_part_report(folder))
                continue
            pending[pool.submit(encode_part, part, folder)] = (index, part)
            # Parts in flight hold their texts: no more than keep every worker busy.
            if len(pending) >= 2 * workers:
                collect(wait(pending, return_when=FIRST_COMPLETED).done)
        while pending:
            collect(wait(pending, return_when=FIRST_COMPLETED).done)
    return [reports[index] for index in sorted(reports)]


def _report_of(future: Future) -> PartReport:
    try:
        return future.result()
    except ValueError as error:  # What is wrong with a file is told here, without the worker's own traceback.
        raise ValueError(str(error)) from None


@contextlib.contextmanager
def _pool(workers: int, options: EncodeOptions) -> Iterator[ProcessPoolExecutor]:
    """Processes that know the options; on any error what has not begun is dropped."""
    import multiprocessing

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([encode_part.__module__, "transformers"])
    pool = ProcessPoolExecutor(workers, context, initializer=start_worker, initargs=(options,))
    try:
        yield pool
    except BrokenProcessPool as error:
        raise ValueError(
            "a worker process was killed, most likely for want of memory; finished parts are kept: run again with "
            "fewer workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _check_plan(parts_folder: Path, sources: Sequence[Source], options: EncodeOptions, part_bytes: int) -> None:
    """Write down what the parts are made from, or compare with what the parts there were made from."""
    stamps = [f"{s} {Path(s.name).stat().st_mtime_ns if Path(s.name).is_file() else ''}" for s in sources]
    plan = {
        "version": PARTS_VERSION,
        "inputs": content_key(stamps),
        "tokenizer": content_key(tokenizer_content(options.tokenizer)),
        "text_field": options.text_field,
        "append_eos": options.eos_token_id is not None,
        "prepend_bos": options.bos_token_id is not None,
        "part_bytes": part_bytes,
    }
    file = parts_folder / "plan.json"
    if not file.exists():
        unfinished = file.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(plan))
        unfinished.rename(file)
    there = json.loads(file.read_text())
    if differing := [name for name in plan if plan[name] != there.get(name)]:
        raise ValueError(
            f"'{parts_folder}' holds parts of a run with other {', '.join(differing)}; delete the folder to start "
            "over, or choose another output_prefix"
        )


@contextlib.contextmanager
def _locked(parts_folder: Path) -> Iterator[None]:
    parts_folder.mkdir(parents=True, exist_ok=True)
    with open(parts_folder / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"another process is writing '{parts_folder}'; wait for it") from error
        yield


@contextlib.contextmanager
def _kept_parts_told(parts_folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.strerror is None:  # one of ours
            raise
        place = f": '{error.filename}'" if error.filename else ""
        kept = len(list(parts_folder.glob("[0-9]*")))
        raise OSError(
            error.errno,
            f"{error.strerror}{place}; {kept} finished parts are kept in '{parts_folder}'. Mend this and run again to "
            "go on",
        ) from error


def _join(prefix: Path, parts_folder: Path, num_parts: int, dtype: type[np.number]) -> None:
    """Write the two files beside the output, then move both; the index comes last, so that it stands for both."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    unfinished = {suffix: parts_folder / f"joined{suffix}" for suffix in (".bin", ".idx")}
    builder = IndexedDatasetBuilder(str(unfinished[".bin"]), dtype)
    lengths = []
    for index in range(num_parts):
        folder = parts_folder / f"{index:08}"
        with open(folder / "tokens.bin", "rb") as tokens:
            shutil.copyfileobj(tokens, builder.data_file, 2**20)
        lengths.append(np.load(folder / "lengths.npy"))
    builder.sequence_lengths = np.concatenate(lengths)
    builder.document_indices = np.arange(len(builder.sequence_lengths) + 1)
    builder.finalize(str(unfinished[".idx"]))
    for suffix, file in unfinished.items():
        file.replace(prefix.with_name(f"{prefix.name}{suffix}"))
