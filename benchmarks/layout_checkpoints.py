"""Whether a run goes on from a checkpoint in another layout of ranks, and after a kill, as if nothing had happened.

    torchrun --nproc-per-node 2 benchmarks/layout_checkpoints.py --journey dp tp2+sp pp2 cp2 fsdp dp --folder runs
    torchrun --nproc-per-node 2 benchmarks/layout_checkpoints.py --journey fsdp --steps 6 --kill-at 5 --folder killed
    torchrun --nproc-per-node 2 benchmarks/layout_checkpoints.py --journey fsdp --steps 6 --folder killed

A journey takes ``--steps`` in each of its layouts, one after another, with a checkpoint every second step; each goes on
from the last checkpoint in the folder. With ``--kill-at`` all processes are killed at the start of that step: the same
command without it goes on. Losses are compared with those of a run in the first layout without a stop, in a folder
beside, which is made at the first call. Models, layouts and precisions are those of ``layouts.py``.
"""

import argparse
import os
import signal
from pathlib import Path

from nemo_dllm.console import import_nemo_quietly

import_nemo_quietly()

import lightning.pytorch as pl  # noqa: E402
import nemo.lightning as nl  # noqa: E402
import torch  # noqa: E402
from layout_models import (  # noqa: E402
    add_model_arguments,
    count_processes,
    forget_layout,
    layout_name,
    model_of,
    trainer_of,
)
from megatron.core.optimizer import OptimizerConfig  # noqa: E402
from nemo.collections import llm  # noqa: E402
from nemo.lightning.pytorch.optim import MegatronOptimizerModule  # noqa: E402

from nemo_dllm.collections.diffusion.data.mock_datamodule import MockDataModule  # noqa: E402
from nemo_dllm.collections.diffusion.models.model import DiffusionModel  # noqa: E402
from nemo_dllm.collections.diffusion.training.resume import ResumeLatest  # noqa: E402


class Steps(pl.Callback):
    """Keeps the loss of each step by its number; kills its process at the start of one."""

    def __init__(self, kill_at: int | None):
        self.kill_at, self.losses = kill_at, {}

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module, batch, batch_idx) -> None:
        """No warning, no clean-up."""
        if trainer.global_step + 1 == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module, outputs, batch, batch_idx) -> None:
        """Of the global batch."""
        self.losses[trainer.global_step] = float(outputs["loss"])


def train(arguments: argparse.Namespace, folder: Path, layout: str, last_step: int, kill_at: int | None) -> dict:
    """Go on from the last checkpoint in a folder to a step; the loss of each step."""
    torch.manual_seed(0)
    steps = Steps(kill_at)
    config = OptimizerConfig(
        optimizer="adam", lr=1e-3, weight_decay=0.1, use_distributed_optimizer=True, bf16=arguments.precision == "bf16"
    )
    # Weights of a first step that has no checkpoint are Megatron's, drawn for the layout.
    model = model_of(arguments, DiffusionModel, None)
    llm.pretrain(
        model=model,
        data=MockDataModule(
            vocab_size=model.config.vocab_size,
            seq_length=arguments.length,
            micro_batch_size=arguments.micro_batch,
            global_batch_size=arguments.sequences,
            num_val_rows=arguments.sequences,
        ),
        trainer=trainer_of(arguments, layout, max_steps=last_step, callbacks=[steps], enable_checkpointing=True),
        log=nl.NeMoLogger(
            name="run",
            log_dir=str(folder),
            use_datetime_version=False,
            ckpt=nl.ModelCheckpoint(
                every_n_train_steps=2, save_top_k=-1, save_last=False, monitor="step", save_optim_on_train_end=True
            ),
        ),
        optim=MegatronOptimizerModule(config),
        resume=ResumeLatest(),
    )
    # The first pipeline stage knows no loss.
    losses = torch.zeros(last_step + 1, device=torch.cuda.current_device())
    for step, loss in steps.losses.items():
        losses[step] = loss
    torch.distributed.all_reduce(losses, op=torch.distributed.ReduceOp.MAX)
    forget_layout()
    return {step: losses[step].item() for step in range(1, last_step + 1) if losses[step]}


def main() -> None:
    """Parse the command line, take the journey, print the table on the first process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument(
        "--journey", nargs="+", type=layout_name, metavar="LAYOUT", required=True, help="layouts, one after another"
    )
    parser.add_argument("--folder", type=Path, required=True, help="of the checkpoints")
    parser.add_argument("--steps", type=int, default=2, help="in each layout")
    parser.add_argument("--kill-at", type=int, metavar="STEP", help="kill all processes at the start of this step")
    arguments = parser.parse_args()
    count_processes(arguments)
    journey, first = arguments.journey, arguments.journey[0]
    straight_file = arguments.folder / "straight.pt"
    if straight_file.exists():
        straight = torch.load(straight_file)
    else:
        straight = train(arguments, arguments.folder / "straight", first, arguments.steps * len(journey), None)
        if arguments.rank == 0:
            torch.save(straight, straight_file)
    lines = []
    for number, layout in enumerate(journey, start=1):
        losses = train(arguments, arguments.folder / "journey", layout, arguments.steps * number, arguments.kill_at)
        lines += [(layout, step, loss) for step, loss in losses.items()]
    if arguments.rank == 0:
        print(f"{'layout':15} {'step':>5} {'loss':>10} {'difference':>11}")
        for layout, step, loss in lines:
            print(f"{layout:15} {step:5} {loss:10.6f} {abs(loss / straight[step] - 1):11.1e}")


if __name__ == "__main__":
    main()
