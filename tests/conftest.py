"""Fixtures that tests of several rooms share."""

import pytest


@pytest.fixture(scope="session")
def single_process(tmp_path_factory):
    """A process group of one process over gloo with Megatron's parallel state, for building models without a trainer.

    On a machine without CUDA this switches the CPU runtime on, for the rest of the session.
    """
    import torch
    from megatron.core import parallel_state, tensor_parallel

    from nemo_dllm.collections.diffusion import cpu

    cpu.enable_cpu_runtime()
    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("process_group") / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
