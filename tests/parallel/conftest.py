"""Pools of processes that import NeMo once and run one layout after another."""

import multiprocessing
import multiprocessing.connection
import runpy
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

    def run(self, function, timeout=300, **arguments):
        """Results of a function of layout_jobs.py on each rank."""
        self.jobs += 1
        job = str(self.folder / f"job{self.jobs}")
        torch.save((function, {"store": f"{job}.store", **arguments}), job)
        for pipe in self.pipes:
            pipe.send(job)
        answers = {}
        while len(answers) < self.ranks:
            ready = multiprocessing.connection.wait([pipe for pipe in self.pipes if pipe not in answers], timeout)
            try:
                answers |= {pipe: torch.load(pipe.recv(), weights_only=False) for pipe in ready}
            except EOFError:
                ready = []
            errors = [error for _, error in answers.values() if error]
            if errors or not ready:
                # A rank that failed leaves others waiting for it.
                self.close()
                pytest.fail("\n".join(errors) or "\n".join(map(self.console, range(self.ranks))))
        return [answers[pipe][0] for pipe in self.pipes]

    def console(self, rank):
        """The end of what a rank has printed."""
        return (self.folder / f"console{rank}").read_text()[-3000:]

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
