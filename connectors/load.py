"""Weights between Hugging Face checkpoints and built Megatron models, tensor by tensor, strictly.

Works on any stage of a pipeline and any tensor-parallel rank: each process reads what it holds.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from nemo.utils import logging
from torch import Tensor, nn

from nemo_dllm.connectors import placement
from nemo_dllm.connectors.checkpoint_files import CONFIG_FILE, HFCheckpoint
from nemo_dllm.connectors.families.registry import family_of, find_family
from nemo_dllm.connectors.key_table import Entry, KeyTable, ModelDimensions, Replicated, TensorRank
from nemo_dllm.connectors.safetensors_writer import TensorHeader
from nemo_dllm.connectors.stacked_experts import StackedExperts, per_expert
from nemo_dllm.connectors.tensor_dtypes import exported_dtypes, parameter_dtypes
from nemo_dllm.connectors.tied_head import absent_head, check_tied_head
from nemo_dllm.connectors.vocabulary_growth import GrownCheckpoint, grow_vocabulary

Checkpoint = HFCheckpoint | StackedExperts | GrownCheckpoint


class Assignment(NamedTuple):
    """A parameter of this process and what it is made of."""

    parameter: Tensor
    entry: Entry
    rank: TensorRank
    dimensions: ModelDimensions

    def hf_shapes(self) -> list[tuple[int, ...]]:
        """Full shapes of the Hugging Face tensors."""
        return self.entry.layout.hf_shapes(tuple(self.parameter.shape), self.rank.size, self.dimensions)


def load_hf_weights(
    model: nn.Module | Sequence[nn.Module],
    hf_path: str | Path,
    *,
    mask_init: str | None = None,
    keep_dtypes: bool = False,
) -> None:
    """Fill a built model with a Hugging Face checkpoint, in place.

    Args:
        model: a Megatron GPT (unwrapped), or the chunks of an interleaved pipeline stage.
        hf_path: folder of the checkpoint.
        mask_init: how to make the rows of tokens that the checkpoint lacks, see :class:`GrownCheckpoint`; with None a
            model that has more tokens is refused.
        keep_dtypes: give parameters the dtypes of the file first, see :func:`parameter_dtypes`, so that no value is
            rounded; expert biases stay fp32.

    Raises:
        FileNotFoundError, ValueError: see :class:`HFCheckpoint`.
        ValueError: where the model's configuration, parameters or shapes and the checkpoint do not agree, naming all
            that do not; nothing was written then.
    """
    chunks = _chunks(model)
    checkpoint = per_expert(HFCheckpoint(hf_path))
    family = find_family(checkpoint.config)
    config = chunks[0].config
    table = family.key_table(config)
    if mask_init is not None:
        vocab_size = _dimensions(chunks[0]).vocab_size
        checkpoint = grow_vocabulary(checkpoint, family, table, vocab_size, mask_init)
    check_fits_config(config, checkpoint.config, where=checkpoint.path)
    assignments, problems = _assign(chunks, table)
    problems += _differences(checkpoint, table, assignments)
    if len(problems) == 1:
        problems += absent_head(checkpoint.shapes, family, config)
    if problems:
        raise ValueError(f"{checkpoint.path} does not fit the model (family {family.name}):\n" + "\n".join(problems))
    check_tied_head(checkpoint, family, config)
    if keep_dtypes:
        _take_dtypes(assignments, checkpoint)
    with torch.no_grad():
        for a in assignments:
            read = partial(_read, checkpoint, a.entry.hf)
            a.parameter.copy_(a.entry.layout.read(read, tuple(a.parameter.shape), a.rank, a.dimensions))


def _take_dtypes(assignments: list[Assignment], checkpoint: Checkpoint) -> None:
    dtypes = parameter_dtypes([a.entry for a in assignments], checkpoint.dtypes.__getitem__)
    for a in assignments:
        if isinstance(a.parameter, nn.Parameter):  # Biases of experts are buffers.
            a.parameter.data = a.parameter.data.to(dtypes[a.entry.megatron[0]])


def _read(checkpoint: Checkpoint, names: tuple[str, ...], index: int, **part: slice) -> Tensor:
    return checkpoint.tensor(names[index], **part)


def export_hf_tensors(
    model: nn.Module | Sequence[nn.Module], *, dtypes: Mapping[str, torch.dtype] = MappingProxyType({})
) -> Iterator[tuple[str, Tensor]]:
    """The model's weights under their Hugging Face names, one after the other, on the CPU.

    With tensor parallelism every rank of the group must draw them all, and gets whole tensors; with pipeline and expert
    parallelism each rank yields its own layers and experts. Tied embeddings are one tensor; padding rows of the
    vocabulary stay behind.

    Args:
        model: as for :func:`load_hf_weights`.
        dtypes: of tensors, by name; those not named have the dtype of their parameter.

    Raises:
        ValueError: where parameters and key table do not agree, naming all that do not, before the first tensor.
    """
    return _written(_export_assignments(model), dtypes)


def hf_tensor_headers(
    model: nn.Module | Sequence[nn.Module], *, dtypes: Mapping[str, torch.dtype] = MappingProxyType({})
) -> dict[str, TensorHeader]:
    """Dtype and full shape of each tensor that :func:`export_hf_tensors`, which see, yields in this process."""
    return {
        name: TensorHeader(dtypes.get(name, a.parameter.dtype), tuple(shape))
        for a in _export_assignments(model)
        for name, shape in zip(a.entry.hf, a.hf_shapes(), strict=True)
    }


def _export_assignments(model: nn.Module | Sequence[nn.Module]) -> list[Assignment]:
    chunks = _chunks(model)
    family = family_of(chunks[0].config)
    assignments, problems = _assign(chunks, family.key_table(chunks[0].config))
    if problems:
        raise ValueError(f"the model is none of family {family.name}:\n" + "\n".join(problems))
    return assignments


def export_dtypes(model: nn.Module, dtype_of: Callable[[str], torch.dtype]) -> dict[str, torch.dtype]:
    """See :func:`exported_dtypes`; for ``dtypes`` of :func:`export_hf_tensors`."""
    return exported_dtypes([(a.entry, a.parameter) for a in _export_assignments(model)], dtype_of)


class OtherModelError(ValueError):
    """A configuration describes another model than a checkpoint's.

    Attributes:
        hf_config: content of the checkpoint's config.json.
        settings: what the configuration's fields would have to be; empty where it is of another family.
    """

    def __init__(self, message: str, hf_config: Mapping[str, Any], settings: Mapping[str, Any]):
        super().__init__(message)
        self.hf_config, self.settings = hf_config, settings


def check_fits_config(config, hf_config: Mapping[str, Any], where: Path) -> None:
    """Check that a NeMo configuration describes a checkpoint's model.

    Args:
        config: NeMo's configuration.
        hf_config: content of the checkpoint's config.json.
        where: the checkpoint, for the error.

    Raises:
        OtherModelError: for another family, or naming every field that differs.
    """
    family = find_family(hf_config)
    if family_of(config) is not family:
        message = (
            f"{where} is of family {family.name}, the model's configuration {type(config).__name__} of family "
            f"{family_of(config).name}; take {family.nemo_config().__name__}"
        )
        raise OtherModelError(message, hf_config, settings={})
    differences = family.config.differences(config, hf_config)
    if differences:
        listed = ", ".join(f"{name}={ours!r} (checkpoint: {theirs!r})" for name, (ours, theirs) in differences.items())
        message = f"the model's configuration contradicts the {CONFIG_FILE} of {where}: {listed}"
        raise OtherModelError(message, hf_config, {name: theirs for name, (_, theirs) in differences.items()})


def _written(assignments: list[Assignment], dtypes: Mapping[str, torch.dtype]) -> Iterator[tuple[str, Tensor]]:
    for a in assignments:
        tensors = a.entry.layout.write(_parts_of_all_ranks(a), a.dimensions)
        for name, tensor in zip(a.entry.hf, tensors, strict=True):
            dtype = dtypes.get(name, a.parameter.dtype)
            yield name, tensor.to("cpu", dtype, copy=True, memory_format=torch.contiguous_format)


def _parts_of_all_ranks(a: Assignment) -> list[Tensor]:
    part = a.parameter.detach()
    if a.rank.size == 1 or isinstance(a.entry.layout, Replicated):
        return [part]
    parts = [torch.empty_like(part) for _ in range(a.rank.size)]
    dist.all_gather(parts, part.contiguous(), group=placement.tensor_group(a.entry))
    return parts


def _assign(chunks: list[nn.Module], table: KeyTable) -> tuple[list[Assignment], list[str]]:
    """Give every parameter of this process its entry; what is left over on either side are problems."""
    assignments, unknown, absent = [], [], []
    for chunk in chunks:
        entries = placement.entries_of(chunk, table)
        entry_of = {name: entry for entry in entries for name in entry.megatron}
        parameters = placement.parameters_of(chunk)
        dimensions = _dimensions(chunk)
        for name, parameter in parameters.items():
            if name in entry_of:
                entry = entry_of[name]
                assignments.append(Assignment(parameter, entry, placement.tensor_rank(entry), dimensions))
            else:
                unknown.append(name)
        absent += [" or ".join(entry.megatron) for entry in entries if parameters.keys().isdisjoint(entry.megatron)]
    return assignments, _listed(
        {"parameters that no tensor of the checkpoint fills": unknown, "parameters that the model lacks": absent}
    )


def _differences(checkpoint: Checkpoint, table: KeyTable, assignments: list[Assignment]) -> list[str]:
    """Tensors that are absent, unknown or of another shape. The first two are checked for the whole model."""
    expected = {name for entry in table.entries() for name in entry.hf}
    unknown = []
    for name in checkpoint.shapes.keys() - expected:
        reason = table.reason_to_ignore(name)
        if reason is None:
            unknown.append(name)
        else:
            logging.info(f"{checkpoint.path}: {name} is not used: {reason}")
    wrong_shapes = [
        f"{name} is {list(checkpoint.shapes[name])}, the model needs {list(shape)}"
        for a in assignments
        for name, shape in zip(a.entry.hf, a.hf_shapes(), strict=True)
        if name in checkpoint.shapes and checkpoint.shapes[name] != tuple(shape)
    ]
    used = expected & checkpoint.shapes.keys()
    no_floats = [
        f"{name} ({checkpoint.dtypes[name]})" for name in used if not checkpoint.dtypes[name].is_floating_point
    ]
    return _listed(
        {
            "tensors that the checkpoint lacks": expected - checkpoint.shapes.keys(),
            "tensors that the model has no place for": unknown,
            "tensors of another shape": wrong_shapes,
            "tensors that are no floats": no_floats,
        }
    )


def _listed(problems: Mapping[str, Collection[str]]) -> list[str]:
    return [f"  {kind} ({len(names)}): {', '.join(sorted(names))}" for kind, names in problems.items() if names]


def _chunks(model: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    return [model] if isinstance(model, nn.Module) else list(model)


def _dimensions(chunk: nn.Module) -> ModelDimensions:
    config = chunk.config
    return ModelDimensions(
        heads=config.num_attention_heads,
        query_groups=config.num_query_groups,
        head_dim=config.kv_channels,
        vocab_size=getattr(chunk, "logical_vocab_size", chunk.vocab_size),
    )
