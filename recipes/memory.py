"""What a recipe needs of a GPU's memory, from sizes alone."""

from dataclasses import dataclass

from nemo.collections.llm import GPTConfig

from nemo_dllm.collections.diffusion.models.head import DEFAULT_CHUNK
from nemo_dllm.connectors.expert_keys import sparse_layers
from nemo_dllm.recipes.builder import Layout


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of a model by place, without biases of experts, which no gradient moves."""

    table: int
    """One of embedding and head, or the one that they share."""
    tables: int
    """How many there are."""
    layers: tuple[int, ...]
    """Of each layer, routed experts left out."""
    experts: tuple[int, ...]
    """Of each layer's routed experts; 0 in a dense layer."""
    final_norm: int

    @property
    def total(self) -> int:
        """Of the whole model."""
        return self.tables * self.table + sum(self.layers) + sum(self.experts) + self.final_norm


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the fullest GPU: of the first or the last pipeline stage, which holds a table beside its layers."""

    weights: float
    """bf16."""
    gradients: float
    """fp32."""
    optimizer: float
    """fp32 weights and Adam's two moments, split over the ranks that hold the same weights for different data."""
    activations: float
    """bf16, of all micro-batches under way."""
    logits: float
    """One chunk of logits in bf16; gradient of the head's weights in fp32 and in bf16."""

    @property
    def total(self) -> float:
        """Sum of all, bytes. The CUDA context, NCCL's buffers and fragmentation come on top."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits


def count_parameters(config: GPTConfig, vocab_size: int | None = None) -> ParameterCounts:
    """Count a model's parameters.

    Args:
        config: the model's configuration: RMS norms, gated MLPs, rotary positions.
        vocab_size: for a configuration that leaves it to the tokenizer.
    """
    hidden, head = config.hidden_size, config.kv_channels
    queries, keys = config.num_attention_heads * head, config.num_query_groups * head
    attention = 2 * hidden * (queries + keys) + 2 * hidden
    attention += 2 * head if config.qk_layernorm else 0
    attention += queries + 2 * keys if config.add_qkv_bias else 0
    dense = 3 * hidden * config.ffn_hidden_size
    sparse = experts = 0
    if config.num_moe_experts:
        sparse = hidden * (config.num_moe_experts + 3 * (config.moe_shared_expert_intermediate_size or 0))
        experts = config.num_moe_experts * 3 * hidden * config.moe_ffn_hidden_size
    layers = _sparse(config)
    return ParameterCounts(
        table=(config.vocab_size or vocab_size) * hidden,
        tables=1 if config.share_embeddings_and_output_weights else 2,
        layers=tuple(attention + (sparse if is_layer_sparse else dense) for is_layer_sparse in layers),
        experts=tuple(experts if is_layer_sparse else 0 for is_layer_sparse in layers),
        final_norm=hidden,
    )


def estimate_memory(
    config: GPTConfig, layout: Layout, positions: int, *, recompute: bool = False, vocab_size: int | None = None
) -> MemoryEstimate:
    """Estimate for training in bf16 with the distributed optimizer, experts in balance.

    Checked against three measurements of dense models (docs/recipes.md): at most 2 % below.

    Args:
        config: the model's configuration.
        layout: how the model is spread.
        positions: that the layers see per micro-batch; block diffusion's [noised | clean] rows have twice their tokens.
        recompute: keep each layer's input only, and compute the rest again.
        vocab_size: for a configuration that leaves it to the tokenizer.
    """
    counts = count_parameters(config, vocab_size)
    gpus = layout.num_nodes * layout.gpus_per_node
    tables = counts.tables if layout.pipeline == 1 else 1
    held = (sum(counts.layers) / layout.pipeline + tables * counts.table + counts.final_norm) / layout.tensor
    held_experts = sum(counts.experts) / (layout.pipeline * layout.expert * layout.expert_tensor)
    data_ranks = gpus / (layout.tensor * layout.pipeline)
    expert_data_ranks = gpus / (layout.pipeline * layout.expert * layout.expert_tensor)
    per_layer = [layer_bytes_per_position(config, sparse=sparse) for sparse in _sparse(config)]
    # As many micro-batches are under way as there are stages, each in one stage's share of the layers.
    kept = 2 * config.hidden_size * config.num_layers + max(per_layer) if recompute else sum(per_layer)
    return MemoryEstimate(
        weights=2 * (held + held_experts),
        gradients=4 * (held + held_experts),
        optimizer=12 * (held / data_ranks + held_experts / expert_data_ranks),
        activations=positions * kept / layout.tensor,
        logits=(2 * DEFAULT_CHUNK * counts.table / config.hidden_size + 6 * counts.table) / layout.tensor,
    )


def layer_bytes_per_position(config: GPTConfig, *, sparse: bool = False) -> int:
    """Bytes that one layer keeps of one position for its backward pass.

    Two bytes each of: two residuals and two norms' outputs; the fused projection and, rotated, queries, keys and
    values; attention's output; the two halves of an MLP's first product, and their product. A layer with experts keeps
    the latter, and an input, for each chosen expert, and scores of all experts, four bytes each: logits, softmax and
    weights.
    """
    queries = config.num_attention_heads * config.kv_channels
    keys = config.num_query_groups * config.kv_channels
    attention = 4 * config.hidden_size + 2 * (queries + 2 * keys) + queries
    if not sparse:
        return 2 * (attention + 3 * config.ffn_hidden_size)
    routed = config.moe_router_topk * (config.hidden_size + 3 * config.moe_ffn_hidden_size)
    shared = 3 * (config.moe_shared_expert_intermediate_size or 0)
    return 2 * (attention + routed + shared) + 12 * config.num_moe_experts


def _sparse(config: GPTConfig) -> list[bool]:
    """For each layer, whether it has routed experts."""
    with_experts = sparse_layers(config) if config.num_moe_experts else ()
    return [layer in with_experts for layer in range(config.num_layers)]
