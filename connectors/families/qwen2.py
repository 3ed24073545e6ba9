"""Qwen2 and Qwen2.5, and the same weights as a diffusion model in the layout of dllm (``a2d-qwen2``)."""

from nemo_dllm.connectors.a2d import a2d_class
from nemo_dllm.connectors.config_table import ConfigTable, Field, HiddenPerHead
from nemo_dllm.connectors.config_values import COUNT
from nemo_dllm.connectors.decoder_fields import DECODER_FIELDS, one_per_head
from nemo_dllm.connectors.decoder_keys import (
    attention_rows,
    decoder_key_table,
    dense_mlp_rows,
    query_key_value_bias_rows,
)
from nemo_dllm.connectors.family import Family, HFClass
from nemo_dllm.connectors.key_table import KeyTable


def _nemo_config() -> type:
    from nemo.collections.llm.gpt.model.qwen2 import Qwen2Config

    return Qwen2Config


def qwen2_key_table(config) -> KeyTable:
    """LLaMA's names, and biases on queries, keys and values."""
    layers = range(config.num_layers)
    return decoder_key_table(
        config,
        [*attention_rows(layers), *query_key_value_bias_rows(layers), *dense_mlp_rows(layers)],
    )


QWEN2 = Family(
    name="qwen2",
    hf_classes=(
        HFClass("qwen2", "Qwen2ForCausalLM", "causal"),
        a2d_class("Qwen2"),
    ),
    nemo_config=_nemo_config,
    config=ConfigTable(
        fields=(
            *DECODER_FIELDS,
            Field("num_key_value_heads", "num_query_groups", default=one_per_head, kind=COUNT),
            Field("head_dim", "kv_channels", default=HiddenPerHead(), kind=COUNT),
            Field("max_position_embeddings", "seq_length", binding=False, kind=COUNT),
        ),
        fixed={"hidden_act": "silu", "use_sliding_window": False},
    ),
    key_table=qwen2_key_table,
    right_shift=False,
    mask_token="<|mask|>",
)
