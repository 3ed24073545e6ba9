"""Megatron-FSDP: weights, gradients and optimizer state sharded over the data-parallel ranks."""

import functools
from functools import partial

from megatron.core.distributed import FullyShardedDataParallel
from megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp import MegatronFSDP
from nemo import lightning as nl

from nemo_dllm.collections.diffusion import cpu
from nemo_dllm.collections.diffusion.models.fsdp_state import (
    FORMAT,
    load_model_state,
    load_optimizer_state,
    sharded_model_state,
    sharded_optimizer_state,
)
from nemo_dllm.collections.diffusion.models.saving import fill_optimizer_state

WHOLE = "optim_grads_params"
"""Shards weights, gradients and optimizer state; what Megatron's ``no_shard``, its default, stands for here."""


def is_fully_sharded(strategy: nl.MegatronStrategy) -> bool:
    """Whether a strategy asks for Megatron-FSDP."""
    return getattr(strategy, "_fsdp", None) == "megatron"


def check_distributed_optimizer(in_use: bool) -> None:
    """Check that the optimizer under Megatron-FSDP is the distributed one.

    Raises:
        ValueError: where it is not.
    """
    if not in_use:
        raise ValueError(
            "trainer.strategy.fsdp='megatron' shards the state of the distributed optimizer, but "
            "optim.config.use_distributed_optimizer=False; set it to True"
        )


def prepare_fully_sharded(strategy: nl.MegatronStrategy) -> None:
    """Turn on what ``fsdp='megatron'`` takes besides, so that it is the one field to set.

    NeMo sets a field of Megatron's that is no longer read, and leaves the sharding at none.

    Raises:
        ValueError: without the distributed optimizer.
    """
    ddp = strategy.ddp_config
    check_distributed_optimizer(ddp.use_distributed_optimizer)
    strategy.__class__ = FullyShardedStrategy
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


class FullyShardedStrategy(nl.MegatronStrategy):
    """NeMo's strategy whose Megatron-FSDP saves and loads the checkpoints of all other layouts."""

    @property
    def sharded_state_dict_metadata(self) -> dict:
        """How optimizer state is laid out in a checkpoint."""
        return super().sharded_state_dict_metadata | {"distrib_optim_sharding_type": FORMAT}

    def save_checkpoint(self, checkpoint, filepath, storage_options=None) -> None:
        """As NeMo's, which would first gather all weights on every rank."""
        self._name_parts()
        self.ddp_config.overlap_param_gather = False
        try:
            super().save_checkpoint(checkpoint, filepath, storage_options)
        finally:
            self.ddp_config.overlap_param_gather = True

    def load_checkpoint(self, checkpoint_path, selective_restore: bool = False) -> dict:
        """As NeMo's."""
        self._name_parts()
        return super().load_checkpoint(checkpoint_path, selective_restore)

    def load_model_state_dict(self, checkpoint, strict: bool = True) -> None:
        """Take in the weights of this rank's shards."""
        load_model_state(self._chunk, checkpoint["state_dict"])

    def optimizer_sharded_state_dict(self, is_loading: bool = False, metadata: dict | None = None) -> dict:
        """See :mod:`fsdp_state`."""
        optimizer = self.optimizers[0].mcore_optimizer
        fill_optimizer_state(optimizer)
        return sharded_optimizer_state(self._chunk, optimizer)

    def load_optimizer_state_dict(self, checkpoint, selective_restore: bool = False) -> None:
        """Take in the optimizer state of this rank's shards."""
        if self.should_restore_optimizer_states(selective_restore=selective_restore):
            load_optimizer_state(self._chunk, self.optimizers[0].mcore_optimizer, checkpoint["optimizer"][0])

    @property
    def _chunk(self) -> FullyShardedDataParallel:
        """The whole model: there are no pipeline stages."""
        (chunk,) = self.megatron_parallel
        return chunk.module

    def _name_parts(self) -> None:
        """In place of NeMo's own naming, which no other layout can read."""
        self._chunk.sharded_state_dict = partial(sharded_model_state, self._chunk)
