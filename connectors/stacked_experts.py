"""A checkpoint that stacks the experts of a layer, as dFactory trains LLaDA2, seen with one tensor per expert."""

import re

import torch
from torch import Tensor

from nemo_dllm.connectors.checkpoint_files import HFCheckpoint
from nemo_dllm.connectors.expert_keys import PROJECTIONS

_STACKED = re.compile(rf"(.*\.experts\.)({'|'.join(PROJECTIONS)})")


class StackedExperts:
    """An :class:`HFCheckpoint` with ``experts.E.gate_proj.weight`` [R, C] in place of ``experts.gate_proj`` [E, R, C].

    Args:
        checkpoint: what is read.
    """

    def __init__(self, checkpoint: HFCheckpoint):
        self.path, self.config = checkpoint.path, checkpoint.config
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._checkpoint = checkpoint
        self._stack_of: dict[str, tuple[str, int]] = {}
        for stored, shape in checkpoint.shapes.items():
            stacked = _STACKED.fullmatch(stored)
            if stacked is None:
                self.shapes[stored], self.dtypes[stored] = shape, checkpoint.dtypes[stored]
                continue
            for expert in range(shape[0]):
                name = f"{stacked[1]}{expert}.{stacked[2]}.weight"
                self.shapes[name], self.dtypes[name] = shape[1:], checkpoint.dtypes[stored]
                self._stack_of[name] = (stored, expert)

    def tensor(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        """See :meth:`HFCheckpoint.tensor`; of an expert's rows all columns leave the disk."""
        if name not in self._stack_of:
            return self._checkpoint.tensor(name, rows, columns)
        stored, expert = self._stack_of[name]
        return self._checkpoint.tensor(stored, slice(expert, expert + 1), rows)[0][:, columns]


def per_expert(checkpoint: HFCheckpoint) -> HFCheckpoint | StackedExperts:
    """The checkpoint with one tensor per expert: itself where it is so already."""
    return StackedExperts(checkpoint) if any(map(_STACKED.fullmatch, checkpoint.shapes)) else checkpoint
