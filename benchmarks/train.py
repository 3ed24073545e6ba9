"""Throughput of a shipped recipe with random weights, through the real training loop.

    python benchmarks/train.py qwen3_1p7b_mdlm_pretrain --sequences 16

Loader, corruption, clipping, optimizer and metrics are included. Sizes, precision and the choice of layers are
overridden; tokens per second are tokens of text, of all processes, over the median step after warm-up. A single process
takes the whole model; under torchrun the layout is the recipe's own, or what ``--set`` makes of it:

    torchrun --nproc-per-node 4 benchmarks/train.py llada2_mini_pretrain --sequences 32 --micro-batch 4 \\
        --set trainer.strategy.expert_model_parallel_size=4
"""

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time

from nemo_dllm.console import import_nemo_quietly

import_nemo_quietly()

import fiddle as fdl  # noqa: E402
import lightning.pytorch as pl  # noqa: E402
import nemo_run as run  # noqa: E402
import torch  # noqa: E402

from nemo_dllm.collections.diffusion.objectives import BlockDiffusion, MaskedDiffusion  # noqa: E402
from nemo_dllm.collections.diffusion.training.flops import H200_BF16_FLOPS, train_flops_per_token  # noqa: E402
from nemo_dllm.recipes.builder import RECIPES, set_precision  # noqa: E402

# Lightning forgets them at the end of a run.
PROCESSES, LOCAL_PROCESSES = (int(os.environ.get(name, 1)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
RANK = int(os.environ.get("RANK", 0))
OBJECTIVES = {"mdlm": MaskedDiffusion, "bd3lm": BlockDiffusion}


class Clock(pl.Callback):
    """Times optimizer steps, the device's work included, and keeps their losses."""

    def __init__(self, profile_at: int | None = None):
        self.losses: list[torch.Tensor] = []
        self.profile_at = profile_at
        self.profiler = torch.profiler.profile(activities=list(torch.profiler.supported_activities()))

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        self.pl_module = pl_module
        self.marks = [self._mark()]

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module, outputs, batch, batch_idx) -> None:
        """A step is over."""
        self.marks.append(self._mark())
        self.losses.append(outputs["loss"] if isinstance(outputs, dict) else outputs)
        if trainer.global_step == self.profile_at:
            self.profiler.start()
        elif self.profile_at and trainer.global_step == self.profile_at + 3:
            self.profiler.stop()

    def seconds(self) -> list[float]:
        """Seconds of each step; waits for the device."""
        if not torch.cuda.is_available():
            return [later - earlier for earlier, later in itertools.pairwise(self.marks)]
        torch.cuda.synchronize()
        return [earlier.elapsed_time(later) / 1000 for earlier, later in itertools.pairwise(self.marks)]

    @staticmethod
    def _mark() -> float | torch.cuda.Event:
        """A point in time, on a GPU in the order of its work: the host does not wait."""
        if not torch.cuda.is_available():
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def measured_recipe(arguments: argparse.Namespace, clock: Clock, folder: str) -> run.Partial:
    """The recipe on the devices there are, at the asked sizes, without validation and checkpoints."""
    recipe = RECIPES[arguments.recipe]()
    set_precision(recipe, arguments.precision)
    trainer, strategy = recipe.trainer, recipe.trainer.strategy
    trainer.num_nodes, trainer.devices = PROCESSES // LOCAL_PROCESSES, LOCAL_PROCESSES
    if PROCESSES == 1:
        for degree in ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor"):
            setattr(strategy, f"{degree}_parallel_size", 1)
        strategy.sequence_parallel = strategy.ddp.overlap_grad_reduce = strategy.ddp.overlap_param_gather = False
    trainer.max_steps = arguments.warmup + arguments.steps
    trainer.limit_val_batches = 0
    trainer.enable_checkpointing = False
    trainer.callbacks = [*trainer.callbacks, clock]
    recipe.log.ckpt = None
    recipe.log.log_dir = folder
    recipe.data.seq_length = recipe.model.config.seq_length = arguments.length
    recipe.data.global_batch_size = arguments.sequences
    recipe.data.micro_batch_size = arguments.micro_batch or arguments.sequences
    recipe.model.transformer_impl = arguments.transformer_impl
    recipe.model.attention_backend = arguments.attention_backend
    if arguments.objective:
        mask_token_id = recipe.model.objective.mask_token_id
        recipe.model.objective = run.Config(OBJECTIVES[arguments.objective], mask_token_id=mask_token_id)
    if arguments.block_size:
        recipe.model.objective.block_size = arguments.block_size
    for assignment in arguments.set:
        path, value = assignment.split("=", 1)
        *parents, field = path.split(".")
        target = recipe
        for parent in parents:
            target = getattr(target, parent)
        setattr(target, field, json.loads(value))
    return recipe


def of_all_processes(figures: list[float]) -> list[float]:
    """The largest of each: the fullest device; the loss, which the last stage of a pipeline knows."""
    if not torch.distributed.is_initialized():
        return figures
    tensor = torch.tensor(figures, device="cuda" if torch.cuda.is_available() else "cpu")
    torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX)
    return tensor.tolist()


