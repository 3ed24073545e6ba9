"""Whether sharded weights, recomputation and overlapped communication go with a model and its layout."""

import os

from megatron.core.distributed import DistributedDataParallelConfig
from nemo import lightning as nl
from nemo.collections.llm.gpt.model.base import GPTConfig

from nemo_dllm.collections.diffusion.attention.layers import have_transformer_engine
from nemo_dllm.collections.diffusion.models.degrees import (
    EXPERT,
    EXPERT_TENSOR,
    MODEL,
    PIPELINE,
    STRATEGY,
    Degrees,
    check_size,
)
from nemo_dllm.collections.diffusion.models.fsdp import WHOLE, is_fully_sharded

_FSDP = f"{STRATEGY}fsdp='megatron'"
# Megatron takes any other name for the absence of a loss, or looks at it late.
_EXPERT_CHOICES = {
    "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"),
    "moe_token_dispatcher_type": ("allgather", "alltoall", "flex"),
}
# Selective recomputation that Transformer Engine's modules alone know.
_RECOMPUTED_BY_TRANSFORMER_ENGINE = ("layernorm", "moe_act")


def check_layout_options(config: GPTConfig, strategy: nl.MegatronStrategy, transformer_impl: str) -> None:
    """Check what a strategy and a model's configuration ask for beside the sizes of a layout.

    Args:
        config: of the model.
        strategy: of the trainer.
        transformer_impl: of the model: ``auto``, ``local`` or ``transformer_engine``.

    Raises:
        ValueError: names the fields, their values and the fix; names Transformer Engine where it is needed.
    """
    transformer_engine = transformer_impl != "local" and have_transformer_engine()
    if is_fully_sharded(strategy):
        _check_fully_sharded(config, strategy)
    for field, known in _EXPERT_CHOICES.items():
        chosen = getattr(config, field)
        for name in chosen if isinstance(chosen, list) else [chosen]:
            if name not in known:
                raise ValueError(f"{MODEL}{field}={chosen!r} is unknown; choose from {', '.join(known)}")
    if config.recompute_granularity is not None:
        _check_recomputation(config, strategy, transformer_engine)
    _check_overlap(config, strategy, transformer_engine)


def check_sharded_degrees(config: GPTConfig, degrees: Degrees) -> None:
    """Check what a model has beside Megatron-FSDP.

    Args:
        config: of the model.
        degrees: of a strategy with ``fsdp="megatron"``.

    Raises:
        ValueError: names the field, its value and the fix.
    """
    _refuse_beside_sharding(PIPELINE, degrees.pipeline, 1)
    if config.num_moe_experts:
        _refuse_beside_sharding(EXPERT, degrees.expert, 1)
        _refuse_beside_sharding(EXPERT_TENSOR, degrees.expert_tensor, degrees.tensor)


def _refuse_beside_sharding(field: str, value: int, needed: int) -> None:
    if value != needed:
        name = field.removeprefix(STRATEGY)
        raise ValueError(f"{_FSDP} cannot be combined with {field}={value}; set {name}={needed}, or fsdp=None")


def _check_fully_sharded(config: GPTConfig, strategy: nl.MegatronStrategy) -> None:
    check_sharded_degrees(config, Degrees.of(strategy))
    instances = strategy.num_distributed_optimizer_instances or 1
    _refuse_beside_sharding(f"{STRATEGY}num_distributed_optimizer_instances", instances, 1)
    for field, plain in {"cuda_graph_impl": "none", "init_model_with_meta_device": False}.items():
        if getattr(config, field, plain) not in (plain, None):
            raise ValueError(
                f"{_FSDP} moves weights from step to step, which {MODEL}{field}={getattr(config, field)!r} does not "
                f"follow; set {field}={plain!r}, or fsdp=None"
            )
    sharding = strategy.ddp_config.data_parallel_sharding_strategy
    if sharding not in ("no_shard", WHOLE):
        raise ValueError(
            f"{STRATEGY}ddp.data_parallel_sharding_strategy={sharding!r} is not supported; set it to {WHOLE!r}, which "
            "is what fsdp='megatron' stands for, or leave fsdp out: the distributed optimizer shards its state as well"
        )
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        raise ValueError(
            f"{_FSDP} gathers weights while others compute, which CUDA_DEVICE_MAX_CONNECTIONS=1 in the environment "
            "keeps from happening; unset it"
        )


