"""Whether a model, its data and a layout of ranks go together, told before anything is built."""

import lightning.pytorch as pl
from nemo.collections.llm.gpt.model.base import GPTConfig

from nemo_dllm.collections.diffusion.models.degrees import (
    CONTEXT,
    EXPERT,
    EXPERT_TENSOR,
    MODEL,
    PIPELINE,
    SEQUENCE,
    TENSOR,
    Degrees,
    check_divisible,
    check_size,
    nearest_of,
)
from nemo_dllm.collections.diffusion.models.layout_stages import check_stages
from nemo_dllm.collections.diffusion.objectives import Objective


def check_layout(config: GPTConfig, objective: Objective, trainer: pl.Trainer, data: pl.LightningDataModule) -> Degrees:
    """Check the sizes of a layout against the ranks, the model and the data. A vocabulary is padded, so it always fits.

    Args:
        config: of the model.
        objective: of the model.
        trainer: with a ``MegatronStrategy``.
        data: with ``seq_length``, ``micro_batch_size`` and ``global_batch_size``; of a ``document_boundaries`` that
            is None, block diffusion cannot tell whether blocks span documents.

    Returns:
        The sizes of the layout.

    Raises:
        ValueError: names the fields, their values and the nearest ones that fit.
    """
    degrees = Degrees.of(trainer.strategy)
    _check_world(degrees, trainer.num_devices, trainer.num_nodes, bool(config.num_moe_experts))
    _check_heads_and_widths(config, degrees)
    _check_experts(config, degrees)
    check_stages(config, degrees, trainer.strategy)
    if objective.block_size is not None:
        _check_blocks(objective.block_size, data)
    _check_sequence(objective, degrees, data.seq_length)
    if degrees.virtual > 1:
        samples = data.micro_batch_size * (trainer.world_size // degrees.model_ranks)
        micro_batches = data.global_batch_size // samples
        if micro_batches % degrees.pipeline:
            nearest = max(round(micro_batches / degrees.pipeline), 1) * degrees.pipeline * samples
            raise ValueError(
                f"data.global_batch_size={data.global_batch_size} makes {micro_batches} micro-batches, which virtual "
                f"stages take in groups of {PIPELINE}={degrees.pipeline}; set data.global_batch_size={nearest}"
            )
    return degrees


def _check_world(degrees: Degrees, devices: int, nodes: int, experts: bool) -> None:
    layouts = [("tensor x pipeline x context", (degrees.tensor, degrees.pipeline, degrees.context))]
    if experts:
        layouts.append(("expert tensor x expert x pipeline", (degrees.expert_tensor, degrees.expert, degrees.pipeline)))
    for names, sizes in layouts:
        product = sizes[0] * sizes[1] * sizes[2]
        if devices * nodes % product:
            fitting = (n for n in range(1, devices + product + 1) if n * nodes % product == 0)
            raise ValueError(
                f"trainer.devices x trainer.num_nodes = {devices} x {nodes} = {devices * nodes} is not divisible by "
                f"{names} parallel size = {' x '.join(map(str, sizes))} = {product}; change trainer.devices or the "
                f"sizes of trainer.strategy: the nearest is trainer.devices={nearest_of(devices, fitting)}"
            )


def _check_heads_and_widths(config: GPTConfig, degrees: Degrees) -> None:
    heads, groups = config.num_attention_heads, config.num_query_groups or config.num_attention_heads
    check_divisible(f"{MODEL}num_attention_heads", heads, f"{MODEL}num_query_groups", groups)
    shared = "moe_shared_expert_intermediate_size"
    divided = {
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "ffn_hidden_size": config.ffn_hidden_size,
        shared: getattr(config, shared) or 0,
    }
    for field, size in divided.items():
        check_divisible(MODEL + field, size, TENSOR, degrees.tensor, all_of=divided.values())
    if degrees.sequence and degrees.tensor == 1:
        raise ValueError(f"{SEQUENCE}=True needs {TENSOR} above 1, which is 1; set {SEQUENCE}=False")


def _check_experts(config: GPTConfig, degrees: Degrees) -> None:
    experts = config.num_moe_experts
    if not experts:
        if degrees.expert > 1:
            raise ValueError(f"{EXPERT}={degrees.expert}, but the model has no experts; set {EXPERT}=1")
        return
    check_divisible(f"{MODEL}num_moe_experts", experts, EXPERT, degrees.expert)
    width = config.moe_ffn_hidden_size or config.ffn_hidden_size
    check_divisible(f"{MODEL}moe_ffn_hidden_size", width, EXPERT_TENSOR, degrees.expert_tensor)
    frequency = config.moe_layer_freq
    if isinstance(frequency, list) and len(frequency) != config.num_layers:
        raise ValueError(
            f"{MODEL}moe_layer_freq={frequency} is of {len(frequency)} layers, {MODEL}num_layers={config.num_layers}; "
            "give a 1 for each layer with experts and a 0 for each other"
        )
    topk = f"{MODEL}moe_router_topk"
    check_size(topk, config.moe_router_topk)
    if config.moe_router_topk > experts:
        raise ValueError(
            f"{topk}={config.moe_router_topk} experts of a token are more than {MODEL}num_moe_experts={experts}; "
            f"set {topk}={experts}"
        )
    if degrees.tensor > 1 and not degrees.sequence:
        raise ValueError(
            f"{TENSOR}={degrees.tensor} with experts needs {SEQUENCE}=True, which is False; set it to True"
        )


def _check_blocks(block_size: int, data: pl.LightningDataModule) -> None:
    if block_size > data.seq_length:
        raise ValueError(
            f"model.objective.block_size={block_size} is longer than data.seq_length={data.seq_length}; choose a "
            "smaller block, or MaskedDiffusion, which is block diffusion with a single block"
        )
    if getattr(data, "document_boundaries", False) is None:
        raise ValueError(
            "data.document_boundaries=None: rows hold several documents, and block diffusion must know whether blocks "
            "may span them; set document_boundaries=True (blocks, positions and attention restart with each document) "
            "or False (a row is one text)"
        )


def _check_sequence(objective: Objective, degrees: Degrees, seq_length: int) -> None:
    length, block = "data.seq_length", objective.block_size or 1
    # One rank has the whole sequence, whose last block may be short.
    fitting = [n for n in range(1, seq_length + 1) if n == 1 or seq_length % (n * block) == 0]
    nearest = f"set {CONTEXT}={nearest_of(degrees.context, iter(fitting))}"
    if seq_length % degrees.context:
        raise ValueError(f"{length}={seq_length} is not divisible by {CONTEXT}={degrees.context}; {nearest}")
    shard = seq_length // degrees.context
    if degrees.context not in fitting:
        raise ValueError(
            f"{length}={seq_length} over {CONTEXT}={degrees.context} makes shards of {shard} tokens, which cut a "
            f"block of model.objective.block_size={block}; {nearest}"
        )
    if not degrees.sequence:
        return
    if degrees.context == 1:
        check_divisible(length, seq_length, TENSOR, degrees.tensor)
    elif shard % degrees.tensor:
        fits = degrees.context * degrees.tensor
        raise ValueError(
            f"{length}={seq_length} is not divisible by {CONTEXT} x {TENSOR} = {degrees.context} x "
            f"{degrees.tensor} = {fits}; set {length}={max(round(seq_length / fits), 1) * fits}"
        )
