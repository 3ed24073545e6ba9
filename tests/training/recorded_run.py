"""One run of a tiny recipe as the global ``job`` asks, a dict; what it did is a JSON file of each rank.

Keys of a record: ``losses``, ``samples`` and ``rates`` by step; ``validations``, a list of (step, metrics);
``train``, a list of (step, metrics logged last); ``start``, the step; ``epoch``, the number of the last one;
``validation_tokens`` and ``validation_bytes``. The console is in ``console`` and the rank's number.
``folder`` is one for all ranks, or a list of one for each; ``launched`` says that torchrun has started the ranks.
"""

import inspect
import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import fiddle as fdl
import lightning.pytorch as pl
import nemo_run as run
import psutil
import torch
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from nemo.lightning import MegatronStrategy, ModelCheckpoint
from nemo.lightning.io.pl import TrainerContext

from nemo_dllm.collections.diffusion.models.lora import LoRA
from nemo_dllm.collections.diffusion.training.metrics import DiffusionMetrics
from nemo_dllm.recipes import tiny
from nemo_dllm.recipes.builder import set_precision
from nemo_dllm.recipes.tasks import finetune


class Recorder(pl.Callback):
    """Writes the record after every step, so that it outlives a kill."""

    def __init__(self, file, killed_after, killed_by):
        self.file, self.killed_after, self.killed_by, self.drawn = file, killed_after, killed_by, []
        self.record = {"losses": {}, "samples": {}, "rates": {}, "validations": [], "train": []}
        self.write()

    def watch(self, objective):
        """Note the sample indices that training draws noise for."""
        corrupt = objective.corrupt

        def noted(tokens_BL, loss_mask_BL, sample_index_B, *, validation, **given):
            if not validation:
                self.drawn += sample_index_B.tolist()
            return corrupt(tokens_BL, loss_mask_BL, sample_index_B, validation=validation, **given)

        objective.corrupt = noted

    def on_train_start(self, trainer, pl_module):
        self.record["start"] = trainer.global_step
        self.record["validation_tokens"] = trainer.datamodule.num_validation_tokens
        self.record["validation_bytes"] = trainer.datamodule.num_validation_bytes

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.killed_after:
            for number in self.killed_by:
                # A terminal interrupts all processes.
                for child in psutil.Process().children() if number == signal.SIGINT else ():
                    child.send_signal(number)
                os.kill(os.getpid(), number)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        step = trainer.global_step
        self.record["losses"][step] = outputs["loss"].item()
        self.record["samples"][step] = self.drawn
        self.record["rates"][step] = trainer.optimizers[0].param_groups[0]["lr"]
        self.drawn = []
        self.note(trainer, "train")
        self.record["epoch"] = trainer.current_epoch
        self.write()

    def on_validation_end(self, trainer, pl_module):
        self.note(trainer, "validation")
        self.record["epoch"] = trainer.current_epoch
        self.write()

    def note(self, trainer, phase):
        metrics = {name: value for name, value in latest(trainer).items() if name.startswith(f"{phase}/")}
        self.record["train" if phase == "train" else "validations"].append((trainer.global_step, metrics))

    def write(self):
        self.file.write_text(json.dumps(self.record))


def latest(trainer):
    return next(callback.latest for callback in trainer.callbacks if isinstance(callback, DiffusionMetrics))


def edit(recipe, field, value):
    *path, name = field.split(".")
    for part in path:
        recipe = getattr(recipe, part)
    setattr(recipe, name, value)


def interrupt_saves_after(step, times, trainer):
    """Ctrl-C at the run and at whoever writes a file of a checkpoint, as all processes of a terminal get it."""
    write, run_process = FileSystemWriterAsync.write_preloaded_data, os.getpid()
    # Writers are processes of their own.
    done = multiprocessing.Value("b", 0)

    def interrupted(*arguments, **named):
        if trainer.global_step >= step and not done.value:
            done.value = 1
            for _ in range(times):
                for process in {run_process, os.getpid()}:
                    os.kill(process, signal.SIGINT)
                time.sleep(0.5)
        return write(*arguments, **named)

    FileSystemWriterAsync.write_preloaded_data = staticmethod(interrupted)


def kill_save_after(step, point, trainer):
    """SIGKILL to this process in the middle of saving a checkpoint, where ``point`` says."""
    owner, name, late = POINTS[point]
    function = getattr(owner, name)

    def killed(*arguments, **named):
        result = function(*arguments, **named) if late or trainer.global_step < step else None
        if trainer.global_step >= step:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    static = isinstance(inspect.getattr_static(owner, name), staticmethod)
    setattr(owner, name, staticmethod(killed) if static else killed)


def look_late(seconds):
    """Let this rank look into the folder of checkpoints later than the others."""
    look = ModelCheckpoint._saved_checkpoint_paths.fget

    def late(callback):
        time.sleep(seconds)
        return look(callback)

    ModelCheckpoint._saved_checkpoint_paths = property(late)


# What is about to happen, or has just happened.
POINTS = {
    "no file": (FileSystemWriterAsync, "write_preloaded_data", False),
    "one file of several": (FileSystemWriterAsync, "write_preloaded_data", True),
    "no index": (FileSystemWriterAsync, "finish", False),
    "no metadata.json": (serialization, "save_config", False),
    "no context": (TrainerContext, "io_dump", False),
    "marker": (ModelCheckpoint, "remove_checkpoint_unfinished_marker", False),
    "removal": (MegatronStrategy, "remove_checkpoint", True),
}


def main(
    folder, records, rank, ranks, killed_after, precision, factory, edits,
    killed_by=(signal.SIGKILL,), killed_rank=None, interrupted_save=None, killed_save=None, launched=False,
    lora_from=None, late_rank=None,
):  # fmt: skip
    if launched:
        rank = int(os.environ["RANK"])
    console = os.open(f"{records}/console{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(console, 1)
    os.dup2(console, 2)
    # A test's captured output is not this process's.
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    torch.set_num_threads(1)
    # A background process of a shell, and so of a test, ignores Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if not launched:
        os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", RANK=str(rank), WORLD_SIZE=str(ranks))
    recipe = getattr(tiny, factory)(dir=folder if isinstance(folder, str) else folder[rank])
    if lora_from is not None:
        adapters = {"peft": run.Config(LoRA, dim=4), "init_from": lora_from}
        recipe = run.Partial(finetune, **recipe.__arguments__, **adapters)
    set_precision(recipe, precision)
    for field, value in edits.items():
        edit(recipe, field, value)
    built = fdl.build(recipe)
    trainer = built.keywords["trainer"]
    if not launched:
        trainer.strategy.store = torch.distributed.FileStore(f"{records}/store", ranks)
    if rank == late_rank:
        look_late(3)
    if killed_rank not in (None, rank):
        killed_after = None
    recorder = Recorder(Path(records) / f"record{rank}", killed_after, killed_by)
    if interrupted_save is not None:
        interrupt_saves_after(*interrupted_save, trainer)
    if killed_save is not None:
        kill_save_after(*killed_save, trainer)
    recorder.watch(built.keywords["model"].objective)
    trainer.callbacks.append(recorder)
    built()


if __name__ == "__main__":
    main(**job)  # noqa: F821
