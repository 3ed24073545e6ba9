"""What a model sharded by Megatron-FSDP saves: the same checkpoint as in every other layout.

A rank holds some rows of each parameter (and of its moments). Each is written as what it is, a part of the whole
tensor under the name that it has everywhere, so nothing is gathered, and any layout can go on from it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.distributed import FullyShardedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
FORMAT = "fully_reshardable"
"""Megatron's name of the format of optimizer state in which each tensor stands under its parameter's name."""


class Part(NamedTuple):
    """Rows of a parameter, as far as they belong to one tensor of a checkpoint."""

    parameter: torch.nn.Parameter
    """The distributed one, which the optimizer knows."""
    rows: slice
    """Of the flattened local shard."""
    saved_dtype: torch.dtype
    """Of the model's weights; the shard itself is in fp32."""
    template: ShardedTensor
    """Without data: name and place in the whole."""
    prepended: int
    """Axes of the whole that the parameter has not, as that of the layers."""

    def of(self, local: Tensor, prefix: str = "") -> ShardedTensor:
        """These rows of a shard, a view, under the parameter's name after ``prefix``."""
        data = local.view(-1)[self.rows].view(self.template.local_shape)
        fields = vars(self.template) | {"key": prefix + self.template.key, "data": data, "dtype": data.dtype}
        return ShardedTensor(**fields)


def sharded_model_state(chunk: FullyShardedDataParallel, metadata: dict | None = None) -> dict:
    """State of a model chunk for Megatron's distributed checkpoints, weights in the model's own precision."""
    state, parts = _state_and_parts(chunk, metadata)
    for number, part in enumerate(parts):
        state[f"part {number}"] = part.of(_local(part.parameter).to(part.saved_dtype))
    return state


def load_model_state(chunk: FullyShardedDataParallel, loaded: dict) -> None:
    """Take in what was loaded into :func:`sharded_model_state`."""
    state, parts = _state_and_parts(chunk)
    for key, value in state.items():
        if isinstance(value, ShardedTensor) and key in loaded:
            value.data.copy_(loaded[key])
    for number, part in enumerate(parts):
        _local(part.parameter).view(-1)[part.rows].copy_(loaded[f"part {number}"].flatten())
    chunk.param_and_grad_buffer.copy_main_weights_to_model_weights()


def sharded_optimizer_state(chunk: FullyShardedDataParallel, optimizer: MegatronOptimizer) -> dict:
    """State of an optimizer, as the distributed optimizer saves its own: two optimizers for a model with experts."""
    _, parts = _state_and_parts(chunk)
    inner = optimizer.optimizer
    tensors = {}
    for number, part in enumerate(parts):
        states = {"param": _local(part.parameter)}
        states |= {name: _local(inner.state[part.parameter][name]) for name in MOMENTS}
        tensors[number] = {name: part.of(value, prefix=f"optimizer.state.{name}.") for name, value in states.items()}
    groups = [{key: value for key, value in group.items() if key != "params"} for group in inner.param_groups]
    step = max((group.get("step", 0) for group in groups), default=0)
    common = {"param_state_sharding_type": FORMAT}
    if optimizer.grad_scaler:
        common["grad_scaler"] = optimizer.grad_scaler.state_dict()

    def groups_of(experts: bool) -> dict:
        return {"param_groups": [group | {"step": int(step), "is_expert_parallel": experts} for group in groups]}

    dense = common | {"optimizer": groups_of(False), "param_state": tensors}
    if not chunk.config.num_moe_experts:
        return dense
    return {0: dense, 1: common | {"optimizer": groups_of(True), "param_state": {}}}


def load_optimizer_state(chunk: FullyShardedDataParallel, optimizer: MegatronOptimizer, loaded: dict) -> None:
    """Take in what was loaded into :func:`sharded_optimizer_state`, whichever layout has saved it."""
    _, parts = _state_and_parts(chunk)
    inner = optimizer.optimizer
    dense = loaded.get(0, loaded)
    for number, part in enumerate(parts):
        states = dense["param_state"][number]
        _local(part.parameter).view(-1)[part.rows].copy_(states["param"].flatten())
        for name in MOMENTS:
            _local(inner.state[part.parameter][name]).view(-1)[part.rows].copy_(states[name].flatten())
    chunk.param_and_grad_buffer.copy_main_weights_to_model_weights()
    saved = {_kind(group): group for group in dense["optimizer"]["param_groups"]}
    for group in inner.param_groups:
        group |= {key: value for key, value in saved[_kind(group)].items() if key != "params"}
    if optimizer.grad_scaler and "grad_scaler" in dense:
        optimizer.grad_scaler.load_state_dict(dense["grad_scaler"])


