"""Whether a model, its data and a layout of ranks go together, told before anything is built."""

import math
from dataclasses import dataclass

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
    nearest_fitting,
)
from nemo_dllm.collections.diffusion.models.layout_stages import check_stages
from nemo_dllm.collections.diffusion.objectives import Objective


@dataclass(frozen=True)
class Arrangement:
    """Ranks, what of a model each of them has, and the samples that they see."""

    degrees: Degrees
    devices: int
    """Ranks of a node."""
    nodes: int
    seq_length: int
    """Tokens of a sample."""
    micro_batch_size: int
    global_batch_size: int

    @property
    def ranks(self) -> int:
        """Of all nodes."""
        return self.devices * self.nodes


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
    arrangement = Arrangement(
        degrees,
        trainer.num_devices,
        trainer.num_nodes,
        data.seq_length,
        data.micro_batch_size,
        data.global_batch_size,
    )
    check_arrangement(config, objective, arrangement)
    check_stages(config, degrees, arrangement.ranks, trainer.strategy)
    if objective.block_size is not None and getattr(data, "document_boundaries", False) is None:
        raise ValueError(
            "data.document_boundaries=None: rows hold several documents, and block diffusion must know whether blocks "
            "may span them; set document_boundaries=True (blocks, positions and attention restart with each document) "
            "or False (a row is one text)"
        )
    return degrees


