"""Rows of key tables that most families share: Megatron's GPT on one side, the names of LLaMA on the other.

Names of Hugging Face tensors are templates with ``{layer}``; a family that calls them otherwise passes its own.
"""

from collections.abc import Collection, Iterable

from nemo_dllm.connectors.key_table import (
    GatedPair,
    KeyTable,
    QueryKeyValue,
    Replicated,
    Row,
    SplitColumns,
    VocabularyRows,
)

ATTENTION = "decoder.layers.{layer}.self_attention."
MLP = "decoder.layers.{layer}.mlp."
HF_LAYER = "model.layers.{layer}."


def decoder_key_table(
    config,
    layer_rows: Iterable[Row],
    *,
    embedding: str = "model.embed_tokens.weight",
    final_norm: str = "model.norm.weight",
    head: str = "lm_head.weight",
    ignored: dict[str, str] | None = None,
) -> KeyTable:
    """A whole key table: embedding, layers, final norm, and the head unless it is tied.

    Args:
        config: NeMo's configuration.
        layer_rows: rows of all layers.
        embedding, final_norm, head: names of the Hugging Face tensors.
        ignored: further tensors that may be present and are not used, with the reason.
    """
    tied = config.share_embeddings_and_output_weights
    # With tied embeddings the last of several pipeline stages holds the table again, as its output layer.
    embedding_names = ("embedding.word_embeddings.weight",) + (("output_layer.weight",) if tied else ())
    return KeyTable(
        rows=(
            Row(embedding_names, (embedding,), VocabularyRows()),
            *layer_rows,
            Row(("decoder.final_layernorm.weight",), (final_norm,), Replicated()),
            *(() if tied else (Row(("output_layer.weight",), (head,), VocabularyRows()),)),
        ),
        ignored={
            "*.rotary_emb.inv_freq": "computed from the rotary base",
            **({head: f"tied to {embedding}"} if tied else {}),
            **(ignored or {}),
        },
    )


def attention_rows(
    layers: Collection[int],
    *,
    norm: str = f"{HF_LAYER}input_layernorm.weight",
    query_key_value: tuple[str, str, str] = tuple(f"{HF_LAYER}self_attn.{part}_proj.weight" for part in "qkv"),
    output: str = f"{HF_LAYER}self_attn.o_proj.weight",
) -> list[Row]:
    """Norm, projections to queries, keys and values, and output projection, without biases."""
    return [
        Row(
            (f"{ATTENTION}linear_qkv.layer_norm_weight", "decoder.layers.{layer}.input_layernorm.weight"),
            (norm,),
            Replicated(),
            layers,
        ),
        Row((f"{ATTENTION}linear_qkv.weight",), query_key_value, QueryKeyValue(), layers),
        Row((f"{ATTENTION}linear_proj.weight",), (output,), SplitColumns(), layers),
    ]


def query_key_value_bias_rows(
    layers: Collection[int],
    *,
    query_key_value: tuple[str, str, str] = tuple(f"{HF_LAYER}self_attn.{part}_proj.bias" for part in "qkv"),
) -> list[Row]:
    """Biases of queries, keys and values."""
    return [Row((f"{ATTENTION}linear_qkv.bias",), query_key_value, QueryKeyValue(), layers)]


def query_key_norm_rows(
    layers: Collection[int],
    *,
    query_norm: str = f"{HF_LAYER}self_attn.q_norm.weight",
    key_norm: str = f"{HF_LAYER}self_attn.k_norm.weight",
) -> list[Row]:
    """Norms of every head's queries and keys."""
    return [
        Row((f"{ATTENTION}q_layernorm.weight",), (query_norm,), Replicated(), layers),
        Row((f"{ATTENTION}k_layernorm.weight",), (key_norm,), Replicated(), layers),
    ]


def dense_mlp_rows(
    layers: Collection[int],
    *,
    norm: str = f"{HF_LAYER}post_attention_layernorm.weight",
    gate_up: tuple[str, str] = (f"{HF_LAYER}mlp.gate_proj.weight", f"{HF_LAYER}mlp.up_proj.weight"),
    down: str = f"{HF_LAYER}mlp.down_proj.weight",
) -> list[Row]:
    """Norm and gated MLP."""
    return [
        Row(
            (f"{MLP}linear_fc1.layer_norm_weight", "decoder.layers.{layer}.pre_mlp_layernorm.weight"),
            (norm,),
            Replicated(),
            layers,
        ),
        Row((f"{MLP}linear_fc1.weight",), gate_up, GatedPair(), layers),
        Row((f"{MLP}linear_fc2.weight",), (down,), SplitColumns(), layers),
    ]