def gradient_parts(chunk: FullyShardedDataParallel) -> list[ShardedTensor]:
    """This rank's parts of the gradients after a backward pass, named and placed as the weights in a checkpoint."""
    shards = []
    for part in _state_and_parts(chunk)[1]:
        shard = part.of(_local(part.parameter.grad))
        shard.prepend_axis_num, shard.local_shape = part.prepended, shard.local_shape[part.prepended :]
        shard.data = shard.data.view(shard.local_shape)
        shards.append(shard)
    return shards


def _kind(group: dict) -> tuple:
    """What tells parameter groups apart; NeMo's schedulers rename the two multipliers."""
    return tuple(group.get(f"pre_{key}", group.get(key)) for key in ("wd_mult", "lr_mult"))


def _local(tensor: Tensor) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor).detach()


def _state_and_parts(chunk: FullyShardedDataParallel, metadata: dict | None = None) -> tuple[dict, list[Part]]:
    """What a chunk saves beside its parameters, by name, and this rank's parts of the parameters."""
    with _without_storage(chunk) as parameters:
        core = chunk.module.module
        while hasattr(core, "module"):
            core = core.module
        state = core.sharded_state_dict(prefix="module.", metadata=metadata)
        apply_factories(state)
        tensors = {key: [value] if isinstance(value, ShardedTensor) else value for key, value in state.items()}
    pieces, rest = [], {}
    for key, values in tensors.items():
        # Factories make several tensors of a parameter; buffers, and objects, are as they are.
        values = list(nested_values(values)) if isinstance(values, dict | list) else []
        if values and values[0].data.is_meta:
            pieces += values
        else:
            rest[key] = state[key]
    return rest, [part for piece in pieces if (part := _part_of(piece, parameters)) is not None]


@contextmanager
def _without_storage(chunk: FullyShardedDataParallel) -> Iterator[dict[int, torch.nn.Parameter]]:
    """Let the modules hold parameters of the sizes that they had before sharding, without memory.

    Yields:
        The distributed parameters by the storage of those that stand for them.
    """
    fsdp = chunk.module
    fsdp._replace_param_with_distributed_if_needed()
    stand_ins, by_storage = {}, {}
    places = []
    for module in fsdp.module.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if parameter not in stand_ins:
                original = parameter.orig_param
                stand_in = torch.nn.Parameter(torch.empty(original.shape, dtype=original.dtype, device="meta"))
                stand_ins[parameter] = stand_in
                by_storage[stand_in.untyped_storage()._cdata] = parameter
            places.append((module, name, parameter))
            module._parameters[name] = stand_ins[parameter]
    try:
        yield by_storage
    finally:
        for module, name, parameter in places:
            module._parameters[name] = parameter


def _part_of(piece: ShardedTensor, parameters: dict[int, torch.nn.Parameter]) -> Part | None:
    """The rows of ``piece``, a view of a stand-in, that this rank holds; None where it holds none."""
    parameter = parameters[piece.data.untyped_storage()._cdata]
    shard = parameter.megatron_fsdp_slice
    first, numel = piece.data.storage_offset(), piece.data.numel()
    start, stop = max(first, shard.start), min(first + numel, shard.stop)
    if start >= stop:
        return None
    assert piece.data.is_contiguous()
    row = numel // piece.data.size(0)
    assert (start - first) % row == 0 and (stop - first) % row == 0
    prepended = piece.prepend_axis_num
    offset = list(piece.global_offset)
    offset[prepended] += (start - first) // row
    replica = piece.replica_id
    template = ShardedTensor(
        key=piece.key,
        data=None,
        dtype=piece.dtype,
        local_shape=(*[1] * prepended, (stop - start) // row, *piece.data.shape[1:]),
        global_shape=piece.global_shape,
        global_offset=tuple(offset),
        # Shards of any height.
        axis_fragmentations=None,
        # Other data-parallel ranks hold other rows.
        replica_id=(*replica[:-1], 0) if isinstance(replica, tuple) else 0,
    )
    return Part(parameter, slice(start - shard.start, stop - shard.start), piece.dtype, template, prepended)
