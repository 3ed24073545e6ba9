"""Sizes of SDAR: Qwen3's layers, trained on as block diffusion models (Cheng et al., 2025)."""

from dataclasses import dataclass

from nemo.collections.llm.gpt.model.qwen3 import Qwen3Config


@dataclass
class SDARConfig(Qwen3Config):
    """What all sizes share. Unlike in the small Qwen3 models, the head is never tied to the embeddings."""

    share_embeddings_and_output_weights: bool = False
    max_position_embeddings: int = 32768


@dataclass
class SDARConfig1P7B(SDARConfig):
    """SDAR-1.7B."""

    num_layers: int = 28
    hidden_size: int = 2048
    num_attention_heads: int = 16
    ffn_hidden_size: int = 6144


@dataclass
class SDARConfig4B(SDARConfig):
    """SDAR-4B."""

    num_layers: int = 36
    hidden_size: int = 2560
    num_attention_heads: int = 32
    ffn_hidden_size: int = 9728


@dataclass
class SDARConfig8B(SDARConfig):
    """SDAR-8B."""

    num_layers: int = 36
    hidden_size: int = 4096
    num_attention_heads: int = 32
    ffn_hidden_size: int = 12288
