"""Sizes of LLaDA2.0 and LLaDA2.1 (Bie et al., 2025), block diffusion models with experts."""

from dataclasses import dataclass, field

from nemo.collections.llm.gpt.model.qwen3 import Qwen3MoEConfig


@dataclass
class LLaDA2Config(Qwen3MoEConfig):
    """What all sizes share.

    Half of a head's dimensions rotate. The router takes sigmoids: a token goes to its 8 best of 256 experts, out of the
    4 best of 8 groups, a group counting the sum of its two best. A bias of each expert (not trained by gradients)
    takes part in the choice alone; weights are renormalised and scaled. One shared expert, the first layer dense.

    The bias stays as it was read unless ``moe_router_bias_update_rate`` is set, which lets it follow the load.
    """

    vocab_size: int = 157184
    num_query_groups: int = 4
    rotary_base: float = 600000.0
    rotary_percent: float = 0.5
    max_position_embeddings: int = 16384
    num_moe_experts: int = 256
    moe_router_topk: int = 8
    moe_router_num_groups: int = 8
    moe_router_group_topk: int = 4
    moe_router_score_function: str = "sigmoid"
    moe_router_topk_scaling_factor: float = 2.5
    moe_router_enable_expert_bias: bool = True
    moe_router_bias_update_rate: float = 0.0
    moe_aux_loss_coeff: float = 0.0
    moe_router_dtype: str = "fp32"
    moe_permute_fusion: bool = False


@dataclass
class LLaDA2Config16B(LLaDA2Config):
    """LLaDA2.0-mini and LLaDA2.1-mini."""

    num_layers: int = 20
    hidden_size: int = 2048
    num_attention_heads: int = 16
    ffn_hidden_size: int = 5120
    moe_ffn_hidden_size: int = 512
    moe_shared_expert_intermediate_size: int = 512
    moe_layer_freq: list[int] = field(default_factory=lambda: [0] + [1] * 19)


@dataclass
class LLaDA2Config100B(LLaDA2Config):
    """LLaDA2.0-flash and LLaDA2.1-flash."""

    num_layers: int = 32
    hidden_size: int = 4096
    num_attention_heads: int = 32
    ffn_hidden_size: int = 9216
    moe_ffn_hidden_size: int = 1024
    moe_shared_expert_intermediate_size: int = 1024
    moe_layer_freq: list[int] = field(default_factory=lambda: [0] + [1] * 31)
