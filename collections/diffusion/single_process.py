"""Megatron on this process alone, for everything that needs a model but no trainer: conversion, sampling, tests."""

import atexit
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from megatron.core import parallel_state

from nemo_dllm.collections.diffusion import cpu


@contextmanager
def single_process() -> Iterator[None]:
    """Megatron's parallel state over this process alone, over gloo; one that exists is used and kept.

    On a machine without CUDA this switches the CPU runtime on, for the rest of the process.

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
                f"this needs a whole model in one process; here tensor and pipeline parallel sizes are {sizes}"
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


def start_single_process() -> None:
    """As :func:`single_process`, to the end of the process; calling it twice is the same as calling it once."""
    stack = ExitStack()
    stack.enter_context(single_process())
    atexit.register(stack.close)
