"""Safetensors files written in place: the header first, then the tensors one by one, in whatever order they come."""

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

# As the format spells them, in the order in which the library puts them into a file: wide types first, because readers
# want every tensor at a multiple of its width.
DTYPE_NAMES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ORDER = {dtype: position for position, dtype in enumerate(DTYPE_NAMES)}


class TensorHeader(NamedTuple):
    """What a file's header says about a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Entries."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.numel * self.dtype.itemsize

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorHeader":
        """The header of a tensor."""
        return cls(tensor.dtype, tuple(tensor.shape))


class SafetensorsFile:
    """A file that is made with its header, and complete once every tensor was written.

    Args:
        path: the file to make.
        headers: of its tensors, by name. The file orders them as the library does: by dtype, then by name.
    """

    def __init__(self, path: Path, headers: Mapping[str, TensorHeader]):
        self._path, self._headers = path, headers
        self._offsets: dict[str, int] = {}
        ordered = sorted(headers, key=lambda name: (_ORDER[headers[name].dtype], name))
        content: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in ordered:
            dtype, shape = headers[name]
            start, end = end, end + headers[name].nbytes
            content[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
            self._offsets[name] = start
        encoded = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
        encoded += b" " * (-len(encoded) % 8)
        path.write_bytes(len(encoded).to_bytes(8, "little") + encoded)
        self._data = 8 + len(encoded)

    def write(self, name: str, tensor: Tensor) -> None:
        """Put a tensor in its place; it is on the CPU and as its header says."""
        assert TensorHeader.of(tensor) == self._headers[name], f"{name} is not as its header says"
        # Not kept open: a checkpoint may have hundreds of files.
        with self._path.open("r+b") as file:
            file.seek(self._data + self._offsets[name])
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
