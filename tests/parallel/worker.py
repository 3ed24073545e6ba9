"""A process of a pool: waits for jobs at its end of a pipe, and joins the other processes anew for each.

Jobs and answers are files, whose names go through the pipe.
NeMo and Megatron are imported once; process groups, Megatron's parallel state and the like begin anew with each job.
"""

import faulthandler
import functools
import gc
import importlib.util
import os
import signal
import sys
import traceback
from pathlib import Path

import torch


@functools.cache
def module_of(name):
    """A file of this folder; not imported by name, as tests are no package."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    # Checkpoints name the classes of callbacks.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def forget_the_last_job():
    from megatron.core import num_microbatches_calculator, parallel_state, tensor_parallel

    if torch.distributed.is_initialized():
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
        # Models and optimizers hold process groups, in cycles, and each of these has threads.
        gc.collect()
    num_microbatches_calculator.unset_num_microbatches_calculator()
    tensor_parallel.get_cuda_rng_tracker().reset()


def main(pipe, rank, ranks, console):
    """Runs jobs (file, function, arguments) and answers each with (result, None) or (None, traceback).

    Where its threads are goes to the console when it crashes, and when it gets SIGUSR1.
    """
    output = os.open(console, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable(output)
    faulthandler.register(signal.SIGUSR1, output)
    torch.set_num_threads(1)
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", RANK=str(rank), WORLD_SIZE=str(ranks))
    while True:
        job = pipe.recv()
        try:
            module, function, arguments = torch.load(job, weights_only=False)
            answer = getattr(module_of(module), function)(rank=rank, ranks=ranks, **arguments), None
        except BaseException:
            answer = None, traceback.format_exc()
        torch.save(answer, f"{job}.{rank}")
        pipe.send(f"{job}.{rank}")
        forget_the_last_job()


if __name__ == "__main__":
    main(*job)  # noqa: F821
