"""LLaDA: LLaMA's layers under names of their own."""

from collections.abc import Mapping
from typing import Any

from nemo_dllm.connectors.config_table import ConfigTable, Field, HiddenPerHead
from nemo_dllm.connectors.config_values import COUNT, FLAG, NOT_NEGATIVE, POSITIVE, SHARE
from nemo_dllm.connectors.decoder_keys import attention_rows, decoder_key_table, dense_mlp_rows
from nemo_dllm.connectors.family import Family, HFClass
from nemo_dllm.connectors.key_table import KeyTable
from nemo_dllm.connectors.rope import read_rope

BLOCK = "model.transformer.blocks.{layer}."


def _nemo_config() -> type:
    from nemo_dllm.collections.diffusion.models.llada import LLaDAConfig

    return LLaDAConfig


def _key_value_heads(hf: Mapping[str, Any]) -> int:
    return 1 if hf.get("multi_query_attention") else hf["n_heads"]


def _rope_theta(hf: Mapping[str, Any]) -> float:
    """As transformers 5 spells it."""
    theta, scaling = read_rope(hf)
    if scaling["rope_type"] != "default":
        raise ValueError(f"rope_type={scaling['rope_type']!r} is not supported; known: default")
    return theta


def _key_table(config) -> KeyTable:
    layers = range(config.num_layers)
    return decoder_key_table(
        config,
        [
            *attention_rows(
                layers,
                norm=f"{BLOCK}attn_norm.weight",
                query_key_value=(f"{BLOCK}q_proj.weight", f"{BLOCK}k_proj.weight", f"{BLOCK}v_proj.weight"),
                output=f"{BLOCK}attn_out.weight",
            ),
            *dense_mlp_rows(
                layers,
                norm=f"{BLOCK}ff_norm.weight",
                # The activation is on ff_proj: it is the gate, and up_proj what it gates.
                gate_up=(f"{BLOCK}ff_proj.weight", f"{BLOCK}up_proj.weight"),
                down=f"{BLOCK}ff_out.weight",
            ),
        ],
        embedding="model.transformer.wte.weight",
        final_norm="model.transformer.ln_f.weight",
        head="model.transformer.ff_out.weight",
    )


LLADA = Family(
    name="llada",
    hf_classes=(HFClass("llada", "LLaDAModelLM", "bidirectional"),),
    nemo_config=_nemo_config,
    config=ConfigTable(
        fields=(
            Field("n_layers", "num_layers", kind=COUNT),
            Field("d_model", "hidden_size", kind=COUNT),
            Field(
                "mlp_hidden_size",
                "ffn_hidden_size",
                default=lambda hf: hf.get("mlp_ratio", 4) * hf["d_model"],
                kind=COUNT,
            ),
            Field("n_heads", "num_attention_heads", kind=COUNT),
            Field("n_kv_heads", "num_query_groups", default=_key_value_heads, kind=COUNT),
            # Tables have embedding_size rows; vocab_size may count the tokenizer's tokens only.
            Field("vocab_size", "vocab_size", kind=COUNT),
            Field("embedding_size", "vocab_size", default=lambda hf: hf["vocab_size"], kind=COUNT),
            Field("rms_norm_eps", "layernorm_epsilon", default=1e-5, kind=NOT_NEGATIVE),
            Field("rope_theta", "rotary_base", default=_rope_theta, kind=POSITIVE),
            Field("weight_tying", "share_embeddings_and_output_weights", kind=FLAG),
            Field("max_sequence_length", "seq_length", binding=False, kind=COUNT),
            Field("init_std", "init_method_std", default=0.02, binding=False, kind=NOT_NEGATIVE),
            Field("attention_dropout", "attention_dropout", default=0.0, binding=False, kind=SHARE),
            Field("embedding_dropout", "hidden_dropout", default=0.0, binding=False, kind=SHARE),
            Field("residual_dropout", "hidden_dropout", default=0.0, binding=False, kind=SHARE),
        ),
        fixed={
            "block_type": "llama",
            "block_group_size": 1,
            "activation_type": "silu",
            "layer_norm_type": "rms",
            "layer_norm_with_affine": True,
            "attention_layer_norm": False,
            "input_emb_norm": False,
            "bias_for_layer_norm": False,
            "include_bias": False,
            "include_qkv_bias": False,
            "rope": True,
            "rope_full_precision": True,
            "rope_scaling": None,
            "alibi": False,
            "clip_qkv": None,
            "scale_logits": False,
        },
        rules=(HiddenPerHead("d_model", "n_heads"),),
        kinds={"mlp_ratio": COUNT, "multi_query_attention": FLAG},
    ),
    key_table=_key_table,
    right_shift=False,
    mask_token="<|mdm_mask|>",
)
