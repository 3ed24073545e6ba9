"""Which inputs a corpus has: files by their names, folders of them, and Hugging Face datasets."""

import functools
import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from nemo_dllm.collections.diffusion.data.hub import hub_or_its_cache
from nemo_dllm.collections.diffusion.model_source import HUB

if TYPE_CHECKING:
    from datasets import Dataset

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}

FORMATS = {
    "jsonl": (".jsonl", ".json", ".ndjson"),
    "parquet": (".parquet",),
    "text": (".txt", ".md"),
    "lines": (),
    "dataset": (),
}
"""Format names with the suffixes that tell them; `text` takes each file as one document, `lines` each line."""


class Source(NamedTuple):
    """One input: a file, or a dataset by folder or name (with its split)."""

    name: str
    format: str
    size: int
    split: str | None = None


_WITH_FIELDS = ("jsonl", "parquet")
# In the folder of a dataset that was saved.
_OF_DATASETS = ("state.json", "dataset_dict.json")
# What hub and `datasets` write beside the data.
_DESCRIPTIONS = frozenset({"dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json"})


def find_sources(inputs: Sequence[str | Path], format: str | None = None, split: str | None = None) -> list[Source]:
    """List the inputs, folders expanded in sorted order.

    Args:
        inputs: files, folders (recursive, links followed; hidden files are left out, and text beside files with
            fields), patterns of either such as ``data/*.jsonl``, or ``hf://NAME`` of datasets on the Hugging Face Hub;
            with the format ``dataset`` their name alone.
        format: name in `FORMATS`; None goes by the file names, and by the files that a saved dataset has.
        split: of datasets that have several.

    Raises:
        FileNotFoundError: an input does not exist, or a folder holds nothing to read.
        ValueError: there is no input; the format is unknown, or does not follow from a file's name.
    """
    if format is not None and format not in FORMATS:
        raise ValueError(f"format={format!r} is unknown; known: {', '.join(FORMATS)}")
    if "" in inputs:
        raise ValueError("an input has an empty name; name files, folders or datasets")
    sources = [source for entry in inputs for source in _of_input(str(entry), format, split)]
    if not sources:
        raise ValueError("there is no input; name files, folders or datasets")
    return sources


def has_fields(path: str | Path) -> bool:
    """Whether a path is of rows with fields, not of texts: a file of such rows, a folder with some, a saved dataset, or
    ``hf://NAME`` of one on the Hub.

    A folder whose only rows are in `.json` is one of texts: programs have their settings there.
    """
    if str(path).startswith(HUB):
        return True
    path = Path(path)
    if not path.is_dir():
        return format_of(path) in _WITH_FIELDS
    is_dataset = any((path / name).exists() for name in _OF_DATASETS)
    return is_dataset or any(format_of(file) in _WITH_FIELDS and not _is_json(file) for file in visible_files(path))


def _is_json(file: Path) -> bool:
    return (Path(file.stem) if compression_of(file) else file).suffix.lower() == ".json"


def repeated_sources(sources: Sequence[Source]) -> list[str]:
    """Names of sources that are there a second time, by whatever path."""
    seen: set[tuple[str, str | None]] = set()
    repeated = []
    for source in sources:
        identity = (os.path.realpath(source.name), source.split)
        if identity in seen:
            repeated.append(source.name)
        seen.add(identity)
    return repeated


def _of_input(entry: str, format: str | None, split: str | None) -> Iterator[Source]:
    if entry.startswith(HUB):
        return iter([_dataset_source(entry.removeprefix(HUB), split)])
    return _sources(Path(entry), format, split)


def _sources(path: Path, format: str | None, split: str | None) -> Iterator[Source]:
    if path.is_file():
        yield _file_source(path, format)
    elif path.is_dir() and any((path / name).exists() for name in _OF_DATASETS):
        yield _dataset_source(str(path), split)
    elif path.is_dir():
        found = _files_in(path, format)
        if not found:
            kind = format or "known"
            raise FileNotFoundError(f"'{path}' holds no files of {kind} format; known suffixes: {_known_suffixes()}")
        yield from found
    elif format == "dataset":
        yield _dataset_source(str(path), split)
    elif glob.has_magic(str(path)):
        matching = sorted(glob.glob(str(path), recursive=True))
        if not matching:
            raise FileNotFoundError(f"'{path}' matches no file")
        for match in matching:
            yield from _sources(Path(match), format, split)
    elif path.exists():
        raise ValueError(f"'{path}' is a pipe or a device, which cannot be read twice; write it to a file first")
    else:
        raise FileNotFoundError(
            f"'{path}' does not exist; name a file or folder, or {HUB}NAME for a dataset of the Hugging Face Hub"
        )


