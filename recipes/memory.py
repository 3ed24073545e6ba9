"""What a recipe needs of a GPU's memory, from sizes alone."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nemo.collections.llm import GPTConfig

from nemo_dllm.collections.diffusion.models.head import DEFAULT_CHUNK
from nemo_dllm.collections.diffusion.objectives import Objective
from nemo_dllm.connectors.expert_keys import sparse_layers
from nemo_dllm.recipes.activations import Recomputation, chunk_bytes, layer_bytes
from nemo_dllm.recipes.builder import Layout

GATHERED_AHEAD = 500_000_000
"""Weights that Megatron-FSDP gathers before they are needed, at least."""
REDUCED_BEHIND = 1_000_000_000
"""Gradients that Megatron-FSDP lets wait for their reduction before it waits itself."""


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of a model by place, without biases of experts, which no gradient moves."""

    table: int
    """One of embedding and head, or the one that they share."""
    tables: int
    """How many there are."""
    layers: tuple[int, ...]
    """Of each layer, what tensor-parallel ranks divide, routed experts left out."""
    replicated: tuple[int, ...]
    """Of each layer, what each of them holds whole: norms and router."""
    experts: tuple[int, ...]
    """Of each layer's routed experts; 0 in a dense layer."""
    final_norm: int

    @property
    def total(self) -> int:
        """Of the whole model."""
        layers = sum(self.layers) + sum(self.replicated) + sum(self.experts)
        return self.tables * self.table + layers + self.final_norm


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the fullest GPU, of the first or the last pipeline stage, at the fullest moment of a step."""

    weights: float
    """bf16; of Megatron-FSDP, the shards and what is gathered of them."""
    gradients: float
    """fp32; of Megatron-FSDP, the shards and what is not reduced to them yet."""
    optimizer: float
    """fp32 weights and Adam's two moments, split over the ranks that hold the same weights for different data."""
    activations: float
    """bf16, of all micro-batches under way, and what the backward pass of a layer adds."""
    logits: float
    """Chunks of logits in bf16; hidden states of the head, and their gradient; gradient of its weights."""

    @property
    def total(self) -> float:
        """Sum of all, bytes. The CUDA context, NCCL's buffers and fragmentation come on top."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits


def count_adapters(config: GPTConfig, rank: int, target_modules: Sequence[str]) -> int:
    """Count the parameters of low-rank adapters.

    Args:
        config: the model's configuration: gated MLPs.
        rank: of the adapters.
        target_modules: names of linear layers, or patterns of full names that end in one; routed experts have none.
    """
    hidden, queries = config.hidden_size, config.num_attention_heads * config.kv_channels
    keys_values, units = 2 * config.num_query_groups * config.kv_channels, config.ffn_hidden_size
    ends = {
        "linear_qkv": hidden + queries + keys_values,
        "linear_proj": queries + hidden,
        "linear_fc1": hidden + 2 * units,
        "linear_fc2": units + hidden,
    }
    return config.num_layers * rank * sum(ends.get(name.rpartition(".")[2], 0) for name in target_modules)


class Held(NamedTuple):
    """Parameters on one rank."""

    dense: float
    """All but routed experts."""
    experts: float
    table: float
    """Its rows of one of embedding and head."""
    layer: float
    """Of the largest layer, experts included."""


def count_parameters(config: GPTConfig, vocab_size: int | None = None) -> ParameterCounts:
    """Count a model's parameters.

    Args:
        config: the model's configuration: RMS norms, gated MLPs, rotary positions.
        vocab_size: for a configuration that leaves it to the tokenizer.
    """
    hidden, head = config.hidden_size, config.kv_channels
    queries, keys = config.num_attention_heads * head, config.num_query_groups * head
    attention = 2 * hidden * (queries + keys)
    attention += queries + 2 * keys if config.add_qkv_bias else 0
    norms = 2 * hidden + (2 * head if config.qk_layernorm else 0)
    dense = 3 * hidden * config.ffn_hidden_size
    router = shared = experts = 0
    if config.num_moe_experts:
        router = hidden * config.num_moe_experts
        shared = 3 * hidden * (config.moe_shared_expert_intermediate_size or 0)
        experts = config.num_moe_experts * 3 * hidden * config.moe_ffn_hidden_size
    layers = _sparse(config)
    return ParameterCounts(
        table=(config.vocab_size or vocab_size) * hidden,
        tables=1 if config.share_embeddings_and_output_weights else 2,
        layers=tuple(attention + (shared if is_layer_sparse else dense) for is_layer_sparse in layers),
        replicated=tuple(norms + (router if is_layer_sparse else 0) for is_layer_sparse in layers),
        experts=tuple(experts if is_layer_sparse else 0 for is_layer_sparse in layers),
        final_norm=hidden,
    )


def estimate_training_memory(
    config: GPTConfig,
    objective: Objective,
    layout: Layout,
    *,
    seq_length: int,
    micro_batch_size: int,
    global_batch_size: int,
    recompute: Recomputation | None = None,
    vocab_size: int | None = None,
    adapters: int | None = None,
) -> MemoryEstimate:
    """Estimate for a model, its objective and the sizes of its data; see :func:`estimate_memory`.

    Args:
        config: the model's configuration.
        objective: of the model.
        layout: how the model is spread.
        seq_length: tokens of a sample.
        micro_batch_size: samples.
        global_batch_size: samples of a step.
        recompute: None is what the configuration says.
        vocab_size: for a configuration that leaves it to the tokenizer.
        adapters: parameters that are trained beside the model's, which are frozen then; None trains the model's.
    """
    scored = micro_batch_size * seq_length * objective.views
    ranks = layout.gpus // layout.model_gpus
    return estimate_memory(
        config,
        layout,
        positions=scored * (2 if objective.block_size else 1),
        scored=scored,
        micro_batches=max(global_batch_size // (micro_batch_size * max(ranks, 1)), 1),
        recompute=recompute,
        vocab_size=vocab_size,
        adapters=adapters,
    )


def estimate_memory(
    config: GPTConfig,
    layout: Layout,
    positions: int,
    *,
    scored: int | None = None,
    micro_batches: int | None = None,
    recompute: Recomputation | None = None,
    vocab_size: int | None = None,
    adapters: int | None = None,
) -> MemoryEstimate:
    """Estimate for training in bf16 with the distributed optimizer, experts in balance.

    Against what was measured on one GPU and with data parallelism (docs/recipes.md): within 1 % for dense models, and
    6 % with experts.

    Args:
        config: the model's configuration.
        layout: how the model is spread.
        positions: that the layers see per micro-batch, all context-parallel ranks together; block diffusion's
            [noised | clean] rows have twice their tokens.
        scored: of them, those that the head may have to score; None is all.
        micro_batches: of a step; None is as many as pipeline stages can have under way.
        recompute: what is computed again instead of being kept; None is what the configuration says.
        vocab_size: for a configuration that leaves it to the tokenizer.
        adapters: see :func:`estimate_training_memory`; ranks are taken to hold equal parts of them.
    """
    recompute = recompute or Recomputation.of(config)
    counts = count_parameters(config, vocab_size)
    layers = [layer_bytes(config, layout, sparse=sparse, recomputed=recompute.modules) for sparse in _sparse(config)]
    kept, working = chunk_bytes(layers, layout.pipeline * layout.virtual, recompute)
    here = positions / layout.context
    scored_here = (positions if scored is None else scored) / layout.context
    phases: list[MemoryEstimate] = []
    for stage in {0, layout.pipeline - 1}:
        held = _held(counts, layout, counts.tables if layout.pipeline == 1 else 1)
        stored = here * kept * _chunks_under_way(layout, stage, micro_batches)
        trained = held.table if adapters is None else 0.0
        head = _head_bytes(config, layout, held, trained, here, scored_here) if stage == layout.pipeline - 1 else 0.0
        # A table that is both embedding and head has its gradient when the embedding's is there too.
        waiting = 2 * trained if layout.pipeline == counts.tables == 1 else 0.0
        if layout.fully_sharded:
            phases += _fully_sharded_phases(counts, layout, held, stored, here * working, head, waiting)
        else:
            state = _state(layout, held, adapters)
            phases.append(MemoryEstimate(*state, activations=stored, logits=head))
            phases.append(MemoryEstimate(*state, activations=stored + here * working, logits=waiting))
    return max(phases, key=lambda phase: phase.total)


def _held(counts: ParameterCounts, layout: Layout, tables: int) -> Held:
    """Parameters of one pipeline stage on one rank; ``tables`` are those of the stage."""
    per_layer = [
        divided / layout.tensor + replicated + experts / (layout.expert * layout.expert_tensor)
        for divided, replicated, experts in zip(counts.layers, counts.replicated, counts.experts, strict=True)
    ]
    experts = sum(counts.experts) / (layout.expert * layout.expert_tensor)
    table = counts.table / layout.tensor
    return Held(
        dense=(sum(per_layer) - experts) / layout.pipeline + tables * table + counts.final_norm,
        experts=experts / layout.pipeline,
        table=table,
        layer=max(per_layer),
    )


def _state(layout: Layout, held: Held, adapters: int | None) -> tuple[float, float, float]:
    """Bytes of weights, of gradients and of the optimizer, whose shares context-parallel ranks take as well."""
    if adapters is not None:
        here = adapters / (layout.tensor * layout.pipeline)
        return 2 * (held.dense + held.experts + here), 4 * here, 12 * adapters / layout.gpus
    per_stage = layout.gpus / layout.pipeline
    optimizer = held.dense / (per_stage / layout.tensor)
    optimizer += held.experts / (per_stage / (layout.expert * layout.expert_tensor))
    return 2 * (held.dense + held.experts), 4 * (held.dense + held.experts), 12 * optimizer


def _chunks_under_way(layout: Layout, stage: int, micro_batches: int | None) -> int:
    """Forward passes of model chunks whose backward passes are still to come, at most."""
    behind = layout.pipeline - stage - 1
    if layout.virtual == 1:
        return min(behind + 1, micro_batches or behind + 1)
    under_way = 2 * behind + (layout.virtual - 1) * layout.pipeline + 1
    return min(under_way, layout.virtual * micro_batches if micro_batches else under_way)


def _head_bytes(
    config: GPTConfig, layout: Layout, held: Held, trained: float, positions: float, scored: float
) -> float:
    """What the head needs when its input is there: chunks of logits, of which the last goes when the next has come.

    Beside them the gradient of its weights, fp32 first and then in bf16 too; hidden states before and after the final
    norm; of the scored positions, hidden states and their gradient. Sequence parallelism gathers all hidden states.
    """
    chunk = 2 * min(DEFAULT_CHUNK, scored) * held.table / config.hidden_size
    logits = max((2 if scored > DEFAULT_CHUNK else 1) * chunk + 4 * trained, chunk + 6 * trained)
    gathered = positions if layout.sequence and layout.tensor > 1 else 0
    norm = 2 * scored / (layout.tensor if layout.sequence else 1)
    return logits + 2 * config.hidden_size * (2 * scored + gathered + norm)


def _fully_sharded_phases(
    counts: ParameterCounts, layout: Layout, held: Held, stored: float, working: float, head: float, waiting: float
) -> Iterator[MemoryEstimate]:
    """Under Megatron-FSDP: with the head at work, and with each number of layers done of the backward pass.

    The tables stay gathered for the whole step. Gradients of a layer are there in bf16 until it is done, then wait in
    fp32, the head's first.
    """
    ranks = layout.gpus / layout.tensor
    shard = (held.dense + held.experts) / ranks
    tables = 2 * counts.tables * held.table
    yield MemoryEstimate(2 * shard + tables, 4 * shard, 12 * shard, stored, head)
    num_layers = len(counts.layers)
    gathered = 1 + math.ceil(GATHERED_AHEAD / held.layer)
    for done in range(num_layers + 1):
        left = num_layers - done
        before = (0 if waiting else held.table) + done * held.layer
        current = held.layer if left else held.table
        reduced = min(before, REDUCED_BEHIND + held.layer) + current
        yield MemoryEstimate(
            weights=2 * (shard + min(left, gathered) * held.layer) + tables,
            gradients=4 * (shard + reduced) + 2 * current,
            optimizer=12 * shard,
            activations=stored * left / num_layers + (working if left else 0),
            logits=waiting,
        )


def _sparse(config: GPTConfig) -> list[bool]:
    """For each layer, whether it has routed experts."""
    with_experts = sparse_layers(config) if config.num_moe_experts else ()
    return [layer in with_experts for layer in range(config.num_layers)]