def check_arrangement(config: GPTConfig, objective: Objective, arrangement: Arrangement) -> None:
    """Check what sizes alone tell, but how layers are dealt out over stages.

    Args:
        config, objective: of the model.
        arrangement: of degrees of at least 1.

    Raises:
        ValueError: names the fields, their values and the nearest ones that fit.
    """
    degrees = arrangement.degrees
    _check_world(arrangement, bool(config.num_moe_experts))
    _check_heads_and_widths(config, arrangement)
    _check_experts(config, arrangement)
    _check_sequence(config, objective, arrangement)
    if degrees.virtual > 1:
        samples = arrangement.micro_batch_size * (arrangement.ranks // degrees.model_ranks)
        micro_batches = arrangement.global_batch_size // samples
        if micro_batches % degrees.pipeline:
            nearest = max(round(micro_batches / degrees.pipeline), 1) * degrees.pipeline * samples
            raise ValueError(
                f"data.global_batch_size={arrangement.global_batch_size} makes {micro_batches} micro-batches, which "
                f"virtual stages take in groups of {PIPELINE}={degrees.pipeline}; set data.global_batch_size={nearest}"
            )


def _check_world(arrangement: Arrangement, experts: bool) -> None:
    degrees, devices, nodes = arrangement.degrees, arrangement.devices, arrangement.nodes
    layouts = [("tensor x pipeline x context", (degrees.tensor, degrees.pipeline, degrees.context))]
    if experts:
        layouts.append(("expert tensor x expert x pipeline", (degrees.expert_tensor, degrees.expert, degrees.pipeline)))
    for names, sizes in layouts:
        product = math.prod(sizes)
        if devices * nodes % product:
            multiple = product // math.gcd(product, nodes)
            below = devices // multiple * multiple
            nearest = below if below and devices - below <= below + multiple - devices else below + multiple
            raise ValueError(
                f"trainer.devices x trainer.num_nodes = {devices} x {nodes} = {devices * nodes} is not divisible by "
                f"{names} parallel size = {' x '.join(map(str, sizes))} = {product}; change trainer.devices or the "
                f"sizes of trainer.strategy: the nearest is trainer.devices={nearest}"
            )


def _divided_by_tensor(config: GPTConfig) -> dict[str, int]:
    shared = "moe_shared_expert_intermediate_size"
    return {
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_query_groups or config.num_attention_heads,
        "ffn_hidden_size": config.ffn_hidden_size,
        shared: getattr(config, shared) or 0,
    }


def _nearest_tensor(config: GPTConfig, arrangement: Arrangement) -> str:
    """What to set instead of a tensor-parallel size: the nearest that no other check refuses."""
    degrees = arrangement.degrees
    sizes = [*_divided_by_tensor(config).values(), arrangement.ranks // (degrees.pipeline * degrees.context)]
    if config.num_moe_experts and degrees.expert_tensor == degrees.tensor:
        # Experts are cut as the rest is where nobody says otherwise.
        sizes += [_expert_width(config), arrangement.ranks // (degrees.pipeline * degrees.expert)]
    if degrees.sequence:
        sizes.append(arrangement.seq_length // degrees.context)
    nearest = nearest_fitting(degrees.tensor, lambda tensor: not any(size % tensor for size in sizes))
    alone = f" and {SEQUENCE}=False" if nearest == 1 and degrees.sequence else ""
    return f"set {TENSOR}={nearest}{alone}"


def _check_heads_and_widths(config: GPTConfig, arrangement: Arrangement) -> None:
    degrees, sizes = arrangement.degrees, _divided_by_tensor(config)
    heads, groups = sizes["num_attention_heads"], sizes["num_query_groups"]
    check_divisible(f"{MODEL}num_attention_heads", heads, f"{MODEL}num_query_groups", groups)
    for field, size in sizes.items():
        if size % degrees.tensor:
            raise ValueError(
                f"{MODEL}{field}={size} is not divisible by {TENSOR}={degrees.tensor}; "
                f"{_nearest_tensor(config, arrangement)}"
            )
    if degrees.sequence and degrees.tensor == 1:
        raise ValueError(f"{SEQUENCE}=True needs {TENSOR} above 1, which is 1; set {SEQUENCE}=False")


def _expert_width(config: GPTConfig) -> int:
    return config.moe_ffn_hidden_size or config.ffn_hidden_size


def _check_experts(config: GPTConfig, arrangement: Arrangement) -> None:
    degrees, ranks = arrangement.degrees, arrangement.ranks
    experts = config.num_moe_experts
    if not experts:
        if degrees.expert > 1:
            raise ValueError(f"{EXPERT}={degrees.expert}, but the model has no experts; set {EXPERT}=1")
        return
    left = [ranks // (degrees.pipeline * degrees.expert_tensor)]
    check_divisible(f"{MODEL}num_moe_experts", experts, EXPERT, degrees.expert, all_of=left)
    left = [ranks // (degrees.pipeline * degrees.expert)]
    width, whole = _expert_width(config), f"{MODEL}moe_ffn_hidden_size"
    check_divisible(whole, width, EXPERT_TENSOR, degrees.expert_tensor, all_of=left)
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


def _check_sequence(config: GPTConfig, objective: Objective, arrangement: Arrangement) -> None:
    degrees, seq_length = arrangement.degrees, arrangement.seq_length
    length, block = "data.seq_length", objective.block_size or 1
    if block > seq_length:
        raise ValueError(
            f"model.objective.block_size={block} is longer than {length}={seq_length}; choose a smaller block, or "
            "MaskedDiffusion, which is block diffusion with a single block"
        )
    left = arrangement.ranks // (degrees.tensor * degrees.pipeline)

    def fits(context: int) -> bool:
        # One rank has the whole sequence, whose last block may be short.
        return context == 1 or not (seq_length % (context * block) or left % context)

    shard = seq_length // degrees.context
    if seq_length % degrees.context:
        nearest = nearest_fitting(degrees.context, fits)
        raise ValueError(
            f"{length}={seq_length} is not divisible by {CONTEXT}={degrees.context}; set {CONTEXT}={nearest}"
        )
    if degrees.context > 1 and shard % block:
        raise ValueError(
            f"{length}={seq_length} over {CONTEXT}={degrees.context} makes shards of {shard} tokens, which cut a "
            f"block of model.objective.block_size={block}; set {CONTEXT}={nearest_fitting(degrees.context, fits)}"
        )
    if not degrees.sequence or shard % degrees.tensor == 0:
        return
    if degrees.context == 1:
        raise ValueError(
            f"{length}={seq_length} is not divisible by {TENSOR}={degrees.tensor}; "
            f"{_nearest_tensor(config, arrangement)}"
        )
    product, step = degrees.context * degrees.tensor, degrees.context * math.lcm(degrees.tensor, block)
    raise ValueError(
        f"{length}={seq_length} is not divisible by {CONTEXT} x {TENSOR} = {degrees.context} x {degrees.tensor} = "
        f"{product}; set {length}={max(round(seq_length / step), 1) * step}"
    )
