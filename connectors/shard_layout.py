"""Which tensors a checkpoint keeps in which file: that of its source, or runs of tensors of a given size."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nemo_dllm.collections.diffusion.checkpoint_folder import SAFETENSORS_FILE, SAFETENSORS_INDEX
from nemo_dllm.connectors.safetensors_writer import TensorHeader

DEFAULT_SHARD_SIZE = 5_000_000_000

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_NAMED = "KB, MB, GB, KiB, MiB, GiB"
_SIZE = re.compile(rf"(?P<number>\d+(\.\d+)?) *(?P<unit>{'|'.join(_UNITS)})", re.IGNORECASE)


class ShardPlan(NamedTuple):
    """Files of weights to write."""

    files: dict[str, list[str]]
    """Names of tensors by file."""
    index: bytes | None
    """Content of the index; None for a single file without one."""


class ShardLayout(NamedTuple):
    """How a Hugging Face checkpoint spreads its tensors over safetensors files. All are JSON values."""

    index: str | None
    """Text of its index; None for a single file without one."""
    num_bytes: int
    """Of all its tensors."""


def size_in_bytes(size: int | str) -> int:
    """A number of bytes, given as one or as text: ``5GB``, ``500 MiB``.

    Raises:
        ValueError: for anything else, and less than one byte.
    """
    found = _SIZE.fullmatch(str(size).strip())
    count = round(float(found["number"]) * _UNITS[found["unit"].upper()]) if found else 0
    if count < 1:
        raise ValueError(f"max_shard_size={size!r} is no size of files; give bytes or a number with one of {_NAMED}")
    return count


def read_shard_layout(folder: Path) -> ShardLayout | None:
    """The layout of a readable checkpoint folder; None where its weights are torch pickles.

    None, too, for files with names that an export may not write: in other folders, or of another format.
    """
    index_file = folder / SAFETENSORS_INDEX
    # As bytes: reading text would turn its line ends into those of this machine.
    index = index_file.read_bytes().decode() if index_file.is_file() else None
    files = [SAFETENSORS_FILE] if index is None else sorted(set(json.loads(index)["weight_map"].values()))
    if any(Path(file).name != file or not file.endswith(".safetensors") for file in files):
        return None
    if not all((folder / file).is_file() for file in files):
        return None
    return ShardLayout(index, sum(_stored_bytes(folder / file) for file in files))


def plan_shards(
    headers: Mapping[str, TensorHeader], layout: ShardLayout | None, max_shard_size: int | None = None
) -> ShardPlan:
    """Choose the files for some tensors.

    Args:
        headers: of the tensors, by name.
        layout: of the checkpoint that they began as. It is kept where it names them all; its index too, byte for byte
            unless sizes changed.
        max_shard_size: bytes of tensors per file, which wins over ``layout``; a larger single tensor has a file of its
            own. None is ``DEFAULT_SHARD_SIZE`` where there is no layout to keep.
    """
    if max_shard_size is None and layout is not None:
        plan = _keep(headers, layout)
        if plan is not None:
            return plan
    return _cut(headers, DEFAULT_SHARD_SIZE if max_shard_size is None else max_shard_size)


def _keep(headers: Mapping[str, TensorHeader], layout: ShardLayout) -> ShardPlan | None:
    if layout.index is None:
        return ShardPlan({SAFETENSORS_FILE: list(headers)}, None)
    index = json.loads(layout.index)
    weight_map = index["weight_map"]
    if not headers.keys() <= weight_map.keys() or any(Path(file).name != file for file in weight_map.values()):
        return None
    files: dict[str, list[str]] = {file: [] for file in sorted(set(weight_map.values()))}
    for name in headers:
        files[weight_map[name]].append(name)
    if headers.keys() == weight_map.keys() and _num_bytes(headers) == layout.num_bytes:
        # Published totals may count otherwise, for example a tied table twice.
        return ShardPlan(files, layout.index.encode())
    index["weight_map"] = {name: file for name, file in weight_map.items() if name in headers}
    totals = {"total_size": _num_bytes(headers), "total_parameters": sum(h.numel for h in headers.values())}
    metadata = index.get("metadata")
    if isinstance(metadata, dict):  # Whatever else it is says nothing of totals.
        index["metadata"] = metadata | {field: totals[field] for field in metadata if field in totals}
    return ShardPlan({file: names for file, names in files.items() if names}, json_bytes(index))


def _cut(headers: Mapping[str, TensorHeader], max_shard_size: int) -> ShardPlan:
    shards: list[list[str]] = [[]]
    size = 0
    for name, header in headers.items():
        if shards[-1] and size + header.nbytes > max_shard_size:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += header.nbytes
    if len(shards) == 1:
        return ShardPlan({SAFETENSORS_FILE: shards[0]}, None)
    files = {
        f"model-{number:05d}-of-{len(shards):05d}.safetensors": names for number, names in enumerate(shards, start=1)
    }
    weight_map = dict(sorted((name, file) for file, names in files.items() for name in names))
    return ShardPlan(files, json_bytes({"metadata": {"total_size": _num_bytes(headers)}, "weight_map": weight_map}))


def _num_bytes(headers: Mapping[str, TensorHeader]) -> int:
    return sum(header.nbytes for header in headers.values())


def _stored_bytes(file: Path) -> int:
    with file.open("rb") as opened:
        header: dict[str, Any] = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    header.pop("__metadata__", None)
    return max((tensor["data_offsets"][1] for tensor in header.values()), default=0)


def json_bytes(content: Mapping) -> bytes:
    """Content of a JSON file, as transformers lays it out."""
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
