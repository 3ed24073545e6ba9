"""Sizes of Dream, masked diffusion models that began as Qwen2.5 (Ye et al., 2025, arXiv:2508.15487)."""

from dataclasses import dataclass

from nemo.collections.llm.gpt.model.qwen2 import Qwen2Config


@dataclass
class DreamConfig(Qwen2Config):
    """What all sizes share: Qwen2's layers, with biases on queries, keys and values."""

    vocab_size: int = 152064


@dataclass
class DreamConfig7B(DreamConfig):
    """Dream-7B, Dream-Coder-7B and DiffuCoder-7B."""

    num_layers: int = 28
    hidden_size: int = 3584
    num_attention_heads: int = 28
    num_query_groups: int = 4
    ffn_hidden_size: int = 18944
