"""Hugging Face checkpoint folders: read tensor by tensor, written whole or not at all."""

import shutil
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nemo_dllm.collections.diffusion.checkpoint_folder import SAFETENSORS_INDEX, check_shards, hf_weights
from nemo_dllm.connectors.json_files import read_json_object
from nemo_dllm.connectors.new_folder import (
    name_full_disk,
    place_folder,
    refuse_existing,
    refuse_unfinished,
    unfinished_sibling,
)
from nemo_dllm.connectors.safetensors_writer import DTYPE_NAMES, SafetensorsFile, TensorHeader
from nemo_dllm.connectors.shard_layout import ShardLayout, ShardPlan, json_bytes, plan_shards

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
# How files begin that a clone without Git LFS has in the place of large ones.
_LFS_POINTER = b"version https://git-lfs"
_HOLD = {True: "holds", False: "hold"}
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
        dtypes: dtype of each tensor by name.

    Raises:
        FileNotFoundError: where the folder, its config, its weights or shards are absent (all shards listed).
        ValueError: for a NeMo checkpoint, a damaged file, an index that names tensors its shards lack, tensors in two
            shards and tensors of a dtype that is never trained (all listed).
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.config = _read_config(self.path)
        self._shard_of = _open_weights(self.path)
        self._opened: tuple[_SafetensorsShard | _PickleShard | None, Any] = (None, None)
        headers = {name: shard.headers[name] for name, shard in sorted(self._shard_of.items())}
        self.shapes: dict[str, tuple[int, ...]] = {name: header.shape for name, header in headers.items()}
        self.dtypes: dict[str, torch.dtype] = {name: header.dtype for name, header in headers.items()}

    def keys(self) -> list[str]:
        """Names of all tensors, sorted."""
        return list(self.shapes)

    def json_file(self, name: str) -> dict[str, Any]:
        """Content of one of the small files; empty where there is none."""
        file = self.path / name
        return read_json_object(file) if file.is_file() else {}

    def tensor(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        """Read one tensor, or the part of it that ``rows`` (dimension 0) and ``columns`` (dimension 1) name.

        Only that part leaves the disk. It has the file's dtype.

        Raises:
            ValueError: for a value that is not finite, naming all tensors with such values, or a file that cannot be
                read.
        """
        part = self._read(name, (rows, columns)[: len(self.shapes[name])])
        if _is_finite(part):
            return part
        # Only now: a look at all tensors takes as long as loading them.
        damaged: dict[Path, list[str]] = {}
        for other, shard in self._shard_of.items():
            if not _is_finite(self._read(other, ())):
                damaged.setdefault(shard.file, []).append(other)
        listed = (f"{file}: {', '.join(sorted(names))} {_HOLD[len(names) == 1]} NaN" for file, names in damaged.items())
        raise ValueError(f"{'; '.join(listed)} or infinity; the checkpoint is damaged")

    def _read(self, name: str, dimensions: tuple[slice, ...]) -> Tensor:
        shard = self._shard_of[name]
        if self._opened[0] is not shard:
            # One file at a time: what is mapped counts as memory of this process.
            self._opened = (None, None)
            self._opened = (shard, shard.open())
        return shard.read(self._opened[1], name, dimensions)


def _is_finite(part: Tensor) -> bool:
    """In pieces, because the comparison makes copies."""
    return not part.is_floating_point() or all(
        torch.isfinite(piece).all() for piece in part.reshape(-1).split(_CHECKED_AT_ONCE)
    )


class _SafetensorsShard:
    def __init__(self, file: Path):
        self.file = file
        opened = self.open()
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        unknown = sorted(name for name, part in slices.items() if part.get_dtype() not in _DTYPES)
        if unknown:
            found = ", ".join(sorted({slices[name].get_dtype() for name in unknown}))
            raise ValueError(
                f"{self.file} holds tensors of {found}, which are not supported: {', '.join(unknown)}; take the "
                "checkpoint before quantisation"
            )
        self.headers = {
            name: TensorHeader(_DTYPES[part.get_dtype()], tuple(part.get_shape())) for name, part in slices.items()
        }

    def open(self):
        _check_readable(self.file)
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
        self.headers = {name: TensorHeader.of(tensor) for name, tensor in self.open().items()}

    def open(self) -> dict[str, Tensor]:
        _check_readable(self.file)
        try:
            # Only zip archives can be mapped; older pickles are read whole.
            opened = torch.load(self.file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(self.file))
            if not all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in opened.items()):
                raise TypeError("it holds more than named tensors")
        except MemoryError:
            raise
        except Exception as error:  # Damaged bytes raise anything.
            raise ValueError(f"{self.file} is damaged or no state dict of tensors ({error})") from error
        return opened

    def read(self, opened: dict[str, Tensor], name: str, dimensions: tuple[slice, ...]) -> Tensor:
        return opened[name][dimensions]


def _check_readable(file: Path) -> None:
    """Raise what says more than a reader who takes everything for damage: the system's error, or what is there."""
    with file.open("rb") as opened:
        if opened.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise ValueError(f"{file} only points to the weights, which Git LFS has; fetch them with `git lfs pull`")


