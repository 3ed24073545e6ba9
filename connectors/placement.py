"""Which part of a model this process holds: layers, experts and slices, under their names in a single-process model."""

import re

import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from nemo_dllm.connectors.key_table import Entry, KeyTable, TensorRank

_LAYER = re.compile(r"^decoder\.layers\.(\d+)")
# Megatron's own layers keep experts as modules, Transformer Engine's as numbered weights of one grouped layer.
_EXPERT = re.compile(r"(?<=\.mlp\.experts\.)(local_experts\.|linear_fc[12]\.(?:weight|bias))(\d+)")


def parameters_of(chunk: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers of a Megatron GPT, without Transformer Engine's ``_extra_state``.

    Layers and experts, which every process counts from 0, count through the whole model.
    """
    first_expert = min(_experts(chunk), default=0)

    def global_name(name: str) -> str:
        name = _LAYER.sub(lambda m: f"decoder.layers.{chunk.decoder.layers[int(m[1])].layer_number - 1}", name)
        return _EXPERT.sub(lambda m: f"{m[1]}{int(m[2]) + first_expert}", name)

    return {
        global_name(name): value
        for name, value in chunk.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor) and not name.endswith("_extra_state")
    }


def entries_of(chunk: nn.Module, table: KeyTable) -> list[Entry]:
    """The entries of a key table whose parameters a Megatron GPT must have."""
    layers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
    return [
        entry for entry in table.entries(layers, _experts(chunk)) if any(_held(chunk, name) for name in entry.megatron)
    ]


def tensor_rank(entry: Entry) -> TensorRank:
    """Which slice of an entry's parameter this process holds."""
    if entry.of_expert:
        return TensorRank(
            parallel_state.get_expert_tensor_parallel_rank(), parallel_state.get_expert_tensor_parallel_world_size()
        )
    return TensorRank(
        parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    )


def tensor_group(entry: Entry) -> dist.ProcessGroup:
    """The processes that hold the slices of an entry's parameter."""
    if entry.of_expert:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def _experts(chunk: nn.Module) -> range:
    ranks = parallel_state.get_expert_model_parallel_world_size()
    count = (chunk.config.num_moe_experts or 0) // ranks
    first = parallel_state.get_expert_model_parallel_rank() * count
    return range(first, first + count)


def _held(chunk: nn.Module, name: str) -> bool:
    """Whether this pipeline stage has a parameter; its layers are chosen already."""
    if name.startswith("decoder.layers."):
        return True
    return chunk.pre_process if name.startswith("embedding.") else chunk.post_process
