"""Models, layouts and trainers of the scripts that compare layouts of ranks."""

import argparse
import gc
import os
import re
from collections import OrderedDict
from types import FunctionType

import nemo.lightning as nl
import torch
from megatron.core import num_microbatches_calculator, parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from nemo.collections import llm
from nemo.collections.llm.gpt.model.qwen3 import (
    Qwen3Config1P7B,
    Qwen3Config8B,
    Qwen3Config30B_A3B,
    Qwen3Config600M,
    Qwen3MoEConfig,
)

from nemo_dllm.collections.diffusion.models.llada2 import LLaDA2Config16B
from nemo_dllm.collections.diffusion.models.model import DiffusionModel
from nemo_dllm.collections.diffusion.objectives import BlockDiffusion, MaskedDiffusion
from nemo_dllm.recipes.builder import FUSIONS, PRECISIONS, layout_of_strategy
from nemo_dllm.recipes.memory import estimate_training_memory
from nemo_dllm.recipes.moe_fields import SOFTMAX_ROUTER

TENSOR, PIPELINE, CONTEXT, EXPERT, EXPERT_TENSOR = (
    f"{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
)
DEGREES = {"tp": TENSOR, "pp": PIPELINE, "cp": CONTEXT, "ep": EXPERT, "etp": EXPERT_TENSOR}
CHOICES = {
    "dp": {},
    "sp": {"sequence_parallel": True},
    "interleaved": {"virtual_pipeline_model_parallel_size": 2},
    "fsdp": {"fsdp": "megatron"},
}
USUAL = ("dp", "tp2", "tp2+sp", "pp2", "pp2+interleaved", "cp2", "ep2", "tp2+sp+etp2", "tp2+sp+ep2+etp1", "fsdp")
USUAL += ("fsdp+tp2+sp", "fsdp+cp2", "tp2+sp+pp2", "tp2+sp+cp2", "pp2+cp2", "tp2+sp+pp2+cp2")
MODELS = {
    "qwen3_0p6b": Qwen3Config600M,
    "qwen3_1p7b": Qwen3Config1P7B,
    "qwen3_8b": Qwen3Config8B,
    "qwen3_30b_a3b": Qwen3Config30B_A3B,
    "llada2_mini": LLaDA2Config16B,
}
HOOKS = [
    f"{maker.__qualname__}.<locals>.hook"
    for maker in (DistributedDataParallel._make_backward_post_hook, DistributedDataParallel._make_forward_pre_hook)
]
OBJECTIVES = {"mdlm": (MaskedDiffusion, {}), "bd3lm": (BlockDiffusion, {"block_size": 32})}
FULL = {"recompute_granularity": "full", "recompute_num_layers": 1}
RECOMPUTATIONS = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": FULL | {"recompute_method": "uniform"},
    "block": FULL | {"recompute_method": "block"},
}


def strategy_of(layout: str) -> dict[str, object]:
    """Fields of the strategy of a layout's name: words with a plus between, ``tp4+sp`` or ``pp2+interleaved``.

    Raises:
        argparse.ArgumentTypeError: for an unknown word.
    """
    fields = {}
    for word in layout.split("+"):
        degree = re.fullmatch(r"([a-z]+)([1-9][0-9]*)", word)
        if degree and degree[1] in DEGREES:
            fields[DEGREES[degree[1]]] = int(degree[2])
        elif word in CHOICES:
            fields |= CHOICES[word]
        else:
            known = ", ".join([*CHOICES, *(f"{name}N" for name in DEGREES)])
            raise argparse.ArgumentTypeError(f"{word!r} of layout {layout!r} is unknown; put a plus between: {known}")
    return fields


