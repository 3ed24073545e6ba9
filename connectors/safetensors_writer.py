"""Safetensors files, written without the second copy of all tensors that the library makes."""

import json
from collections.abc import Mapping
from typing import Any, BinaryIO

import torch
from torch import Tensor

# As the format spells them.
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_safetensors(file: BinaryIO, tensors: Mapping[str, Tensor]) -> None:
    """Write a whole file; ``tensors`` are contiguous and on the CPU."""
    # Wide types first: readers want every tensor at a multiple of its width.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    file.write(len(encoded).to_bytes(8, "little") + encoded)
    for _, tensor in ordered:
        file.write(tensor.reshape(-1).view(torch.uint8).numpy())
