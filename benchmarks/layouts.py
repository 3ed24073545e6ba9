"""The layouts of ranks, one after another in the same processes: the same step, and what it costs.

    torchrun --nproc-per-node 2 benchmarks/layouts.py
    torchrun --nproc-per-node 8 benchmarks/layouts.py --precision bf16 --layers 16 --hidden 2048 --length 4096

Over NCCL where each process has a GPU, over gloo on CPUs. One global batch with fixed weights: the loss, and the norm
of the gradients, of every layout that the number of processes allows, against those of the first, data parallelism
alone. Tokens of text per second are of all processes, over the median step; memory is the peak of the fullest process.
"""

import argparse
import os
import statistics
import time
import zlib

from nemo_dllm.console import import_nemo_quietly

import_nemo_quietly()

import lightning.pytorch as pl  # noqa: E402
import nemo.lightning as nl  # noqa: E402
import torch  # noqa: E402
from megatron.core import num_microbatches_calculator, parallel_state, tensor_parallel  # noqa: E402
from megatron.core.dist_checkpointing.dict_utils import nested_values  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories  # noqa: E402
from megatron.core.distributed import DistributedDataParallelConfig  # noqa: E402
from megatron.core.optimizer import OptimizerConfig  # noqa: E402
from nemo.collections.llm import GPTConfig  # noqa: E402
from nemo.lightning.pytorch.optim import MegatronOptimizerModule  # noqa: E402

from nemo_dllm.collections.diffusion.data.mock_datamodule import MockDataModule  # noqa: E402
from nemo_dllm.collections.diffusion.models.model import DiffusionModel  # noqa: E402
from nemo_dllm.collections.diffusion.objectives import BlockDiffusion, MaskedDiffusion  # noqa: E402
from nemo_dllm.recipes.builder import PRECISIONS  # noqa: E402

TENSOR, PIPELINE, CONTEXT, EXPERT = (
    f"{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "context", "expert_model")
)
SEQUENCE = {"sequence_parallel": True}
LAYOUTS = {
    "data": {},
    "tensor": {TENSOR: 2},
    "tensor and sequence": {TENSOR: 2, **SEQUENCE},
    "pipeline": {PIPELINE: 2},
    "interleaved pipeline": {PIPELINE: 2, "virtual_pipeline_model_parallel_size": 2},
    "context": {CONTEXT: 2},
    "expert": {EXPERT: 2},
    "tensor x pipeline": {TENSOR: 2, PIPELINE: 2, **SEQUENCE},
    "tensor x context": {TENSOR: 2, CONTEXT: 2, **SEQUENCE},
    "pipeline x context": {PIPELINE: 2, CONTEXT: 2},
    "tensor x pipeline x context": {TENSOR: 2, PIPELINE: 2, CONTEXT: 2, **SEQUENCE},
}
OBJECTIVES = {"mdlm": (MaskedDiffusion, {}), "bd3lm": (BlockDiffusion, {"block_size": 32})}


class DrawnModel(DiffusionModel):
    """Its weights are drawn by their names and places: the same in every layout."""

    def configure_model(self, vp_stage: int | None = None) -> None:
        """Build and draw."""
        super().configure_model(vp_stage)
        state = self.module.sharded_state_dict()
        apply_factories(state)
        for shard in (value for value in nested_values(state) if isinstance(value, ShardedTensor)):
            generator = torch.Generator().manual_seed(zlib.crc32(shard.key.encode()))
            whole = torch.randn(shard.global_shape, generator=generator)
            sizes = [1] * shard.prepend_axis_num + list(shard.local_shape)
            place = tuple(slice(a, a + size) for a, size in zip(shard.global_offset, sizes, strict=True))
            part = whole[place].view(shard.data.shape) * 0.02
            shard.data.detach().copy_(part + 1 if "norm" in shard.key else part)


class Meter(pl.Callback):
    """Loss and gradient norm of the first step, which is before any other; seconds of each."""

    def __init__(self):
        self.loss = self.gradient_norm = float("nan")
        self.seconds: list[float] = []

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
            self.gradient_norm = float(trainer.callback_metrics["grad_norm"])