def _open_shard(file: Path) -> _SafetensorsShard | _PickleShard:
    return (_SafetensorsShard if file.suffix == ".safetensors" else _PickleShard)(file)


def _read_config(path: Path) -> dict:
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is not a folder; give a Hugging Face checkpoint folder with {CONFIG_FILE}")
    refuse_unfinished(path)
    if (path / "context").is_dir():
        raise ValueError(f"{path} is a NeMo checkpoint; export it to Hugging Face first, or use it as it is")
    file = path / CONFIG_FILE
    if not file.is_file():
        raise FileNotFoundError(f"{path} has no {CONFIG_FILE}; give a Hugging Face checkpoint folder")
    return read_json_object(file)


def _open_weights(path: Path) -> dict[str, _SafetensorsShard | _PickleShard]:
    """The open file of each tensor."""
    weights = hf_weights(path)
    if weights.suffix == ".json":
        return _open_indexed(path, weights.name)
    shard = _open_shard(weights)
    return dict.fromkeys(shard.headers, shard)


def _open_indexed(path: Path, index_name: str) -> dict[str, _SafetensorsShard | _PickleShard]:
    weight_map = read_json_object(path / index_name).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(f, str) for f in weight_map.values()):
        raise ValueError(f"{path / index_name} has no weight_map from tensors to files; fetch it again")
    files = sorted(set(weight_map.values()))
    elsewhere = [file for file in files if Path(file).is_absolute() or ".." in Path(file).parts]
    if elsewhere:
        raise ValueError(f"{path / index_name} names files outside of its folder: {', '.join(elsewhere)}")
    check_shards(path / index_name, files)
    shards, damaged = {}, []
    for file in files:
        try:
            shards[file] = _open_shard(path / file)
        except ValueError as error:
            damaged.append(error)
    if damaged:
        raise ValueError("\n".join(map(str, damaged)))
    absent = [f"{name} in {file}" for name, file in weight_map.items() if name not in shards[file].headers]
    if absent:
        raise ValueError(f"{path / index_name} names tensors that their shards lack: {', '.join(absent)}")
    holders: dict[str, list[str]] = {}
    for file, shard in shards.items():
        for name in shard.headers:
            holders.setdefault(name, []).append(file)
    repeated = [f"{name} in {' and '.join(files)}" for name, files in sorted(holders.items()) if len(files) > 1]
    if repeated:
        raise ValueError(f"{path} has tensors in more than one shard: {', '.join(repeated)}; fetch it again")
    return {name: shards[file] for name, file in weight_map.items()}


def write_hf_checkpoint(
    out_dir: str | Path,
    config: Mapping,
    headers: Mapping[str, TensorHeader],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    layout: ShardLayout | None = None,
    max_shard_size: int | None = None,
    extra_files: Mapping[str, bytes] | None = None,
    last_files: Callable[[], Mapping[str, bytes]] = dict,
    overwrite: bool = False,
) -> Path:
    """Write a checkpoint folder: it appears complete under its name, or not at all.

    Everything goes to a folder beside it, ``config.json`` last, and is then renamed; an error removes that folder, and
    the next conversion to the same place what a killed process left. One tensor is in memory at a time.

    Args:
        out_dir: the folder to make.
        config: content of ``config.json``.
        headers: of all tensors, by name.
        tensors: (name, tensor) pairs, drawn one by one, in any order.
        layout, max_shard_size: which tensors go to which file, see :func:`plan_shards`.
        extra_files: content of further files by name; they win over ``config``'s own file.
        last_files: as ``extra_files``, called once all tensors are written.
        overwrite: replace an existing folder.

    Raises:
        FileExistsError: where ``out_dir`` exists and ``overwrite`` is False; nothing is read or changed.
        OSError: where it cannot be written, as on a full disk.
    """
    out_dir = Path(out_dir)
    refuse_existing(out_dir, overwrite)
    unfinished = unfinished_sibling(out_dir)
    unfinished.mkdir(parents=True)
    try:
        _write_shards(unfinished, plan_shards(headers, layout, max_shard_size), headers, tensors)
        files = {CONFIG_FILE: json_bytes(config), **(extra_files or {}), **last_files()}
        for name in sorted(files, key=lambda name: name == CONFIG_FILE):
            (unfinished / name).parent.mkdir(exist_ok=True)
            (unfinished / name).write_bytes(files[name])
    except BaseException as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        name_full_disk(error, out_dir)
        raise
    place_folder(unfinished, out_dir, overwrite)
    return out_dir


def _write_shards(
    folder: Path, plan: ShardPlan, headers: Mapping[str, TensorHeader], tensors: Iterable[tuple[str, Tensor]]
) -> None:
    shard_of: dict[str, SafetensorsFile] = {}
    for file, names in plan.files.items():
        shard_of |= dict.fromkeys(names, SafetensorsFile(folder / file, {name: headers[name] for name in names}))
    for name, tensor in tensors:
        shard_of.pop(name).write(name, tensor)
    assert not shard_of, f"never written: {', '.join(shard_of)}"
    if plan.index is not None:
        (folder / SAFETENSORS_INDEX).write_bytes(plan.index)
