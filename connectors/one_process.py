"""Megatron on one process and the CPU, for converting checkpoints, with or without CUDA in the machine."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from megatron.core import parallel_state, tensor_parallel
from nemo.lightning import _strategy_lib

from ..collections.diffusion import cpu
from ..collections.diffusion.models.model import DiffusionModel


@contextmanager
def one_process() -> Iterator[None]:
    """Megatron's parallel state over this process alone; one that exists is used and kept.

    Raises:
        ValueError: where the existing one splits models.
    """
    cpu.enable_cpu_runtime()
    if parallel_state.is_initialized():
        sizes = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
        )
        if sizes != (1, 1):
            raise ValueError(
                f"checkpoints are converted on one process; here tensor and pipeline parallel sizes are {sizes}"
            )
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        store = torch.distributed.FileStore(f"{folder}/store", 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()


def build_on_cpu(model: DiffusionModel) -> None:
    """Build the model with undefined weights: all are read from a checkpoint."""
    if not tensor_parallel.get_cuda_rng_tracker().is_initialized():
        tensor_parallel.model_parallel_cuda_manual_seed(model.objective.seed)
    model.config.perform_initialization = False
    with _strategy_lib.megatron_cpu_init_context(model.config):
        model.configure_model()
