"""Where recipes run: torchrun on this machine, or jobs of a Slurm cluster, through nemo_run's executors.

Nodes and GPUs are those of the recipe's trainer: :class:`FitToTrainer` sees to that, on the command line unasked.
"""

import os
import signal
import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import nemo_run as run
import psutil
from nemo.collections import llm
from nemo_run.core.execution.launcher import Torchrun

from nemo_dllm.recipes.tasks import finetune, pretrain

GRACE_SECONDS = 300
"""Before its time limit, in which a Slurm job finishes a step and saves."""

ENVIRONMENT = {
    # Memory of tensors that NCCL works on is free again at once.
    "TORCH_NCCL_AVOID_RECORD_STREAMS": "1",
    # Kernels start in the order in which Megatron overlaps them with communication.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    # Seconds that torchrun gives its processes after SIGTERM; without it they have 30 for a step and a checkpoint.
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(GRACE_SECONDS),
}

PASSED_ON: list[int] = []
"""Signals that this process has passed on to those that it waits for."""


@run.cli.factory
def local() -> run.Config[run.LocalExecutor]:
    """Processes on this machine, one per device of the recipe's trainer, started by torchrun.

    Examples:
        ``nemo llm pretrain --factory mdlm_tiny trainer.devices=2 run.executor=local --yes``
    """
    return run.Config(run.LocalExecutor, launcher="torchrun", env_vars=dict(ENVIRONMENT))


@run.cli.factory
def slurm() -> run.Config[run.SlurmExecutor]:
    """A job of a Slurm cluster, one process per GPU of the recipe's trainer, started by srun.

    ``account`` has to be set; ``partition``, ``time``, ``container_image`` and so on are fields of ``SlurmExecutor``.
    The job gets SIGTERM five minutes before its time is over, saves, and is queued again, ``retries`` times.

    Examples:
        ``nemo llm pretrain --factory "llama31_70b_mdlm_pretrain(dir='/shared/runs')" run.executor=slurm
        run.executor.account=research run.executor.partition=gpu run.executor.time=04:00:00 --yes``
    """
    return run.Config(
        run.SlurmExecutor,
        time="04:00:00",
        signal=f"TERM@{GRACE_SECONDS}",
        retries=3,
        exclusive=True,
        env_vars=dict(ENVIRONMENT),
        # The package is installed where the job runs.
        packager=run.Config(run.Packager),
    )


@dataclass(kw_only=True)
class FitToTrainer(run.Plugin):
    """Gives a Slurm or local executor the nodes and processes, and the environment, that a recipe's trainer asks for.

    From Python: ``run.run(recipe, executor=executor, plugins=FitToTrainer())``.
    """

    def setup(self, task: run.Partial | run.Script, executor: run.Executor) -> None:
        """Set nodes, tasks and GPUs of the executor; tasks of others and other executors stay as they are.

        Ctrl-C and SIGTERM reach processes of a local executor from then on.

        Raises:
            ValueError: for devices whose number is unknown here, and a folder that no later job would find.
        """
        if not isinstance(task, run.Partial) or task.__fn_or_cls__ not in (pretrain, finetune):
            return
        devices = number_of_devices(task.trainer)
        if getattr(task.trainer.strategy, "fsdp", None) == "megatron":
            # One connection would keep weights from being gathered while others compute.
            executor.env_vars.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
        if isinstance(executor, run.LocalExecutor):
            executor.nodes, executor.ntasks_per_node = task.trainer.num_nodes, devices
            _pass_signals_on()
        elif isinstance(executor, run.SlurmExecutor):
            _check_folder(task.log.log_dir)
            _fit_slurm(executor, task.trainer.num_nodes, devices)


def number_of_devices(trainer: run.Config) -> int:
    """Devices per node.

    Args:
        trainer: configuration of a trainer.

    Raises:
        ValueError: where it is not known before the run.
    """
    devices = trainer.devices
    if isinstance(devices, str):
        # So the command line reads "8", and Lightning takes it for 8.
        devices = devices.split(",") if "," in devices else int(devices) if devices.isdecimal() else devices
    if isinstance(devices, list | tuple):
        return len(devices)
    if not isinstance(devices, int) or devices < 1:
        raise ValueError(f"trainer.devices={devices!r} is a number only where the GPUs are; set the number per node")
    return devices


def _pass_signals_on() -> None:
    """Let what ends this process end the processes that nemo_run starts, which it waits for.

    They are sessions of their own: no terminal reaches them, and they would train on.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        before = signal.getsignal(number)
        if before is not signal.SIG_IGN:
            signal.signal(number, partial(_pass_on, before))


def _pass_on(before, number: int, frame: object) -> None:
    launched = False
    for child in psutil.Process().children():
        with suppress(ProcessLookupError):
            if os.getsid(child.pid) == child.pid:
                os.kill(child.pid, number)
                launched = True
    if launched:
        PASSED_ON.append(number)
    else:
        signal.signal(number, before)
        signal.raise_signal(number)


def _fit_slurm(executor: run.SlurmExecutor, nodes: int, devices: int) -> None:
    executor.nodes = nodes
    if executor.gres is None:
        executor.gpus_per_node = devices
    if executor.launcher == "torchrun" or isinstance(executor.launcher, Torchrun):
        # One task per node, which starts the others.
        executor.ntasks_per_node, executor.torchrun_nproc_per_node = 1, devices
    else:
        executor.ntasks_per_node = devices


def _check_folder(folder: str | Path | None) -> None:
    if folder is None or not Path(folder).is_absolute():
        raise ValueError(
            f"log.log_dir={folder} lies in a folder of this job alone, and the next one would start anew; name an "
            "absolute path that all nodes see: dir='/shared/runs'"
        )


for _task in (llm.pretrain, llm.finetune):
    _task.cli_entrypoint.default_plugins = [run.Config(FitToTrainer)]
