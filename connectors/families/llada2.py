"""LLaDA2.0 and LLaDA2.1, and the layout in which dFactory trains them."""

from collections.abc import Mapping
from typing import Any

import torch

from nemo_dllm.connectors.config_table import ConfigTable, Field, HiddenPerHead
from nemo_dllm.connectors.config_values import COUNT, COUNT_OR_ZERO, FLAG, POSITIVE, SHARE
from nemo_dllm.connectors.decoder_fields import DECODER_FIELDS, one_per_head
from nemo_dllm.connectors.decoder_keys import (
    ATTENTION,
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
from nemo_dllm.connectors.key_table import KeyTable, QueryKeyValue, Row
from nemo_dllm.connectors.rope import Rope, partial_factor

HF_ATTENTION = f"{HF_LAYER}attention."


class StackedQueryKeyValue:
    """One tensor that stacks all query heads, all keys and all values, where Megatron goes group by group."""

    _parts = QueryKeyValue()

    def hf_shapes(self, shape, size, dimensions):
        return [(shape[0] * size, *shape[1:])]

    def read(self, read, shape, rank, dimensions):
        heads, groups, head_dim = dimensions.heads, dimensions.query_groups, dimensions.head_dim
        starts = (0, heads * head_dim, (heads + groups) * head_dim)

        def read_part(index, rows):
            return read(0, rows=slice(starts[index] + rows.start, starts[index] + rows.stop))

        return self._parts.read(read_part, shape, rank, dimensions)

    def write(self, parts, dimensions):
        return [torch.cat(self._parts.write(parts, dimensions))]


class DenseFirst:
    """The first ``first_k_dense_replace`` layers are dense, all others have experts."""

    def to_nemo(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See :class:`Rule`."""
        dense = hf.get("first_k_dense_replace", 0)
        return {"moe_layer_freq": layer_frequency([layer >= dense for layer in range(hf["num_hidden_layers"])])}

    def to_hf(self, config) -> dict[str, Any]:
        """See :class:`Rule`.

        Raises:
            ValueError: where a dense layer follows a sparse one.
        """
        sparse = sparse_layers(config)
        dense = config.num_layers - len(sparse)
        if sparse != list(range(dense, config.num_layers)):
            raise ValueError(
                f"moe_layer_freq={config.moe_layer_freq} has a dense layer behind a sparse one, which LLaDA2's "
                "config.json cannot say; let the dense layers be the first"
            )
        return {"first_k_dense_replace": dense}


class SharedExperts:
    """``num_shared_experts`` of the size of a routed expert, as one MLP; Megatron names its size."""

    def to_nemo(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See :class:`Rule`."""
        return {
            "moe_shared_expert_intermediate_size": (hf.get("num_shared_experts") or 0) * hf["moe_intermediate_size"]
            or None
        }

    def to_hf(self, config) -> dict[str, Any]:
        """See :class:`Rule`.

        Raises:
            ValueError: where the size is no multiple of a routed expert's.
        """
        size = config.moe_shared_expert_intermediate_size or 0
        if size % config.moe_ffn_hidden_size:
            raise ValueError(
                f"moe_shared_expert_intermediate_size={size} is no multiple of "
                f"moe_ffn_hidden_size={config.moe_ffn_hidden_size}, which LLaDA2's config.json cannot say"
            )
        # The class takes 0 for a shared expert without units.
        return {"num_shared_experts": size // config.moe_ffn_hidden_size or None}


class ExpertGroups:
    """``topk_group`` of ``n_group`` groups are chosen by the sum of their two best experts.

    Megatron sums as many as each chosen group gives experts on average, so that number must be two unless all groups
    are chosen.
    """

    def to_nemo(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See :class:`Rule`.

        Raises:
            ValueError: where Megatron would sum another number of experts.
        """
        groups, chosen, experts = hf.get("n_group", 8), hf.get("topk_group", 4), hf["num_experts_per_tok"]
        if chosen != groups and experts // chosen != 2:
            raise ValueError(
                f"topk_group={chosen} of n_group={groups} with num_experts_per_tok={experts} is not supported: "
                "two experts per chosen group are"
            )
        return {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}

    def to_hf(self, config) -> dict[str, Any]:
        """See :class:`Rule`."""
        return {"n_group": config.moe_router_num_groups, "topk_group": config.moe_router_group_topk}


def _nemo_config() -> type:
    from nemo_dllm.collections.diffusion.models.llada2 import LLaDA2Config

    return LLaDA2Config


def _key_table(config) -> KeyTable:
    layers, sparse = range(config.num_layers), sparse_layers(config)
    dense = [layer for layer in layers if layer not in sparse]
    shared = sparse if config.moe_shared_expert_intermediate_size else ()
    bias = f"{HF_LAYER}mlp.gate.{EXPERT_BIAS}" if config.moe_router_enable_expert_bias else None
    fused = (f"{HF_ATTENTION}query_key_value.weight",)
    norm, _, output = attention_rows(layers, output=f"{HF_ATTENTION}dense.weight")
    return decoder_key_table(
        config,
        [
            norm,
            Row((f"{ATTENTION}linear_qkv.weight",), fused, StackedQueryKeyValue(), layers),
            output,
            *query_key_norm_rows(
                layers,
                query_norm=f"{HF_ATTENTION}query_layernorm.weight",
                key_norm=f"{HF_ATTENTION}key_layernorm.weight",
            ),
            *dense_mlp_rows(dense),
            *router_rows(sparse, expert_bias=bias),
            *expert_rows(config, sparse),
            *shared_expert_rows(shared, shared=f"{HF_LAYER}mlp.shared_experts."),
        ],
        embedding="model.word_embeddings.weight",
    )


LLADA2 = Family(
    name="llada2",
    hf_classes=(
        HFClass("llada2_moe", "LLaDA2MoeModelLM", "block_causal"),
        HFClass("llada21_moe", "LLaDA2MoeModelLM", "block_causal"),
        # Stacked experts, see stacked_experts.py.
        HFClass("llada2_moe_veomni", "LLaDA2MoeModelLM", "block_causal", exported_as="llada2_moe"),
    ),
    nemo_config=_nemo_config,
    config=ConfigTable(
        fields=(
            *DECODER_FIELDS,
            Field("num_key_value_heads", "num_query_groups", default=one_per_head, kind=COUNT),
            Field("head_dim", "kv_channels", default=HiddenPerHead(), kind=COUNT),
            Field("partial_rotary_factor", "rotary_percent", default=partial_factor(0.5), kind=SHARE),
            Field("max_position_embeddings", "max_position_embeddings", binding=False, kind=COUNT),
            Field("num_experts", "num_moe_experts", kind=COUNT),
            Field("num_experts_per_tok", "moe_router_topk", kind=COUNT),
            Field("moe_intermediate_size", "moe_ffn_hidden_size", kind=COUNT),
            Field("routed_scaling_factor", "moe_router_topk_scaling_factor", default=2.5, kind=POSITIVE),
            Field("moe_router_enable_expert_bias", "moe_router_enable_expert_bias", default=True, kind=FLAG),
        ),
        fixed={
            "hidden_act": "silu",
            "use_bias": False,
            "use_qkv_bias": False,
            "use_qk_norm": True,
            "use_rmsnorm": True,
            "use_sliding_window": False,
            "norm_head": False,
            "norm_softmax": False,
            # The class renormalises whatever this says; SGLang does as it says.
            "norm_topk_prob": True,
            "embedding_dropout": 0.0,
            "score_function": "sigmoid",
        },
        rules=(Rope(), DenseFirst(), SharedExperts(), ExpertGroups()),
        kinds={
            "first_k_dense_replace": COUNT_OR_ZERO,
            "num_shared_experts": COUNT_OR_ZERO,
            "n_group": COUNT,
            "topk_group": COUNT,
        },
    ),
    key_table=_key_table,
    right_shift=False,
    mask_token="<|mask|>",
    block_size=32,
)