def _check_recomputation(config: GPTConfig, strategy: nl.MegatronStrategy, transformer_engine: bool) -> None:
    """What Megatron's configuration itself, which checks names and that fields are there, lets pass."""
    if config.recompute_granularity == "selective":
        needy = [name for name in config.recompute_modules or () if name in _RECOMPUTED_BY_TRANSFORMER_ENGINE]
        if needy and not transformer_engine:
            raise ValueError(
                f"{MODEL}recompute_modules={config.recompute_modules} needs Transformer Engine's layers for "
                f"{' and '.join(needy)}; {_how_to_get_it()}, or leave them out"
            )
        return
    check_recomputed_layers(config, Degrees.of(strategy), config.recompute_num_layers)


def check_recomputed_layers(config: GPTConfig, degrees: Degrees, recomputed: int) -> None:
    """Check how many layers are recomputed together, or alone.

    Args:
        config: of the model.
        degrees: that divide its layers.
        recomputed: Megatron's ``recompute_num_layers``.

    Raises:
        ValueError: names the field, its value and the largest that fits.
    """
    layers = max(config.num_layers // (degrees.pipeline * degrees.virtual), 1)
    check_size(f"{MODEL}recompute_num_layers", recomputed)
    if recomputed > layers:
        raise ValueError(
            f"{MODEL}recompute_num_layers={recomputed} must be between 1 and the {layers} layers "
            f"of a pipeline stage (or virtual stage); set it to {layers}"
        )


def _check_overlap(config: GPTConfig, strategy: nl.MegatronStrategy, transformer_engine: bool) -> None:
    if config.tp_comm_overlap:
        if not transformer_engine:
            raise ValueError(
                f"{MODEL}tp_comm_overlap=True needs Transformer Engine's layers; {_how_to_get_it()}, or set it to False"
            )
        if strategy.tensor_model_parallel_size == 1 or not strategy.sequence_parallel:
            raise ValueError(
                f"{MODEL}tp_comm_overlap=True overlaps the exchange of sequence parallelism, but {STRATEGY}"
                f"tensor_model_parallel_size={strategy.tensor_model_parallel_size} and {STRATEGY}sequence_parallel="
                f"{strategy.sequence_parallel}; set both, or tp_comm_overlap=False"
            )
    if config.overlap_moe_expert_parallel_comm:
        raise ValueError(
            f"{MODEL}overlap_moe_expert_parallel_comm=True runs layers of two micro-batches in turn, which the "
            "bidirectional layers do not; set it to False; moe_shared_expert_overlap=True hides the exchange behind "
            "shared experts"
        )
    if config.moe_shared_expert_overlap and config.moe_token_dispatcher_type != "alltoall":
        raise ValueError(
            f"{MODEL}moe_shared_expert_overlap=True needs {MODEL}moe_token_dispatcher_type='alltoall', which is "
            f"{config.moe_token_dispatcher_type!r}; set it to 'alltoall'"
        )
    if config.overlap_p2p_comm and strategy.virtual_pipeline_model_parallel_size in (None, 1):
        raise ValueError(
            f"{MODEL}overlap_p2p_comm=True needs {STRATEGY}virtual_pipeline_model_parallel_size above 1, which "
            "overlap their messages by themselves; set overlap_p2p_comm=False"
        )
    ddp = strategy.ddp_config
    if isinstance(ddp, DistributedDataParallelConfig) and ddp.overlap_param_gather and not ddp.overlap_grad_reduce:
        raise ValueError(
            f"{STRATEGY}ddp.overlap_param_gather=True needs {STRATEGY}ddp.overlap_grad_reduce=True, which is False; "
            "set both or neither"
        )


def _how_to_get_it() -> str:
    if have_transformer_engine():
        return "set model.transformer_impl='transformer_engine'"
    return "install the extra `te` (pip install 'nemo-dllm[te]')"
