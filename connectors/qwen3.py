"""Qwen3, and the same weights as a diffusion model in the layout of dllm (``a2d-qwen3``)."""

from nemo_dllm.connectors.config_table import ConfigTable, Field
from nemo_dllm.connectors.family import Family, HFClass
from nemo_dllm.connectors.key_table import (
    GatedPair,
    KeyTable,
    QueryKeyValue,
    Replicated,
    Row,
    SplitColumns,
    VocabularyRows,
)


def _nemo_config() -> type:
    from nemo.collections.llm.gpt.model.qwen3 import Qwen3Config

    return Qwen3Config


def _key_table(config) -> KeyTable:
    tied = config.share_embeddings_and_output_weights
    layers = range(config.num_layers)
    attention, mlp = "decoder.layers.{layer}.self_attention.", "decoder.layers.{layer}.mlp."
    hf = "model.layers.{layer}."
    # With tied embeddings the last of several pipeline stages holds the table again, as its output layer.
    embedding_names = ("embedding.word_embeddings.weight",) + (("output_layer.weight",) if tied else ())
    head = () if tied else (Row(("output_layer.weight",), ("lm_head.weight",), VocabularyRows()),)
    return KeyTable(
        rows=(
            Row(embedding_names, ("model.embed_tokens.weight",), VocabularyRows()),
            Row(
                (f"{attention}linear_qkv.layer_norm_weight", "decoder.layers.{layer}.input_layernorm.weight"),
                (f"{hf}input_layernorm.weight",),
                Replicated(),
                layers,
            ),
            Row(
                (f"{attention}linear_qkv.weight",),
                tuple(f"{hf}self_attn.{part}_proj.weight" for part in "qkv"),
                QueryKeyValue(),
                layers,
            ),
            Row((f"{attention}q_layernorm.weight",), (f"{hf}self_attn.q_norm.weight",), Replicated(), layers),
            Row((f"{attention}k_layernorm.weight",), (f"{hf}self_attn.k_norm.weight",), Replicated(), layers),
            Row((f"{attention}linear_proj.weight",), (f"{hf}self_attn.o_proj.weight",), SplitColumns(), layers),
            Row(
                (f"{mlp}linear_fc1.layer_norm_weight", "decoder.layers.{layer}.pre_mlp_layernorm.weight"),
                (f"{hf}post_attention_layernorm.weight",),
                Replicated(),
                layers,
            ),
            Row(
                (f"{mlp}linear_fc1.weight",),
                (f"{hf}mlp.gate_proj.weight", f"{hf}mlp.up_proj.weight"),
                GatedPair(),
                layers,
            ),
            Row((f"{mlp}linear_fc2.weight",), (f"{hf}mlp.down_proj.weight",), SplitColumns(), layers),
            Row(("decoder.final_layernorm.weight",), ("model.norm.weight",), Replicated()),
            *head,
        ),
        ignored={
            "model.layers.*.self_attn.rotary_emb.inv_freq": "computed from the rotary base",
            **({"lm_head.weight": "tied to model.embed_tokens.weight"} if tied else {}),
        },
    )


QWEN3 = Family(
    name="qwen3",
    hf_classes=(
        HFClass("qwen3", "Qwen3ForCausalLM", "causal"),
        HFClass("a2d-qwen3", "A2DQwen3LMHeadModel", "bidirectional"),
    ),
    nemo_config=_nemo_config,
    config=ConfigTable(
        fields=(
            Field("num_hidden_layers", "num_layers"),
            Field("hidden_size", "hidden_size"),
            Field("intermediate_size", "ffn_hidden_size"),
            Field("num_attention_heads", "num_attention_heads"),
            Field("num_key_value_heads", "num_query_groups"),
            Field("head_dim", "kv_channels", default=128),
            Field("vocab_size", "vocab_size"),
            Field("rms_norm_eps", "layernorm_epsilon"),
            Field("tie_word_embeddings", "share_embeddings_and_output_weights", default=False),
            Field("max_position_embeddings", "max_position_embeddings", binding=False),
            Field("initializer_range", "init_method_std", default=0.02, binding=False),
            Field("attention_dropout", "attention_dropout", default=0.0, binding=False),
        ),
        fixed={"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
    ),
    key_table=_key_table,
    right_shift=False,
    mask_token="<|mask|>",
)