def measure(arguments: argparse.Namespace) -> dict:
    """Train for the asked number of steps; returns the row of the table."""
    clock = Clock(profile_at=arguments.warmup + 2 if arguments.profile else None)
    with tempfile.TemporaryDirectory() as folder:
        fdl.build(measured_recipe(arguments, clock, folder))()
    step, peak, *losses = of_all_processes(
        [
            statistics.median(clock.seconds()[arguments.warmup :]),
            torch.cuda.max_memory_allocated() / 1e9,
            *(float(clock.losses[place]) for place in (0, -1)),
        ]
    )
    tokens = arguments.sequences * arguments.length
    model = clock.pl_module
    flops = train_flops_per_token(
        model.config, model.logical_vocab_size, arguments.length, model.objective.block_size, model.objective.views
    )
    if arguments.profile and RANK == 0:
        with open(arguments.profile, "w") as file:
            for column in ("self_device_time_total", "self_cpu_time_total"):
                file.write(clock.profiler.key_averages().table(sort_by=column, row_limit=60, max_name_column_width=90))
    return {
        "recipe": arguments.recipe,
        "processes": PROCESSES,
        "layers": arguments.transformer_impl,
        "attention": arguments.attention_backend,
        "precision": arguments.precision,
        "sequences": f"{arguments.sequences} x {arguments.length}",
        "objective": arguments.objective or "",
        "block size": arguments.block_size or "",
        "set": " ".join(arguments.set),
        "tokens/s": round(tokens / step),
        "step ms": round(step * 1000, 1),
        "MFU %": round(100 * tokens / step * flops / H200_BF16_FLOPS / PROCESSES, 1),
        "peak GB": round(peak, 1),
        "first loss": round(losses[0], 3),
        "last loss": round(losses[1], 3),
    }


def add_recipe_arguments(parser: argparse.ArgumentParser, steps: int) -> None:
    """What :func:`measured_recipe` and the clock read, but for the objective.

    Args:
        parser: gets them.
        steps: measured by default.
    """
    parser.add_argument("recipe", choices=sorted(RECIPES), metavar="RECIPE", help="as --factory takes it")
    parser.add_argument("--sequences", type=int, default=8, help="sequences, or packed rows, per optimizer step")
    parser.add_argument("--micro-batch", type=int, help="of them per micro-batch; default: all")
    parser.add_argument("--length", type=int, default=2048, help="positions of each")
    parser.add_argument("--steps", type=int, default=steps, help="measured optimizer steps")
    parser.add_argument("--warmup", type=int, default=10, help="optimizer steps before them")
    parser.add_argument("--precision", default="bf16", help="fp32, bf16, fp16 or fp8")
    parser.add_argument("--transformer-impl", default="auto", help="auto, local or transformer_engine")
    parser.add_argument("--attention-backend", default="auto", help="auto, sdpa, te or eager")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=JSON", help="any field of the recipe")
    parser.add_argument("--json", metavar="FILE", help="append the rows as lines of JSON")


def main() -> None:
    """Parse the command line, run the recipe, print the row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_recipe_arguments(parser, steps=30)
    parser.add_argument("--objective", choices=sorted(OBJECTIVES), help="in place of the recipe's")
    parser.add_argument("--block-size", type=int, help="tokens per block of block diffusion")
    parser.add_argument("--profile", metavar="FILE", help="write the costliest kernels of three steps")
    arguments = parser.parse_args()
    row = measure(arguments)
    if RANK > 0:
        return
    print("  ".join(f"{name}: {value}" for name, value in row.items() if value != ""))
    if arguments.json:
        with open(arguments.json, "a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
