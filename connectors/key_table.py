"""One table of parameter names per family, read in both directions.

A :class:`Row` says which Hugging Face tensors a Megatron parameter is made of, and a layout says how: fused or not, and
which part of it a tensor-parallel rank holds. Layouts work on plain tensors, so a rank can be simulated.

Shape letters: R rows (dimension 0), G query groups, D rows of one head, H hidden size.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

Shape = tuple[int, ...]
Read = Callable[..., Tensor]
"""``read(index, rows=slice, columns=slice)``: that part of the row's index-th Hugging Face tensor."""


class TensorRank(NamedTuple):
    """Which part of split parameters this process holds."""

    rank: int = 0
    size: int = 1


class ModelDimensions(NamedTuple):
    """What layouts need to know about the whole model."""

    heads: int
    query_groups: int
    head_dim: int
    vocab_size: int
    """Tokens: rows of the Hugging Face tables; Megatron's may be padded to more."""


class Layout(Protocol):
    """How Hugging Face tensors make one Megatron parameter. ``shape`` is that of one rank's parameter."""

    def hf_shapes(self, shape: Shape, size: int, dimensions: ModelDimensions) -> list[Shape]:
        """Full shapes of the Hugging Face tensors, given one of ``size`` ranks' shape."""

    def read(self, read: Read, shape: Shape, rank: TensorRank, dimensions: ModelDimensions) -> Tensor:
        """One rank's parameter, reading only what it holds."""

    def write(self, parts: Sequence[Tensor], dimensions: ModelDimensions) -> list[Tensor]:
        """The full Hugging Face tensors, from the parameters of all ranks in order."""


@dataclass(frozen=True)
class Row:
    """One line of a key table.

    Args:
        megatron: names of the parameter in a single-process model, with ``{layer}`` and ``{expert}`` counting from 0.
            Where Transformer Engine's layers and Megatron's own differ, both; a model has exactly one of them.
        hf: names of the Hugging Face tensors that it is made of, with the same ``{layer}`` and ``{expert}``.
        layout: how.
        layers: the layers that have it; None for a parameter outside the layers.
        experts: the experts that have it; None for a parameter that no expert has.
    """

    megatron: tuple[str, ...]
    hf: tuple[str, ...]
    layout: Layout
    layers: Collection[int] | None = None
    experts: Collection[int] | None = None


class Entry(NamedTuple):
    """A row spelled out for one layer and one expert."""

    megatron: tuple[str, ...]
    hf: tuple[str, ...]
    layout: Layout
    of_expert: bool
    """Whether expert parallelism, which has tensor-parallel ranks of its own, distributes it."""


@dataclass(frozen=True)
class KeyTable:
    """All names of a model, and the tensors of a checkpoint that it does not need.

    Args:
        rows: one per parameter (per layer).
        ignored: tensors that may be present and are not used: name, ``*`` matching anything, to the reason.
    """

    rows: tuple[Row, ...]
    ignored: Mapping[str, str]

    def entries(self, layers: Collection[int] | None = None, experts: Collection[int] | None = None) -> list[Entry]:
        """The rows spelled out for some layers and experts (all that they have where None), and for neither."""
        return [
            Entry(
                tuple(name.format(layer=layer, expert=expert) for name in row.megatron),
                tuple(name.format(layer=layer, expert=expert) for name in row.hf),
                row.layout,
                row.experts is not None,
            )
            for row in self.rows
            for layer in _chosen(row.layers, layers)
            for expert in _chosen(row.experts, experts)
        ]

    def reason_to_ignore(self, name: str) -> str | None:
        """Why a tensor of the checkpoint is not used; None where the table does not say so."""
        return next((reason for pattern, reason in self.ignored.items() if fnmatchcase(name, pattern)), None)


class Replicated:
    """One tensor, whole on every rank: norms, biases of row-parallel layers, routers."""

    def hf_shapes(self, shape, size, dimensions):
        return [shape]

    def read(self, read, shape, rank, dimensions):
        return read(0)

    def write(self, parts, dimensions):
        return [parts[0]]


