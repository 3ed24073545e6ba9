"""Dtypes of single tensors: a checkpoint may have norms or routers in another one than its other weights.

A Megatron parameter is made of several tensors, and NeMo's checkpoints store those of all layers as one. So a parameter
takes the narrowest dtype that holds all of these exactly, and an export gives every tensor back the one that it had.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import reduce

import torch
from torch import Tensor

from nemo_dllm.connectors.expert_keys import EXPERT_BIAS
from nemo_dllm.connectors.key_table import Entry

TRAINED = (torch.float32, torch.bfloat16, torch.float16)

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|(?<=\.weight)\d+$")


def main_dtype(dtypes: Mapping[str, torch.dtype], shapes: Mapping[str, tuple[int, ...]]) -> torch.dtype:
    """The floating dtype that most values of some tensors have.

    Raises:
        ValueError: where models are not trained in it.
    """
    values: dict[torch.dtype, int] = {}
    for name, dtype in dtypes.items():
        if dtype.is_floating_point:
            values[dtype] = values.get(dtype, 0) + math.prod(shapes[name])
    most = max(values, key=values.__getitem__, default=None)
    if most not in TRAINED:
        raise ValueError(f"its weights are {most}; save them in one of {', '.join(map(str, TRAINED))}")
    return most


def parameter_dtypes(entries: Iterable[Entry], dtype_of: Callable[[str], torch.dtype]) -> dict[str, torch.dtype]:
    """The dtype of each entry's parameter, by its first Megatron name, that holds its tensors of all layers exactly.

    Args:
        entries: of a key table.
        dtype_of: a Hugging Face tensor, by its name.
    """
    entries = list(entries)
    kinds: dict[str, set[torch.dtype]] = {}
    for entry in entries:
        kinds.setdefault(_kind(entry), set()).update(map(dtype_of, entry.hf))
    return {entry.megatron[0]: reduce(torch.promote_types, kinds[_kind(entry)]) for entry in entries}


def exported_dtypes(
    parameters: Iterable[tuple[Entry, Tensor]], dtype_of: Callable[[str], torch.dtype]
) -> dict[str, torch.dtype]:
    """The dtypes in which Hugging Face tensors leave, by name; those not named leave in that of their parameter.

    A model that has the dtypes of its import gives all of them back. One that was trained in others keeps those, but
    for expert biases, which are fp32 in every model.

    Args:
        parameters: of the model, with their entries.
        dtype_of: a tensor that training started from, by its name.
    """
    parameters = list(parameters)
    imported = parameter_dtypes([entry for entry, _ in parameters], dtype_of)
    as_imported = all(p.dtype == imported[e.megatron[0]] for e, p in parameters if not _is_bias(e.hf[0]))
    return {name: dtype_of(name) for entry, _ in parameters for name in entry.hf if as_imported or _is_bias(name)}


def _is_bias(name: str) -> bool:
    return name.endswith(EXPERT_BIAS)


def _kind(entry: Entry) -> str:
    return _NUMBER.sub("N", entry.megatron[0])
