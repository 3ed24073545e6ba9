"""Rows of key tables that families with experts share: Megatron's MoE layers on one side, ``mlp.experts`` on the other.

Names of Hugging Face tensors are templates with ``{layer}`` and ``{expert}``; a family that calls them otherwise passes
its own.
"""

from collections.abc import Collection, Sequence

from nemo_dllm.connectors.decoder_keys import HF_LAYER, MLP
from nemo_dllm.connectors.key_table import GatedPair, Replicated, Row, SplitColumns

# Ends the names of tensors that are no parameters: they stay fp32, and checkpoints may hold them in another dtype.
EXPERT_BIAS = "expert_bias"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def sparse_layers(config) -> list[int]:
    """The layers of a NeMo configuration that have experts, counting from 0; all others have a dense MLP."""
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        return list(range(0, config.num_layers, frequency))
    return [layer for layer, sparse in enumerate(frequency) if sparse]


def layer_frequency(sparse: Sequence[bool]) -> int | list[int]:
    """NeMo's ``moe_layer_freq``: 1 where all layers are sparse, else 1 for each sparse layer and 0 for each dense."""
    return 1 if all(sparse) else [int(layer) for layer in sparse]


def expert_rows(config, layers: Collection[int], *, experts: str = f"{HF_LAYER}mlp.experts.{{expert}}.") -> list[Row]:
    """The routed experts, each a gated MLP.

    Args:
        config: NeMo's configuration.
        layers: the sparse layers.
        experts: prefix of an expert's tensors.
    """
    gate, up, down = (f"{experts}{projection}.weight" for projection in PROJECTIONS)
    prefix, numbers = f"{MLP}experts.", range(config.num_moe_experts)
    return [
        Row(
            (f"{prefix}local_experts.{{expert}}.linear_fc1.weight", f"{prefix}linear_fc1.weight{{expert}}"),
            (gate, up),
            GatedPair(),
            layers,
            numbers,
        ),
        Row(
            (f"{prefix}local_experts.{{expert}}.linear_fc2.weight", f"{prefix}linear_fc2.weight{{expert}}"),
            (down,),
            SplitColumns(),
            layers,
            numbers,
        ),
    ]


def router_rows(
    layers: Collection[int],
    *,
    norm: str = f"{HF_LAYER}post_attention_layernorm.weight",
    router: str = f"{HF_LAYER}mlp.gate.weight",
    expert_bias: str | None = None,
) -> list[Row]:
    """Norm in front of a sparse layer's MLP, the router and, where it is named, its expert bias."""
    rows = [
        Row(("decoder.layers.{layer}.pre_mlp_layernorm.weight",), (norm,), Replicated(), layers),
        Row((f"{MLP}router.weight",), (router,), Replicated(), layers),
    ]
    if expert_bias is not None:
        rows.append(Row((f"{MLP}router.{EXPERT_BIAS}",), (expert_bias,), Replicated(), layers))
    return rows


def shared_expert_rows(layers: Collection[int], *, shared: str) -> list[Row]:
    """The expert that every token passes through; ``shared`` is the prefix of its tensors."""
    gate, up, down = (f"{shared}{projection}.weight" for projection in PROJECTIONS)
    return [
        Row((f"{MLP}shared_experts.linear_fc1.weight",), (gate, up), GatedPair(), layers),
        Row((f"{MLP}shared_experts.linear_fc2.weight",), (down,), SplitColumns(), layers),
    ]
