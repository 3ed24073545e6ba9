"""Sizes of LLaDA, masked diffusion models with the layers of LLaMA (Nie et al., 2025, arXiv:2502.09992)."""

from dataclasses import dataclass

from nemo.collections.llm.gpt.model.llama import LlamaConfig


@dataclass
class LLaDAConfig(LlamaConfig):
    """What all sizes share."""

    vocab_size: int = 126464
    rotary_base: float = 500000.0
    layernorm_epsilon: float = 1e-5
    # Megatron's fused rotation needs Transformer Engine and is not used: see FusedSelfAttention.
    apply_rope_fusion: bool = False


@dataclass
class LLaDAConfig8B(LLaDAConfig):
    """LLaDA-8B and LLaDA-1.5; every head has its own keys and values."""

    num_layers: int = 32
    hidden_size: int = 4096
    num_attention_heads: int = 32
    num_query_groups: int = 32
    ffn_hidden_size: int = 12288