class SplitRows:
    """One tensor, each rank a run of rows: column-parallel layers."""

    def hf_shapes(self, shape, size, dimensions):
        return [(shape[0] * size, *shape[1:])]

    def read(self, read, shape, rank, dimensions):
        return read(0, rows=_run(rank.rank, shape[0]))

    def write(self, parts, dimensions):
        return [_joined(parts)]


class SplitColumns:
    """One tensor, each rank a run of columns: row-parallel layers."""

    def hf_shapes(self, shape, size, dimensions):
        return [(shape[0], shape[1] * size)]

    def read(self, read, shape, rank, dimensions):
        return read(0, columns=_run(rank.rank, shape[1]))

    def write(self, parts, dimensions):
        return [_joined(parts, dim=1)]


class VocabularyRows:
    """A table with a row per token. Megatron's is padded; padding rows are zero and never leave."""

    def hf_shapes(self, shape, size, dimensions):
        return [(dimensions.vocab_size, *shape[1:])]

    def read(self, read, shape, rank, dimensions):
        start = min(rank.rank * shape[0], dimensions.vocab_size)
        stop = min(start + shape[0], dimensions.vocab_size)
        rows_RH = read(0, rows=slice(start, stop))
        padding = shape[0] - len(rows_RH)
        return torch.cat((rows_RH, rows_RH.new_zeros(padding, *shape[1:]))) if padding else rows_RH

    def write(self, parts, dimensions):
        return [_joined(parts)[: dimensions.vocab_size]]


class QueryKeyValue:
    """Query, key and value; Megatron fuses them group by group: a group's query heads, its key, its value.

    Weights and biases alike. Each rank holds whole groups.
    """

    def hf_shapes(self, shape, size, dimensions):
        kv_rows = dimensions.query_groups * dimensions.head_dim
        q_rows = dimensions.heads * dimensions.head_dim
        return [(rows, *shape[1:]) for rows in (q_rows, kv_rows, kv_rows)]

    def read(self, read, shape, rank, dimensions):
        groups = dimensions.query_groups // rank.size
        parts_GDH = []
        for index, rows_per_group in enumerate(_group_rows(dimensions)):
            part_RH = read(index, rows=_run(rank.rank, groups * rows_per_group))
            parts_GDH.append(part_RH.reshape(groups, rows_per_group, *shape[1:]))
        return torch.cat(parts_GDH, dim=1).flatten(0, 1)

    def write(self, parts, dimensions):
        fused_RH = _joined(parts)
        fused_GDH = fused_RH.reshape(dimensions.query_groups, -1, *fused_RH.shape[1:])
        return [part_GDH.flatten(0, 1) for part_GDH in fused_GDH.split(_group_rows(dimensions), dim=1)]


class GatedPair:
    """The gate and the up projection of a gated MLP; each rank holds its gate rows, then its up rows."""

    def hf_shapes(self, shape, size, dimensions):
        return [(shape[0] // 2 * size, *shape[1:])] * 2

    def read(self, read, shape, rank, dimensions):
        rows = _run(rank.rank, shape[0] // 2)
        return torch.cat((read(0, rows=rows), read(1, rows=rows)))

    def write(self, parts, dimensions):
        gates, ups = zip(*(part.chunk(2) for part in parts), strict=True)
        return [_joined(gates), _joined(ups)]


def _chosen(existing: Collection[int] | None, asked: Collection[int] | None) -> Iterable[int | None]:
    if existing is None:
        return (None,)
    return existing if asked is None else [index for index in existing if index in asked]


def _joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Without a copy where there is nothing to join: tables are the largest tensors of a model."""
    return torch.cat(tuple(parts), dim=dim) if len(parts) > 1 else parts[0]


def _run(index: int, length: int) -> slice:
    return slice(index * length, (index + 1) * length)


def _group_rows(dimensions: ModelDimensions) -> list[int]:
    """Rows of a query group's query, key and value."""
    return [
        dimensions.heads // dimensions.query_groups * dimensions.head_dim,
        dimensions.head_dim,
        dimensions.head_dim,
    ]
