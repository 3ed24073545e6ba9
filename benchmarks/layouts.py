"""The layouts of ranks, one after another in the same processes: the same step, and what it costs.

    torchrun --nproc-per-node 2 benchmarks/layouts.py
    python benchmarks/layouts.py --model qwen3_1p7b --precision bf16 --sequences 32 --save one.json
    torchrun --nproc-per-node 2 benchmarks/layouts.py --against one.json \\
        --model qwen3_1p7b --precision bf16 --sequences 32

Over NCCL where each process has a GPU, over gloo on CPUs. One global batch with fixed weights: loss and gradients of
every layout that the number of processes allows, against those of the first layout, or of the file of another run. The
difference of gradients is the largest over all tensors of |<g - g', r>| / |g'|, r being fixed random numbers of
variance 1: an estimate of the relative error. Tokens of text per second are of all processes, over the median step; MFU
is of an H200's bf16 peak; memory is the peak of the fullest process, on GPUs in bf16 beside what ``nemo-dllm plan``
expects.
"""

import argparse
import json
import statistics
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

from nemo_dllm.console import import_nemo_quietly

import_nemo_quietly()

import lightning.pytorch as pl  # noqa: E402
import torch  # noqa: E402
from layout_models import (  # noqa: E402
    CONTEXT,
    EXPERT,
    EXPERT_TENSOR,
    PIPELINE,
    TENSOR,
    USUAL,
    add_model_arguments,
    config_of,
    count_processes,
    forget_layout,
    layout_name,
    model_of,
    planned_memory,
    strategy_of,
    trainer_of,
)
from megatron.core.dist_checkpointing.dict_utils import nested_values  # noqa: E402
from megatron.core.dist_checkpointing.mapping import (  # noqa: E402
    ShardedTensor,
    apply_factories,
    is_main_replica,
)
from megatron.core.optimizer import OptimizerConfig  # noqa: E402
from nemo.lightning.megatron_parallel import CallbackMethods  # noqa: E402
from nemo.lightning.pytorch.optim import MegatronOptimizerModule  # noqa: E402

from nemo_dllm.collections.diffusion.data.mock_datamodule import MockDataModule  # noqa: E402
from nemo_dllm.collections.diffusion.models.fsdp_state import gradient_parts  # noqa: E402
from nemo_dllm.collections.diffusion.models.model import DiffusionModel  # noqa: E402
from nemo_dllm.collections.diffusion.training.flops import H200_BF16_FLOPS, train_flops_per_token  # noqa: E402

WARMUP = 2
"""Steps that are not timed."""
NAME_WIDTH = 20
TITLES = {
    "loss": 10,
    "difference": 11,
    "gradients": 11,
    "tokens/s": 10,
    "speed": 8,
    "MFU": 7,
    "memory": 9,
    "planned": 9,
}
"""Columns and their widths."""


def whole_random(name: str, shard: ShardedTensor) -> torch.Tensor:
    """This part of the random tensor that belongs to a name: the same numbers in every layout."""
    prepended = shard.prepend_axis_num
    layer, place = shard.global_offset[:prepended], shard.global_offset[prepended:]
    device = shard.data.device
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{name}{shard.key}{layer}".encode()))
    whole = torch.randn(shard.global_shape[prepended:], generator=generator, device=device)
    return whole[tuple(slice(start, start + size) for start, size in zip(place, shard.data.shape, strict=True))]


def parts(core) -> list[ShardedTensor]:
    """The parameters of a core as parts of whole tensors, whose data are views."""
    state = core.sharded_state_dict(prefix="module.")
    apply_factories(state)
    return [value for value in nested_values(state) if isinstance(value, ShardedTensor)]


class DrawnModel(DiffusionModel):
    """Its weights are drawn by their names and places: the same in every layout."""

    def configure_model(self, vp_stage: int | None = None) -> None:
        """Build and draw."""
        super().configure_model(vp_stage)
        for shard in parts(self.module):
            if is_weight(shard):
                part = whole_random("weights", shard) * 0.02
                shard.data.detach().copy_(part + 1 if "norm" in shard.key else part)