def _files_in(folder: Path, format: str | None) -> list[Source]:
    """Files of the format; without one, of those with fields, or of text where there are none (a README is no data)."""
    found = [
        _file_source(file, None)
        for file in visible_files(folder)
        if format_of(file) and file.name not in _DESCRIPTIONS and not _is_of_preprocess(file) and _is_file(file)
    ]
    formats = {source.format for source in found}
    wanted = {format} if format else formats - {"text"} or formats
    return [source for source in found if source.format in wanted]


def _is_of_preprocess(file: Path) -> bool:
    """Whether it is a report beside a corpus, or a part of one that is not finished: its output may be in its input."""
    prefix = file.name.removesuffix(".report.json")
    is_report = prefix != file.name and file.with_name(f"{prefix}.idx").exists()
    return is_report or any((parent / "plan.json").exists() for parent in file.parents if parent.suffix == ".parts")


def visible_files(folder: Path) -> list[Path]:
    """All in a folder and its folders that is no folder itself, sorted, without what is hidden (a leading dot).

    Links are followed; a folder that two ways lead to, or that holds itself, is read once.
    """
    files: list[Path] = []
    read: set[str] = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(place)) in read:
            folders.clear()
            continue
        read.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files += [Path(place, name) for name in names if not name.startswith(".")]
    return sorted(files)


def _is_file(file: Path) -> bool:
    if file.is_symlink() and not file.exists():
        raise FileNotFoundError(f"'{file}' is a link to nothing; mend or delete it")
    return file.is_file()


def _file_source(file: Path, format: str | None) -> Source:
    format = format or format_of(file)
    if format is None:
        raise ValueError(f"'{file}': the format does not follow from the name; pass format={' or '.join(FORMATS)}")
    return Source(str(file), format, file.stat().st_size)


def format_of(file: Path) -> str | None:
    """The format that a file's name tells, or None."""
    suffix = Path(file.stem).suffix if compression_of(file) else file.suffix
    return next((name for name, suffixes in FORMATS.items() if suffix.lower() in suffixes), None)


def compression_of(file: Path) -> str | None:
    """The compression that a file's name tells, as pyarrow calls it, or None."""
    return COMPRESSIONS.get(file.suffix.lower())


def _known_suffixes() -> str:
    return ", ".join(suffix for suffixes in FORMATS.values() for suffix in suffixes)


def _dataset_source(name: str, split: str | None) -> Source:
    dataset = load_dataset(name, split)
    return Source(name, "dataset", dataset.data.nbytes, split)


@functools.lru_cache(maxsize=4)
def load_dataset(name: str, split: str | None) -> "Dataset":
    """A dataset from a folder written by `save_to_disk`, or from the hub or its cache.

    Raises:
        FileNotFoundError: there is no dataset of that name.
        ValueError: the folder is damaged, or it has several splits and none, or an unknown one, is named.
    """
    import datasets

    if not Path(name).is_dir():
        try:
            with hub_or_its_cache(name, "dataset"):
                return datasets.load_dataset(name, split=split or "train")
        except (OSError, ValueError) as error:
            if getattr(error, "errno", None):  # the system's own, such as a full disk
                raise
            raise FileNotFoundError(
                f"the dataset '{name}' is no folder, and could not be had from the Hugging Face Hub or its cache "
                f"({str(error).splitlines()[0]})"
            ) from error
    try:
        loaded = datasets.load_from_disk(name)
    except (OSError, ValueError, LookupError) as error:
        raise ValueError(
            f"'{name}' cannot be read as a dataset that `save_to_disk` wrote: {error}; it is damaged, or holds no rows"
        ) from error
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise ValueError(f"split={split!r} is not in the dataset '{name}'; it has {', '.join(loaded)}")
        return loaded[split]
    return loaded
