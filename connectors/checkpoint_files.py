"""Hugging Face checkpoint folders: read tensor by tensor, written whole or not at all."""

import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nemo_dllm.connectors.safetensors_writer import write_safetensors

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
SAFETENSORS_FILE = "model.safetensors"
SAFETENSORS_INDEX = "model.safetensors.index.json"
PICKLE_FILE = "pytorch_model.bin"
PICKLE_INDEX = "pytorch_model.bin.index.json"

DEFAULT_SHARD_SIZE = 5_000_000_000

# Numbers.
_CHECKED_AT_ONCE = 1 << 24


class HFCheckpoint:
    """A folder with ``config.json`` and weights, in safetensors (with or without an index) or torch pickles.

    With an index, exactly the shards that it names are read; other weight files in the folder do not matter. Opening
    reads headers only; a tensor is read when asked for. Pickles are loaded with ``weights_only=True``.

    Args:
        path: the folder.

    Attributes:
        path: the folder.
        config: the content of ``config.json``.
        shapes: shape of each tensor by name.

    Raises:
        FileNotFoundError: where the folder, its config, its weights or shards are absent (all shards listed).
        ValueError: for a NeMo checkpoint, a damaged file, and an index that names tensors its shards lack (all listed).
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.config = _read_config(self.path)
        self._shard_of = _open_weights(self.path)
        self._opened: tuple[_SafetensorsShard | _PickleShard | None, Any] = (None, None)
        self.shapes: dict[str, tuple[int, ...]] = {
            name: shard.shapes[name] for name, shard in sorted(self._shard_of.items())
        }

    def keys(self) -> list[str]:
        """Names of all tensors, sorted."""
        return list(self.shapes)

    def json_file(self, name: str) -> dict[str, Any]:
        """Content of one of the small files; empty where there is none."""
        file = self.path / name
        return _read_json(file) if file.is_file() else {}

    def tensor(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        """Read one tensor, or the part of it that ``rows`` (dimension 0) and ``columns`` (dimension 1) name.

        Only that part leaves the disk. It has the file's dtype.

        Raises:
            ValueError: for a value that is not finite, or a file that cannot be read.
        """
        shard = self._shard_of[name]
        if self._opened[0] is not shard:
            # One file at a time: what is mapped counts as memory of this process.
            self._opened = (None, None)
            self._opened = (shard, shard.open())
        dimensions = (rows, columns)[: len(self.shapes[name])]
        part = shard.read(self._opened[1], name, dimensions)
        if part.is_floating_point() and not _is_finite(part):
            raise ValueError(f"{shard.file}: {name} holds NaN or infinity; the checkpoint is damaged")
        return part


def _is_finite(part: Tensor) -> bool:
    """In pieces, because the comparison makes copies."""
    return all(torch.isfinite(piece).all() for piece in part.reshape(-1).split(_CHECKED_AT_ONCE))


class _SafetensorsShard:
    def __init__(self, file: Path):
        self.file = file
        opened = self.open()
        self.shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118

    def open(self):
        try:
            return safe_open(self.file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{self.file} is truncated or damaged ({error}); fetch it again") from error

    def read(self, opened, name: str, dimensions: tuple[slice, ...]) -> Tensor:
        if all(dimension == slice(None) for dimension in dimensions):
            return opened.get_tensor(name)
        return opened.get_slice(name)[dimensions]


class _PickleShard:
    def __init__(self, file: Path):
        self.file = file
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self.open().items()}

    def open(self) -> dict[str, Tensor]:
        try:
            # Only zip archives can be mapped; older pickles are read whole.
            opened = torch.load(self.file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(self.file))
            if not all(isinstance(tensor, Tensor) for tensor in opened.values()):
                raise AttributeError("it holds more than tensors")
        except (RuntimeError, EOFError, AttributeError, pickle.UnpicklingError) as error:
            raise ValueError(f"{self.file} is damaged or no state dict of tensors ({error})") from error
        return opened

    def read(self, opened: dict[str, Tensor], name: str, dimensions: tuple[slice, ...]) -> Tensor:
        return opened[name][dimensions]


def _open_shard(file: Path) -> _SafetensorsShard | _PickleShard:
    return (_SafetensorsShard if file.suffix == ".safetensors" else _PickleShard)(file)


def _read_config(path: Path) -> dict:
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is not a folder; give a Hugging Face checkpoint folder with {CONFIG_FILE}")
    if (path / "context").is_dir():
        raise ValueError(f"{path} is a NeMo checkpoint; export it to Hugging Face first, or use it as it is")
    file = path / CONFIG_FILE
    if not file.is_file():
        raise FileNotFoundError(f"{path} has no {CONFIG_FILE}; give a Hugging Face checkpoint folder")
    return _read_json(file)


def _read_json(file: Path) -> dict:
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is no valid JSON ({error})") from error


def _open_weights(path: Path) -> dict[str, _SafetensorsShard | _PickleShard]:
    """The open file of each tensor."""
    for index_name, single_name in ((SAFETENSORS_INDEX, SAFETENSORS_FILE), (PICKLE_INDEX, PICKLE_FILE)):
        if (path / index_name).is_file():
            return _open_indexed(path, index_name)
        if (path / single_name).is_file():
            shard = _open_shard(path / single_name)
            return dict.fromkeys(shard.shapes, shard)
    raise FileNotFoundError(
        f"{path} has no weights; expected one of {SAFETENSORS_INDEX}, {SAFETENSORS_FILE}, {PICKLE_INDEX}, {PICKLE_FILE}"
    )


def _open_indexed(path: Path, index_name: str) -> dict[str, _SafetensorsShard | _PickleShard]:
    weight_map = _read_json(path / index_name).get("weight_map")
    if not weight_map:
        raise ValueError(f"{path / index_name} has no weight_map; fetch it again")
    files = sorted(set(weight_map.values()))
    absent_files = [file for file in files if not (path / file).is_file()]
    if absent_files:
        raise FileNotFoundError(f"{path} lacks shards that {index_name} names: {', '.join(absent_files)}")
    shards = {file: _open_shard(path / file) for file in files}
    absent = [f"{name} in {file}" for name, file in weight_map.items() if name not in shards[file].shapes]
    if absent:
        raise ValueError(f"{path / index_name} names tensors that their shards lack: {', '.join(absent)}")
    holders: dict[str, list[str]] = {}
    for file, shard in shards.items():
        for name in shard.shapes:
            holders.setdefault(name, []).append(file)
    repeated = [f"{name} in {' and '.join(files)}" for name, files in sorted(holders.items()) if len(files) > 1]
    if repeated:
        raise ValueError(f"{path} has tensors in more than one shard: {', '.join(repeated)}; fetch it again")
    return {name: shards[file] for name, file in weight_map.items()}


def write_hf_checkpoint(
    out_dir: str | Path,
    config: Mapping,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    max_shard_size: int = DEFAULT_SHARD_SIZE,
    extra_files: Mapping[str, bytes] | None = None,
    last_files: Callable[[], Mapping[str, bytes]] = dict,
    overwrite: bool = False,
) -> Path:
    """Write a checkpoint folder: it appears complete under its name, or not at all.

    Everything goes to a folder beside it, ``config.json`` last, and is then renamed; an error removes that folder.

    Args:
        out_dir: the folder to make.
        config: content of ``config.json``.
        tensors: (name, tensor) pairs, drawn one by one; names must differ.
        max_shard_size: bytes of tensors per file; a larger single tensor has a file of its own. With more than one
            file an index is written.
        extra_files: content of further files by name; they win over ``config``'s own file.
        last_files: as ``extra_files``, called once all tensors are written.
        overwrite: replace an existing folder.

    Raises:
        FileExistsError: where ``out_dir`` exists and ``overwrite`` is False; nothing is read or changed.
        ValueError: for a repeated name.
    """
    out_dir = Path(out_dir)
    refuse_existing(out_dir, overwrite)
    unfinished = unfinished_sibling(out_dir)
    unfinished.mkdir(parents=True)
    try:
        _write_shards(unfinished, tensors, max_shard_size)
        files = {CONFIG_FILE: _json_bytes(config), **(extra_files or {}), **last_files()}
        for name in sorted(files, key=lambda name: name == CONFIG_FILE):
            (unfinished / name).write_bytes(files[name])
    except BaseException:
        shutil.rmtree(unfinished)
        raise
    replace_folder(unfinished, out_dir)
    return out_dir


def refuse_existing(folder: Path, overwrite: bool) -> None:
    """Raise ``FileExistsError`` where a folder exists that may not be replaced."""
    if folder.exists() and not overwrite:
        raise FileExistsError(f"{folder} exists; choose another folder or pass overwrite=True")


def unfinished_sibling(folder: Path) -> Path:
    """Name of a folder beside ``folder``, on the same disk, for writing it and then renaming."""
    return folder.with_name(f".{folder.name}.unfinished-{os.getpid()}")


def replace_folder(finished: Path, folder: Path) -> None:
    """Rename ``finished`` to ``folder``; what stood there before is removed once the new one is in place."""
    old = folder.with_name(f".{folder.name}.old-{os.getpid()}")
    if folder.exists():
        folder.rename(old)
    finished.rename(folder)
    if old.exists():
        shutil.rmtree(old)


def _write_shards(folder: Path, tensors: Iterable[tuple[str, Tensor]], max_shard_size: int) -> None:
    shards: list[list[str]] = []
    total_size = 0
    seen: set[str] = set()
    for shard in _shards(tensors, max_shard_size):
        for name in shard:
            if name in seen:
                raise ValueError(f"tensor {name} was given twice")
            seen.add(name)
        with (folder / f"{len(shards)}.part").open("wb") as file:
            write_safetensors(file, shard)
        shards.append(list(shard))
        total_size += sum(tensor.nbytes for tensor in shard.values())
        shard.clear()  # The next one is collected before this name is free.
    if len(shards) == 1:
        (folder / "0.part").rename(folder / SAFETENSORS_FILE)
        return
    weight_map = {}
    for index, names in enumerate(shards):
        file = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"{index}.part").rename(folder / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / SAFETENSORS_INDEX).write_bytes(_json_bytes(index))


def _shards(tensors: Iterable[tuple[str, Tensor]], max_shard_size: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if name in shard:
            raise ValueError(f"tensor {name} was given twice")
        if shard and size + tensor.nbytes > max_shard_size:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.contiguous()
        size += tensor.nbytes
    if shard:
        yield shard


def _json_bytes(content: Mapping) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