def is_weight(shard: ShardedTensor) -> bool:
    """And no bias of a router, nor a count."""
    return shard.data.is_floating_point() and "expert_bias" not in shard.key


@contextmanager
def gradients_for_weights(core) -> Iterator[None]:
    """Let modules hold the gradients, in fp32, where they hold their weights."""
    places = [(module, name) for module in core.modules() for name in module._parameters]
    weights = [module._parameters[name] for module, name in places]
    for (module, name), weight in zip(places, weights, strict=True):
        if weight is not None:
            module._parameters[name] = torch.nn.Parameter(weight.main_grad, requires_grad=False)
    try:
        yield
    finally:
        for (module, name), weight in zip(places, weights, strict=True):
            module._parameters[name] = weight


def gradient_shards(chunk) -> list[ShardedTensor]:
    """This rank's parts of the gradients, none of which another rank has."""
    ddp = chunk.module
    if ddp.ddp_config.use_megatron_fsdp:
        shards = gradient_parts(ddp)
    else:
        # The distributed optimizer leaves each rank its share of the gradients' sum.
        for buffer in ddp.buffers + ddp.expert_parallel_buffers:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                share = bucket.grad_data.view(group.size(), -1)[group.rank()].clone()
                torch.distributed.all_gather_into_tensor(bucket.grad_data, share, group=group)
        core = ddp.module
        while hasattr(core, "module"):
            core = core.module
        with gradients_for_weights(core):
            shards = [shard for shard in parts(core) if is_weight(shard)]
    return [shard for shard in shards if is_main_replica(shard.replica_id)]


class Meter(pl.Callback, CallbackMethods):
    """Loss and gradients of the first step, which is before any other; seconds of each."""

    def __init__(self):
        self.loss, self.gradients, self.seconds = float("nan"), {}, []

    def on_megatron_step_end(self, step, reduced) -> None:
        """Measure the gradients: squared norm, and product with random numbers, of each tensor."""
        if step.trainer.global_step > 0:
            return
        mine: dict[str, torch.Tensor] = {}
        for chunk in step.pipeline:
            for shard in gradient_shards(chunk):
                gradient = shard.data.double()
                random = whole_random("direction", shard).double()
                mine[shard.key] = mine.get(shard.key, 0) + torch.stack([(gradient**2).sum(), (gradient * random).sum()])
        everyone = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyone, {key: value.tolist() for key, value in mine.items()})
        for gradients in everyone:
            for key, (square, product) in gradients.items():
                before = self.gradients.get(key, (0.0, 0.0))
                self.gradients[key] = (before[0] + square, before[1] + product)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module, batch, batch_idx) -> None:
        """Start the clock."""
        torch.cuda.synchronize()
        self.start = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module, outputs, batch, batch_idx) -> None:
        """Read the clock."""
        torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.start)
        if trainer.global_step == 1:
            self.loss = float(outputs["loss"])
            # The first step's measuring is no training.
            torch.cuda.reset_peak_memory_stats()


def measure(arguments: argparse.Namespace, layout: str) -> dict:
    """Train a few steps with learning rate 0 in a layout; figures of all processes together."""
    torch.manual_seed(0)
    meter = Meter()
    optimizer = OptimizerConfig(
        optimizer="adam", lr=0.0, clip_grad=1.0, use_distributed_optimizer=True, bf16=arguments.precision == "bf16"
    )
    trainer = trainer_of(arguments, layout, max_steps=arguments.steps + WARMUP, callbacks=[meter])
    model = model_of(arguments, DrawnModel, MegatronOptimizerModule(optimizer))
    data = MockDataModule(
        vocab_size=model.config.vocab_size,
        seq_length=arguments.length,
        micro_batch_size=arguments.micro_batch,
        global_batch_size=arguments.sequences,
        num_val_rows=arguments.sequences,
    )
    planned = planned_memory(arguments, layout, model)
    trainer.fit(model, data)
    figures = torch.tensor(
        [meter.loss, statistics.median(meter.seconds[WARMUP:]), torch.cuda.max_memory_allocated() / 1e9]
    ).to(torch.cuda.current_device())
    # The first pipeline stage knows no loss.
    torch.distributed.all_reduce(figures, op=torch.distributed.ReduceOp.MAX)
    loss, seconds, memory = figures.tolist()
    speed = arguments.sequences * arguments.length / seconds
    block, views = model.objective.block_size, model.objective.views
    flops = train_flops_per_token(model.config, model.config.vocab_size, arguments.length, block, views)
    mfu = 100 * speed * flops / H200_BF16_FLOPS / torch.distributed.get_world_size()
    costs = {"speed": speed, "mfu": mfu, "memory": memory, "planned": planned}
    return {"loss": loss, "gradients": meter.gradients, **costs}


