"""Megatron-FSDP: weights, gradients and optimizer state sharded over the data-parallel ranks."""

import functools

from megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp import MegatronFSDP
from nemo import lightning as nl

from nemo_dllm.collections.diffusion import cpu

WHOLE = "optim_grads_params"
"""Shards weights, gradients and optimizer state; what Megatron's ``no_shard``, its default, stands for here."""


def is_fully_sharded(strategy: nl.MegatronStrategy) -> bool:
    """Whether a strategy asks for Megatron-FSDP."""
    return getattr(strategy, "_fsdp", None) == "megatron"


def prepare_fully_sharded(strategy: nl.MegatronStrategy) -> None:
    """Turn on what ``fsdp='megatron'`` takes besides, so that it is the one field to set.

    NeMo sets a field of Megatron's that is no longer read, and leaves the sharding at none.
    """
    ddp = strategy.ddp_config
    ddp.use_megatron_fsdp = True
    if ddp.data_parallel_sharding_strategy == "no_shard":
        ddp.data_parallel_sharding_strategy = WHOLE
    ddp.overlap_grad_reduce = ddp.overlap_param_gather = True
    _call_hooks_of_the_root()
    if cpu.enable_cpu_runtime():
        cpu.prepare_fully_sharded()


@functools.cache
def _call_hooks_of_the_root() -> None:
    """Megatron-FSDP calls the whole model's ``forward``, past its hooks, and so would leave out embeddings in fp32.

    Without a mixed-precision wrapper around the model, nothing else tells it that a backward pass has begun.
    """

    def forward(self, *inputs, **named):
        self._replace_param_with_raw_if_needed()
        return self.module(*inputs, **named)

    MegatronFSDP.forward = forward
