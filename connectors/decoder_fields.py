"""Fields of configuration tables that most families share, under the names of LLaMA's config.json."""

from collections.abc import Mapping
from typing import Any

from nemo_dllm.connectors.config_table import Field
from nemo_dllm.connectors.config_values import COUNT, FLAG, NOT_NEGATIVE, SHARE

DECODER_FIELDS = (
    Field("num_hidden_layers", "num_layers", kind=COUNT),
    Field("hidden_size", "hidden_size", kind=COUNT),
    Field("intermediate_size", "ffn_hidden_size", kind=COUNT),
    Field("num_attention_heads", "num_attention_heads", kind=COUNT),
    Field("vocab_size", "vocab_size", kind=COUNT),
    Field("rms_norm_eps", "layernorm_epsilon", kind=NOT_NEGATIVE),
    Field("tie_word_embeddings", "share_embeddings_and_output_weights", default=False, kind=FLAG),
    Field("initializer_range", "init_method_std", default=0.02, binding=False, kind=NOT_NEGATIVE),
    Field("attention_dropout", "attention_dropout", default=0.0, binding=False, kind=SHARE),
)


def one_per_head(hf: Mapping[str, Any]) -> int:
    """Keys and values where config.json names no number of them, or null: every head has its own."""
    return hf["num_attention_heads"]
