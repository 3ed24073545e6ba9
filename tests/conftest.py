"""Fixtures that tests of several rooms share."""

import multiprocessing
import multiprocessing.forkserver

import pytest

# A test process has one server to fork from, so one list serves all tests.
PRELOADED = [
    "nemo_dllm.recipes",
    "nemo_dllm.cli.main",
    "nemo_dllm.collections.diffusion.inference",
    "nemo_dllm.connectors.hf_export",
]


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


@pytest.fixture(scope="session")
def forks():
    """Processes forked from one that has imported NeMo, for runs that need torch.distributed to themselves.

    They see no CUDA device: what they show must hold bit for bit, and two ranks need no two devices. What still runs in
    the end is killed, or pytest would wait for it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("CUDA_VISIBLE_DEVICES", "")
        multiprocessing.forkserver.ensure_running()
    yield context
    for process in multiprocessing.active_children():
        process.kill()
