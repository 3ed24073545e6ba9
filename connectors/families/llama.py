"""LLaMA 1 to 3.3 and what shares their classes, and the same weights as a diffusion model in the layout of dllm."""

from collections.abc import Mapping
from typing import Any

from nemo_dllm.connectors.a2d import a2d_class
from nemo_dllm.connectors.config_table import ConfigTable, Field, HiddenPerHead
from nemo_dllm.connectors.config_values import COUNT
from nemo_dllm.connectors.decoder_fields import DECODER_FIELDS, one_per_head
from nemo_dllm.connectors.decoder_keys import attention_rows, decoder_key_table, dense_mlp_rows
from nemo_dllm.connectors.family import Family, HFClass
from nemo_dllm.connectors.key_table import KeyTable
from nemo_dllm.connectors.rope import LINEAR, LLAMA3, Rope

# LLaMA 1 and 2 do not name their base.
ROPE = Rope(default_theta=10000.0, scalings={"linear": LINEAR, "llama3": LLAMA3})


def _nemo_config() -> type:
    from nemo.collections.llm.gpt.model.llama import LlamaConfig

    return LlamaConfig


def _nemo_config_of(hf_config: Mapping[str, Any]) -> type:
    from nemo.collections.llm.gpt.model.llama import Llama31Config

    scaled = ROPE.to_nemo(hf_config)["scale_factor"] is not None
    return Llama31Config if scaled else _nemo_config()


def _key_table(config) -> KeyTable:
    layers = range(config.num_layers)
    return decoder_key_table(config, [*attention_rows(layers), *dense_mlp_rows(layers)])


LLAMA = Family(
    name="llama",
    hf_classes=(
        HFClass("llama", "LlamaForCausalLM", "causal"),
        a2d_class("Llama"),
    ),
    nemo_config=_nemo_config,
    nemo_config_of=_nemo_config_of,
    config=ConfigTable(
        fields=(
            *DECODER_FIELDS,
            Field("num_key_value_heads", "num_query_groups", default=one_per_head, kind=COUNT),
            Field("head_dim", "kv_channels", default=HiddenPerHead(), kind=COUNT),
            Field("max_position_embeddings", "seq_length", binding=False, kind=COUNT),
        ),
        fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
        rules=(ROPE,),
    ),
    key_table=_key_table,
    right_shift=False,
    mask_token="<|mask|>",
)
