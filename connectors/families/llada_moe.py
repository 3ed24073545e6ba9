"""LLaDA-MoE."""

from collections.abc import Mapping
from typing import Any

from nemo_dllm.connectors.config_table import ConfigTable, Field, HiddenPerHead
from nemo_dllm.connectors.config_values import COUNT, COUNT_OR_ZERO, FLAG, NUMBERS, SHARE
from nemo_dllm.connectors.decoder_fields import DECODER_FIELDS, one_per_head
from nemo_dllm.connectors.decoder_keys import (
    HF_LAYER,
    attention_rows,
    decoder_key_table,
    dense_mlp_rows,
    query_key_norm_rows,
)
from nemo_dllm.connectors.expert_keys import (
    EXPERT_BIAS,
    expert_rows,
    layer_frequency,
    router_rows,
    shared_expert_rows,
    sparse_layers,
)
from nemo_dllm.connectors.family import Family, HFClass
from nemo_dllm.connectors.key_table import KeyTable
from nemo_dllm.connectors.rope import Rope, partial_factor


class LayerFrequency:
    """Which layers have experts: one number per layer, 0 for dense."""

    def to_nemo(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See :class:`Rule`.

        Raises:
            ValueError: where the list has not one number for each layer.
        """
        layers, listed = hf["num_hidden_layers"], hf.get("moe_layer_freq") or ()
        if len(listed) != layers:
            raise ValueError(f"moe_layer_freq={listed} must have a number for each of num_hidden_layers={layers}")
        return {"moe_layer_freq": layer_frequency([number != 0 for number in listed])}

    def to_hf(self, config) -> dict[str, Any]:
        """See :class:`Rule`."""
        sparse = sparse_layers(config)
        return {"moe_layer_freq": [int(layer in sparse) for layer in range(config.num_layers)]}


def _nemo_config() -> type:
    from nemo_dllm.collections.diffusion.models.llada_moe import LLaDAMoEConfig

    return LLaDAMoEConfig


def _key_table(config) -> KeyTable:
    layers, sparse = range(config.num_layers), sparse_layers(config)
    dense = [layer for layer in layers if layer not in sparse]
    shared = sparse if config.moe_shared_expert_intermediate_size else ()
    bias = f"{HF_LAYER}mlp.{EXPERT_BIAS}" if config.softmax_expert_bias else None
    return decoder_key_table(
        config,
        [
            *attention_rows(layers),
            *query_key_norm_rows(layers),
            *dense_mlp_rows(dense),
            *router_rows(sparse, expert_bias=bias),
            *expert_rows(config, sparse),
            *shared_expert_rows(shared, shared=f"{HF_LAYER}shared_expert."),
        ],
    )


LLADA_MOE = Family(
    name="llada_moe",
    # Published under the model_type of dense LLaDA; dllm calls it by a name of its own.
    hf_classes=(
        HFClass("llada", "LLaDAMoEModelLM", "bidirectional"),
        HFClass("lladamoe", "LLaDAMoEModelLM", "bidirectional"),
    ),
    nemo_config=_nemo_config,
    config=ConfigTable(
        fields=(
            *(f for f in DECODER_FIELDS if f.nemo != "ffn_hidden_size"),
            Field("dense_intermediate_size", "ffn_hidden_size", kind=COUNT),
            Field("num_key_value_heads", "num_query_groups", default=one_per_head, kind=COUNT),
            Field("partial_rotary_factor", "rotary_percent", default=partial_factor(1.0), kind=SHARE),
            Field("max_position_embeddings", "max_position_embeddings", binding=False, kind=COUNT),
            Field("num_experts", "num_moe_experts", kind=COUNT),
            Field("num_experts_per_tok", "moe_router_topk", kind=COUNT),
            Field("expert_intermediate_size", "moe_ffn_hidden_size", kind=COUNT),
            Field(
                "shared_expert_intermediate_size",
                "moe_shared_expert_intermediate_size",
                default=None,
                kind=COUNT_OR_ZERO,
            ),
            Field("moe_router_enable_expert_bias", "softmax_expert_bias", default=False, kind=FLAG),
        ),
        fixed={"hidden_act": "silu", "attention_bias": False, "clip_qkv": None, "qk_layernorm": True},
        rules=(Rope(), HiddenPerHead(), LayerFrequency()),
        kinds={"moe_layer_freq": NUMBERS},
    ),
    key_table=_key_table,
    right_shift=False,
    mask_token="<|mask|>",
)
