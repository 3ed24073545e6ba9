"""Sizes of SDAR with experts: Qwen3-MoE's layers, trained on as a block diffusion model (Cheng et al., 2025)."""

from dataclasses import dataclass

from nemo.collections.llm.gpt.model.qwen3 import Qwen3MoEConfig


@dataclass
class SDARMoEConfig(Qwen3MoEConfig):
    """What all sizes share.

    Experts are balanced only where ``moe_aux_loss_coeff`` is set; routing is computed in fp32.
    """

    max_position_embeddings: int = 32768
    moe_aux_loss_coeff: float = 0.0
    moe_router_dtype: str = "fp32"
    moe_permute_fusion: bool = False


@dataclass
class SDARMoEConfig30B_A3B(SDARMoEConfig):
    """SDAR-30B-A3B-Chat, with the sizes of Qwen3-30B-A3B, from which it was trained."""

    num_layers: int = 48
    hidden_size: int = 2048
    num_attention_heads: int = 32
    num_query_groups: int = 4
    ffn_hidden_size: int = 6144
    moe_ffn_hidden_size: int = 768