def layout_name(text: str) -> str:
    """The name of a layout, checked: a type of argparse."""
    strategy_of(text)
    return text


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """What all scripts ask for."""
    parser.add_argument("--model", choices=MODELS, help="instead of a small one of the sizes below")
    parser.add_argument("--objective", choices=OBJECTIVES, default="mdlm")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--transformer-impl", default="auto", help="auto, local or transformer_engine")
    parser.add_argument("--recompute", choices=RECOMPUTATIONS, default="none", help="activations")
    parser.add_argument("--layers", type=int, help="default: 4, or all of the --model")
    parser.add_argument("--length", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--sequences", type=int, default=8, help="sequences of the global batch")
    parser.add_argument("--micro-batch", type=int, default=1, help="sequences of a micro-batch")
    parser.add_argument("--experts", type=int, default=0, help="of each layer of the small model; 0 is a dense one")
    parser.add_argument("--hidden", type=int, default=128, help="of the small model")
    parser.add_argument("--vocabulary", type=int, default=1000, help="of the small model")


def config_of(arguments: argparse.Namespace) -> llm.GPTConfig:
    """The model's configuration, dense or with experts."""
    common = {
        "seq_length": arguments.length,
        **FUSIONS,
        **RECOMPUTATIONS[arguments.recompute],
    }
    if arguments.layers:
        common["num_layers"] = arguments.layers
        if arguments.model == "llada2_mini":
            common["moe_layer_freq"] = [0] + [1] * (arguments.layers - 1)
    experts = {
        **SOFTMAX_ROUTER,
        # The load is balanced in each sequence, whatever the micro-batches.
        "moe_aux_loss_coeff": 0.01,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": True,
    }
    if arguments.model:
        config_class = MODELS[arguments.model]
        return config_class(**common, **(experts if issubclass(config_class, Qwen3MoEConfig) else {}))
    width = arguments.hidden
    if arguments.experts:
        experts |= {"num_moe_experts": arguments.experts, "moe_router_topk": 2, "moe_ffn_hidden_size": width}
    return llm.Qwen3Config(
        **{"num_layers": 4, **common},
        hidden_size=width,
        ffn_hidden_size=3 * width,
        num_attention_heads=max(width // 128, 4),
        num_query_groups=max(width // 256, 2),
        kv_channels=max(width // 4, 32) if width < 512 else 128,
        vocab_size=arguments.vocabulary,
        make_vocab_size_divisible_by=1,
        **(experts if arguments.experts else {}),
    )


def model_of(arguments: argparse.Namespace, model_class: type, optimizer):
    """A model with its objective."""
    config = config_of(arguments)
    objective_class, fields = OBJECTIVES[arguments.objective]
    objective = objective_class(mask_token_id=config.vocab_size - 1, **fields)
    return model_class(config, objective, optimizer, transformer_impl=arguments.transformer_impl)


def trainer_of(arguments: argparse.Namespace, layout: str, **fields) -> nl.Trainer:
    """A trainer over all processes of this run, in a layout; ``fields`` are its own."""
    move_meeting_point()
    precision, gpus = PRECISIONS[arguments.precision], torch.cuda.is_available()
    if gpus:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    local, world = arguments.local_processes, arguments.processes
    return nl.Trainer(
        accelerator="gpu" if gpus else "cpu",
        devices=local,
        num_nodes=world // local,
        strategy=nl.MegatronStrategy(
            replace_progress_bar=False,
            pipeline_dtype=precision["pipeline_dtype"],
            ckpt_async_save=False,
            ckpt_optim_fully_reshardable=True,
            ddp=DistributedDataParallelConfig(
                check_for_nan_in_grad=False,
                use_distributed_optimizer=True,
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=world > 1,
                overlap_param_gather=world > 1,
            ),
            **strategy_of(layout),
        ),
        plugins=nl.MegatronMixedPrecision(**precision),
        **{"logger": False, "enable_checkpointing": False, "limit_val_batches": 0, **fields},
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
    )


def planned_memory(arguments: argparse.Namespace, layout: str, model: DiffusionModel) -> float:
    """GB of the fullest process; NaN but for bf16 on GPUs."""
    if arguments.precision != "bf16" or not torch.cuda.is_available():
        return float("nan")
    estimate = estimate_training_memory(
        model.config,
        model.objective,
        layout_of_strategy(strategy_of(layout), arguments.processes),
        seq_length=arguments.length,
        micro_batch_size=arguments.micro_batch,
        global_batch_size=arguments.sequences,
    )
    return estimate.total / 1e9


def count_processes(arguments: argparse.Namespace) -> None:
    """Add the numbers of processes, of all and of this machine, to ``arguments``; without torchrun, be the only one."""
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "NODE_RANK": 0}.items():
        os.environ.setdefault(name, str(value))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29517")
    # Lightning forgets them after its first run.
    arguments.processes = int(os.environ["WORLD_SIZE"])
    arguments.local_processes = int(os.environ["LOCAL_WORLD_SIZE"])
    arguments.rank = int(os.environ["RANK"])


def move_meeting_point() -> None:
    """Let the processes meet at a store of their own, one port on; torchrun's still holds the last layout's keys."""
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)


def forget_layout() -> None:
    """Let the next layout begin anew in this process."""
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    # Hooks hold the model. Autograd holds those on gradients, where no garbage collection looks, and a cache of
    # Megatron's those on its rotary embeddings.
    for hooks in [value for value in gc.get_objects() if type(value) is OrderedDict]:
        if any(type(hook) is FunctionType and hook.__qualname__ in HOOKS for hook in hooks.values()):
            hooks.clear()
    gc.collect()
    num_microbatches_calculator.unset_num_microbatches_calculator()
    tensor_parallel.get_cuda_rng_tracker().reset()