def fits(layout: str, processes: int, experts: int) -> bool:
    """Whether the number of processes, and a model with or without experts, allow a layout."""
    fields = strategy_of(layout)
    product = fields.get(TENSOR, 1) * fields.get(PIPELINE, 1) * fields.get(CONTEXT, 1)
    product = max(product, fields.get(EXPERT, 1) * fields.get(PIPELINE, 1) * fields.get(EXPERT_TENSOR, 1))
    needs_experts = EXPERT in fields or EXPERT_TENSOR in fields
    # Megatron trains experts on tensor-parallel ranks with sequence parallelism only.
    refused = experts and TENSOR in fields and "sequence_parallel" not in fields
    return processes % product == 0 and not refused and bool(experts or not needs_experts)


def gradient_difference(gradients: dict, expected: dict) -> float:
    """See the top; NaN where the tensors are others."""
    if gradients.keys() != expected.keys():
        return float("nan")
    return max(abs(gradients[key][1] - expected[key][1]) / max(expected[key][0], 1e-60) ** 0.5 for key in expected)


def main() -> None:
    """Parse the command line, run the layouts, print the table on the first process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--steps", type=int, default=3, help=f"that are timed, after {WARMUP} that are not")
    known = f"default: of {', '.join(USUAL)}, those that fit"
    parser.add_argument("--layouts", nargs="*", type=layout_name, metavar="LAYOUT", help=known)
    parser.add_argument("--save", metavar="FILE", help="write the figures, loss and gradients of the first layout")
    parser.add_argument("--against", metavar="FILE", help="compare with the figures that another run has saved")
    arguments = parser.parse_args()
    count_processes(arguments)
    first = None
    if arguments.against:
        with open(arguments.against) as file:
            first = json.load(file)
    experts = config_of(arguments).num_moe_experts or 0
    names = arguments.layouts or [name for name in USUAL if fits(name, arguments.processes, experts)]
    for name in names:
        if not fits(name, arguments.processes, experts):
            parser.error(f"--layouts {name} does not fit {arguments.processes} processes or this model")
    for place, name in enumerate(names):
        row = measure(arguments, name)
        forget_layout()
        first = first or row
        if arguments.rank == 0:
            if place == 0:
                print("layout".ljust(NAME_WIDTH) + "".join(title.rjust(width) for title, width in TITLES.items()))
                save(arguments.save, row)
            print_row(name, row, first)


def save(path: str | None, row: dict) -> None:
    """Write a layout's figures for another run to compare with."""
    if path:
        with open(path, "w") as file:
            json.dump(row, file)


def print_row(name: str, row: dict, first: dict) -> None:
    """One line of the table."""
    figures = (
        f"{row['loss']:.6f}",
        f"{abs(row['loss'] / first['loss'] - 1):.1e}",
        f"{gradient_difference(row['gradients'], first['gradients']):.1e}",
        f"{row['speed']:.0f}",
        f"{row['speed'] / first['speed']:.2f}x",
        f"{row['mfu']:.1f}%",
        f"{row['memory']:.1f} GB",
        f"{row['planned']:.1f} GB",
    )
    cells = (figure.rjust(width) for figure, width in zip(figures, TITLES.values(), strict=True))
    print(name.ljust(NAME_WIDTH) + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
