"""Pools of processes that import NeMo once and run one layout after another."""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import runpy
import signal
import time
from pathlib import Path

import pytest
import torch

WORKER = Path(__file__).with_name("worker.py")

# Process groups that something still holds keep their threads, some hundred for each job; forks are cheap.
JOBS_OF_A_PROCESS = 8


class Pool:
    """``ranks`` processes, each of which does the same jobs in the same order."""

    def __init__(self, context, ranks, folder):
        self.ranks, self.folder, self.jobs = ranks, folder, 0
        self.pipes, self.processes = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            arguments = (str(WORKER), {"job": (theirs, rank, ranks, str(folder / f"console{rank}"))}, "__main__")
            self.processes.append(context.Process(target=runpy.run_path, args=arguments, daemon=True))
            self.processes[-1].start()
            theirs.close()
            self.pipes.append(ours)

    def run(self, function, timeout=300, module="layout_jobs", **arguments):
        """Results of a function of a file of this folder on each rank.

        Fails with the tracebacks of the ranks that raised; where none did, with where all of them are.
        """
        self.jobs += 1
        job = str(self.folder / f"job{self.jobs}")
        torch.save((module, function, {"store": f"{job}.store", **arguments}), job)
        for pipe in self.pipes:
            # A rank that has ended since its last answer is found out below.
            with contextlib.suppress(BrokenPipeError):
                pipe.send(job)
        answers, errors, has_ended = {}, [], False
        while len(answers) < self.ranks:
            ready = multiprocessing.connection.wait([pipe for pipe in self.pipes if pipe not in answers], timeout)
            for pipe in ready:
                try:
                    answers[pipe], error = torch.load(pipe.recv(), weights_only=False)
                    errors += [error] if error else []
                except (EOFError, ConnectionResetError):
                    has_ended = True
            if errors or has_ended or not ready:
                # A rank that failed leaves others waiting for it.
                silent = [rank for rank, pipe in enumerate(self.pipes) if pipe not in answers]
                fates = [self.fate(rank) for rank in silent]
                self.close()
                told = [fate for fate, ended in fates if ended or not errors]
                late = [] if ready else [f"No answer within {timeout} seconds."]
                pytest.fail("\n".join(errors + late + told))
        return [answers[pipe] for pipe in self.pipes]

    def fate(self, rank):
        """What has become of a rank that does not answer, with the end of its console, and whether it has ended.

        One that runs is asked for the tracebacks of its threads.
        """
        process = self.processes[rank]
        console = self.folder / f"console{rank}"
        # Whoever waited for a rank that died may be told before it is reaped.
        process.join(2)
        if process.exitcode is not None:
            code = process.exitcode
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            return f"Rank {rank} {how}:\n{self.console(rank)}", True
        size = console.stat().st_size
        os.kill(process.pid, signal.SIGUSR1)
        end = time.monotonic() + 30
        while b"most recent call first" not in console.read_bytes()[size:] and time.monotonic() < end:
            time.sleep(0.1)
        # The rest follows at once.
        time.sleep(0.5)
        return f"Rank {rank} goes on:\n{self.console(rank)}", False

    def console(self, rank):
        """The end of what a rank has printed, without the list of some hundred modules that ends a crash."""
        lines = (self.folder / f"console{rank}").read_text(errors="replace").splitlines()
        return "\n".join(line for line in lines if not line.startswith("Extension modules: "))[-6000:]

    def close(self):
        """Ends the processes, at once: they hold nothing."""
        for process in self.processes:
            process.kill()
        self.processes = []


@pytest.fixture(scope="session")
def pools(forks, tmp_path_factory):
    """Pools by their number of processes, started when first asked for."""
    started = {}

    def pool(ranks):
        if ranks in started and started[ranks].jobs >= JOBS_OF_A_PROCESS:
            started[ranks].close()
        if ranks not in started or not started[ranks].processes:
            started[ranks] = Pool(forks, ranks, tmp_path_factory.mktemp(f"pool{ranks}"))
        return started[ranks]

    yield pool
    for each in started.values():
        each.close()


@pytest.fixture
def start_pool(forks, tmp_path):
    """Starts a pool of a number of processes for one test."""
    started = []

    def pool(ranks):
        started.append(Pool(forks, ranks, tmp_path))
        return started[-1]

    yield pool
    for each in started:
        each.close()


@pytest.fixture(scope="session")
def check_sizes():
    """``check_layout`` of a tiny recipe with edits, on 12 devices."""
    import fiddle as fdl

    from nemo_dllm.collections.diffusion.models.layout import check_layout
    from nemo_dllm.recipes.tiny import bd3lm_tiny, mdlm_tiny

    def run(strategy, edits):
        recipe = (bd3lm_tiny if "model.objective.block_size" in edits else mdlm_tiny)()
        recipe.trainer.devices = 12
        recipe.data.micro_batch_size, recipe.data.global_batch_size = 1, 24
        for field, value in {
            **{f"trainer.strategy.{name}": value for name, value in strategy.items()},
            **edits,
        }.items():
            *path, name = field.split(".")
            target = recipe
            for part in path:
                target = getattr(target, part)
            setattr(target, name, value)
        model, data, trainer = (fdl.build(getattr(recipe, part)) for part in ("model", "data", "trainer"))
        check_layout(model.config, model.objective, trainer, data)

    return run
