"""Fixtures that tests of several rooms share."""

import pytest


@pytest.fixture(scope="session", name="single_process")
def megatron_on_one_process():
    """A process group of one process over gloo with Megatron's parallel state, for building models without a trainer.

    On a machine without CUDA this switches the CPU runtime on, for the rest of the session.
    """
    from megatron.core import tensor_parallel

    from nemo_dllm.collections.diffusion.single_process import single_process

    with single_process():
        tensor_parallel.model_parallel_cuda_manual_seed(1234)
        yield
