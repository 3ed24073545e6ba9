"""What layers keep for their backward pass, and what they need beside it while they work, from sizes alone."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from nemo.collections.llm import GPTConfig

from nemo_dllm.recipes.builder import Layout


@dataclass(frozen=True)
class Recomputation:
    """What is computed a second time instead of being kept; fields are those of ``model.config.recompute_*``."""

    granularity: str | None = None
    """``full``: whole layers; ``selective``: the ``modules`` of each layer."""
    method: str | None = None
    """``uniform``: groups of ``num_layers``, all of them; ``block``: the first ``num_layers`` of each model chunk."""
    num_layers: int | None = None
    modules: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: GPTConfig) -> "Recomputation":
        """That of a model's configuration."""
        if config.recompute_granularity == "selective":
            return cls("selective", modules=tuple(config.recompute_modules or ("core_attn",)))
        if config.recompute_granularity == "full":
            return cls("full", config.recompute_method, config.recompute_num_layers)
        return cls()

    def share(self, layers: int) -> float:
        """Of the layers of a model chunk, those that are recomputed whole."""
        if self.granularity != "full":
            return 0.0
        return 1.0 if self.method == "uniform" else min(self.num_layers, layers) / layers


NOTHING = Recomputation()
EVERY_LAYER = Recomputation("full", "uniform", 1)


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of a layer on one rank, per position that the rank holds."""

    entry: float
    """Its input."""
    kept: float
    """From the forward to the backward pass, the input among it."""
    dropped: float
    """Beyond that, what selective recomputation brings back for the backward pass."""
    working: float
    """Beyond all that, at the worst moment of the backward pass."""

    @property
    def whole(self) -> float:
        """What the backward pass reads."""
        return self.kept + self.dropped


def layer_bytes(
    config: GPTConfig, layout: Layout, *, sparse: bool = False, recomputed: Collection[str] = ()
) -> LayerBytes:
    """Count, in bf16, what one layer keeps.

    Values of two bytes: two residuals and two norms' outputs; the fused projection, rotated queries, keys and values;
    attention's output; the two halves of an MLP's first product, and their product. A layer with experts keeps the
    latter, and an input, for each chosen expert, and scores of all experts, four bytes each: logits, softmax and
    weights. Keys and values that were gathered over context-parallel ranks are kept whole.

    Args:
        config: the model's configuration: RMS norms, gated MLPs.
        layout: how the model is spread; experts are taken to be in balance.
        sparse: whether the layer has routed experts.
        recomputed: modules that are recomputed, as in ``config.recompute_modules``.
    """
    tensor = layout.tensor
    hidden = config.hidden_size / (tensor if layout.sequence else 1)
    queries = config.num_attention_heads * config.kv_channels / tensor
    keys_values = 2 * config.num_query_groups * config.kv_channels / tensor
    gathered = keys_values * layout.context
    parts = _expert_parts(config, layout, hidden) if sparse else {"mlp": 3 * config.ffn_hidden_size / tensor}
    feed_forward = parts["moe" if sparse else "mlp"]
    whole = 4 * hidden + 3 * queries + keys_values + gathered + feed_forward
    parts["core_attn"] = gathered - keys_values
    dropped = sum(size for name, size in parts.items() if name in recomputed)
    # When attention's turn comes, the MLP has given back what it kept.
    attention = _attention_working(queries, keys_values, gathered, layout) - feed_forward - 2 * hidden
    working = 2 * hidden + max(_feed_forward_working(config, layout, sparse), attention)
    return LayerBytes(2 * hidden, 2 * (whole - dropped), 2 * dropped, 2 * working)


def _expert_parts(config: GPTConfig, layout: Layout, hidden: float) -> dict[str, float]:
    """Values of a layer with experts, and of those of its parts that may be recomputed alone."""
    shared = 3 * (config.moe_shared_expert_intermediate_size or 0) / layout.tensor
    scores = 6 * config.num_moe_experts * hidden / config.hidden_size
    width = config.moe_ffn_hidden_size / layout.expert_tensor
    return {
        "moe": _routed(config, layout, config.hidden_size + 3 * width) + shared + scores,
        "moe_act": _routed(config, layout, width),
        "shared_experts": shared,
        "layernorm": hidden,
    }


def _routed(config: GPTConfig, layout: Layout, width: float) -> float:
    """Values of ``width`` for each token and chosen expert; ranks that cut experts up see each other's tokens."""
    return config.moe_router_topk * width * layout.expert_tensor / layout.tensor


def _attention_working(queries: float, keys_values: float, gathered: float, layout: Layout) -> float:
    """The gradients of output, queries (in fp32 and in bf16), keys and values; or of them and the fused projection.

    Gathered keys and values were one tensor, so the gradients of both are padded to its size.
    """
    padded = 2 * gathered if layout.context > 1 else 0
    return max(4 * queries + gathered, queries + gathered + padded, 2 * (queries + keys_values))


def _feed_forward_working(config: GPTConfig, layout: Layout, sparse: bool) -> float:
    """The gradients of an MLP's products, and what sequence parallelism gathers around them.

    Of experts, three copies of the tokens on their way.
    """
    if sparse:
        return 3 * _routed(config, layout, config.hidden_size)
    width = config.ffn_hidden_size / layout.tensor
    whole = config.hidden_size if layout.sequence and layout.tensor > 1 else 0
    return max(2 * width, width + whole, 2 * whole - width)


def chunk_bytes(layers: Sequence[LayerBytes], chunks: int, recompute: Recomputation) -> tuple[float, float]:
    """Bytes per position that a model chunk keeps of one micro-batch, and those that its backward pass adds.

    Args:
        layers: of the whole model.
        chunks: into which it is cut: pipeline stages times virtual ones.
        recompute: what is not kept.
    """
    per_chunk = max(len(layers) // chunks, 1)
    kept = sum(layer.kept for layer in layers) / chunks
    working = max(layer.dropped + layer.working for layer in layers)
    if recompute.granularity != "full":
        return kept, working
    entry, largest = layers[0].entry, max(layer.whole + layer.working for layer in layers)
    number = min(recompute.num_layers, per_chunk)
    if recompute.method == "uniform":
        whole = max(layer.whole for layer in layers)
        return -(-per_chunk // number) * entry, (number - 1) * whole + largest - entry
    # Layers that are kept come after those that are not, and are done with when these are computed again.
    kept *= 1 - number / per_chunk
    return number * entry + kept, max(working if kept else 0, largest - entry - kept)