def config_of(arguments: argparse.Namespace) -> GPTConfig:
    """The model, dense or with experts."""
    width, experts = arguments.hidden, {}
    if arguments.experts:
        experts = {
            "num_moe_experts": arguments.experts,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": width,
            "moe_aux_loss_coeff": 0.01,
            "moe_router_load_balancing_type": "seq_aux_loss",
            "moe_token_dispatcher_type": "alltoall",
        }
    return GPTConfig(
        num_layers=arguments.layers,
        hidden_size=width,
        ffn_hidden_size=3 * width,
        num_attention_heads=max(width // 128, 4),
        num_query_groups=max(width // 256, 2),
        vocab_size=arguments.vocabulary,
        seq_length=arguments.length,
        position_embedding_type="rope",
        normalization="RMSNorm",
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        make_vocab_size_divisible_by=1,
        apply_rope_fusion=False,
        **experts,
    )


def measure(arguments: argparse.Namespace, layout: dict) -> dict[str, float]:
    """Train a few steps with learning rate 0 in a layout; the figures of this process."""
    torch.manual_seed(0)
    precision = PRECISIONS[arguments.precision]
    meter, gpus = Meter(), torch.cuda.is_available()
    optimizer = OptimizerConfig(
        optimizer="adam", lr=0.0, clip_grad=1.0, use_distributed_optimizer=True, bf16=arguments.precision == "bf16"
    )
    trainer = nl.Trainer(
        accelerator="gpu" if gpus else "cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=nl.MegatronStrategy(
            replace_progress_bar=False,
            pipeline_dtype=precision["pipeline_dtype"],
            ddp=DistributedDataParallelConfig(check_for_nan_in_grad=False, use_distributed_optimizer=True),
            **layout,
        ),
        plugins=nl.MegatronMixedPrecision(**precision),
        max_steps=arguments.steps,
        callbacks=[meter],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
    )
    data = MockDataModule(
        vocab_size=arguments.vocabulary,
        seq_length=arguments.length,
        micro_batch_size=1,
        global_batch_size=arguments.sequences,
        num_val_rows=arguments.sequences,
    )
    if gpus:
        torch.cuda.reset_peak_memory_stats()
    objective_class, fields = OBJECTIVES[arguments.objective]
    objective = objective_class(mask_token_id=arguments.vocabulary - 1, **fields)
    model = DrawnModel(config_of(arguments), objective, MegatronOptimizerModule(optimizer))
    trainer.fit(model, data)
    figures = torch.tensor(
        [meter.loss, meter.gradient_norm, statistics.median(meter.seconds[1:]), torch.cuda.max_memory_allocated() / 1e9]
    ).to(torch.cuda.current_device())
    # The first pipeline stage knows no loss.
    torch.distributed.all_reduce(figures, op=torch.distributed.ReduceOp.MAX)
    return dict(zip(("loss", "gradient", "seconds", "memory"), figures.tolist(), strict=True))


def move_meeting_point() -> None:
    """Let the processes meet at a store of their own, one port on; torchrun's still holds the last layout's keys."""
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)


def forget_layout() -> None:
    """Let the next layout begin anew in this process."""
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    num_microbatches_calculator.unset_num_microbatches_calculator()
    tensor_parallel.get_cuda_rng_tracker().reset()


def layouts_for(processes: int, experts: int) -> dict[str, dict]:
    """Those of ``LAYOUTS`` that the number of processes, and a model with or without experts, allow."""
    fitting = {}
    for name, layout in LAYOUTS.items():
        product = layout.get(TENSOR, 1) * layout.get(PIPELINE, 1) * layout.get(CONTEXT, 1)
        product = max(product, layout.get(EXPERT, 1) * layout.get(PIPELINE, 1))
        needs_experts = EXPERT in layout
        # Megatron trains experts on tensor-parallel ranks with sequence parallelism only.
        refused = experts and TENSOR in layout and "sequence_parallel" not in layout
        if processes % product == 0 and not refused and (experts or not needs_experts):
            fitting[name] = layout
    return fitting


def main() -> None:
    """Parse the command line, run the layouts, print the table on the first process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objective", choices=OBJECTIVES, default="mdlm")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--experts", type=int, default=0, help="experts of each layer; 0 is a dense model")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--length", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--sequences", type=int, default=8, help="sequences of the global batch")
    parser.add_argument("--vocabulary", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=4, help="the first is not timed")
    parser.add_argument("--layouts", nargs="*", choices=LAYOUTS, help="default: all that fit")
    arguments = parser.parse_args()
    # Without torchrun, one process.
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "NODE_RANK": 0}.items():
        os.environ.setdefault(name, str(value))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29517")
    first, rows = None, []
    for name, layout in layouts_for(int(os.environ["WORLD_SIZE"]), arguments.experts).items():
        if first is not None and arguments.layouts and name not in arguments.layouts:
            continue
        move_meeting_point()
        row = measure(arguments, layout)
        first = first or row
        rows.append((name, row))
        forget_layout()
    if os.environ["RANK"] == "0":
        print(f"{'layout':28} {'loss':>10} {'difference':>11} {'gradient norm':>14} {'tokens/s':>9} {'memory':>8}")
        for name, row in rows:
            loss, gradient = (abs(row[key] / first[key] - 1) for key in ("loss", "gradient"))
            speed = arguments.sequences * arguments.length / row["seconds"]
            print(f"{name:28} {row['loss']:10.6f} {loss:11.1e} {gradient:14.1e} {speed:9.0f} {row['memory']:5.1f} GB")


if __name__ == "__main__":
    main()
