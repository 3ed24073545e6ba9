"""Qwen3 with experts, and the same weights as a diffusion model."""

from collections.abc import Mapping
from typing import Any

from nemo_dllm.connectors.a2d import a2d_class
from nemo_dllm.connectors.config_table import ConfigTable, Field
from nemo_dllm.connectors.config_values import COUNT, FLAG, NUMBERS
from nemo_dllm.connectors.decoder_fields import DECODER_FIELDS, one_per_head
from nemo_dllm.connectors.decoder_keys import (
    attention_rows,
    decoder_key_table,
    dense_mlp_rows,
    query_key_norm_rows,
)
from nemo_dllm.connectors.expert_keys import expert_rows, layer_frequency, router_rows, sparse_layers
from nemo_dllm.connectors.family import Family, HFClass
from nemo_dllm.connectors.key_table import KeyTable
from nemo_dllm.connectors.rope import Rope


class SparseStep:
    """Which layers have experts: every ``decoder_sparse_step``-th that is not among ``mlp_only_layers``."""

    def to_nemo(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See :class:`Rule`."""
        step, dense = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or ()
        sparse = [layer not in dense and (layer + 1) % step == 0 for layer in range(hf["num_hidden_layers"])]
        return {"moe_layer_freq": layer_frequency(sparse)}

    def to_hf(self, config) -> dict[str, Any]:
        """See :class:`Rule`."""
        sparse = sparse_layers(config)
        dense = [layer for layer in range(config.num_layers) if layer not in sparse]
        return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


class TopKNormalisation:
    """Whether the weights of the chosen experts sum to one (``norm_topk_prob``) or are probabilities over all experts.

    A softmax over the logits of the chosen experts is the softmax over all, renormalised over the chosen.
    """

    def to_nemo(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See :class:`Rule`."""
        return {"moe_router_pre_softmax": not hf.get("norm_topk_prob", False)}

    def to_hf(self, config) -> dict[str, Any]:
        """See :class:`Rule`."""
        return {"norm_topk_prob": not config.moe_router_pre_softmax}


class NumberOfExperts:
    """``num_experts``; files that transformers 5 saved call it ``num_local_experts``."""

    def to_nemo(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See :class:`Rule`.

        Raises:
            ValueError: where config.json names no number.
        """
        number = hf.get("num_experts", hf.get("num_local_experts"))
        if number is None:
            raise ValueError("config.json lacks num_experts")
        return {"num_moe_experts": number}

    def to_hf(self, config) -> dict[str, Any]:
        """See :class:`Rule`."""
        return {"num_experts": config.num_moe_experts}


def key_table(config) -> KeyTable:
    """Names of Qwen3-MoE, which SDAR-MoE has too."""
    layers, sparse = range(config.num_layers), sparse_layers(config)
    dense = [layer for layer in layers if layer not in sparse]
    return decoder_key_table(
        config,
        [
            *attention_rows(layers),
            *query_key_norm_rows(layers),
            *dense_mlp_rows(dense),
            *router_rows(sparse),
            *expert_rows(config, sparse),
        ],
    )


CONFIG_TABLE = ConfigTable(
    fields=(
        *DECODER_FIELDS,
        Field("num_key_value_heads", "num_query_groups", default=one_per_head, kind=COUNT),
        Field("head_dim", "kv_channels", default=128, kind=COUNT),
        Field("max_position_embeddings", "max_position_embeddings", binding=False, kind=COUNT),
        Field("num_experts_per_tok", "moe_router_topk", kind=COUNT),
        Field("moe_intermediate_size", "moe_ffn_hidden_size", kind=COUNT),
    ),
    fixed={"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
    rules=(Rope(), SparseStep(), NumberOfExperts(), TopKNormalisation()),
    kinds={
        "decoder_sparse_step": COUNT,
        "mlp_only_layers": NUMBERS,
        "num_experts": COUNT,
        "num_local_experts": COUNT,
        "norm_topk_prob": FLAG,
    },
)


def _nemo_config() -> type:
    from nemo.collections.llm.gpt.model.qwen3 import Qwen3MoEConfig

    return Qwen3MoEConfig


QWEN3_MOE = Family(
    name="qwen3_moe",
    hf_classes=(
        HFClass("qwen3_moe", "Qwen3MoeForCausalLM", "causal"),
        a2d_class("Qwen3Moe"),
    ),
    nemo_config=_nemo_config,
    config=CONFIG_TABLE,
    key_table=key_table,
    right_shift=False,
    mask_token="<|mask|>",
    # Fine-tuning balances experts only where asked to; the permutation kernels need Transformer Engine.
    settings={"moe_aux_loss_coeff": 0.0, "moe_router_dtype": "fp32", "moe_permute_fusion": False},
)
