"""Sizes of LLaDA-MoE (Zhu et al., 2025), a masked diffusion model with experts."""

from dataclasses import dataclass

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from nemo.collections.llm.gpt.model.qwen3 import Qwen3MoEConfig

from nemo_dllm.collections.diffusion.models.router import BalancedRouter, choose_biased_softmax


@dataclass
class LLaDAMoEConfig(Qwen3MoEConfig):
    """What all sizes share: norms of every head's queries and keys, and experts weighed by their plain probabilities.

    The vocabulary's size comes from the tokenizer unless it is set. Experts are balanced only where
    ``moe_aux_loss_coeff`` is set; routing is computed in fp32. With ``softmax_expert_bias`` the routers have a bias per
    expert, see :func:`choose_biased_softmax`; no published checkpoint has, and training does not move it.

    Raises:
        ValueError: for ``softmax_expert_bias`` with an auxiliary loss.
    """

    vocab_size: int | None = None
    layernorm_epsilon: float = 1e-5
    rotary_base: float = 50000.0
    max_position_embeddings: int = 8192
    moe_router_pre_softmax: bool = True
    moe_aux_loss_coeff: float = 0.0
    moe_router_dtype: str = "fp32"
    moe_permute_fusion: bool = False
    softmax_expert_bias: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.softmax_expert_bias and self.moe_aux_loss_coeff:
            raise ValueError(
                f"softmax_expert_bias=True with moe_aux_loss_coeff={self.moe_aux_loss_coeff} is not supported; "
                "set moe_aux_loss_coeff=0"
            )

    def configure_model(self, *args, **kwargs):
        """As NeMo's, with other routers where there are biases."""
        model = super().configure_model(*args, **kwargs)
        if self.softmax_expert_bias:
            for layer in model.decoder.layers:
                if isinstance(layer.mlp, MoELayer):
                    router = layer.mlp.router
                    del router.expert_bias
                    router.register_buffer("expert_bias", torch.zeros(len(router.weight), device=router.weight.device))
                    BalancedRouter.adopt(router, choose=choose_biased_softmax)
        return model


@dataclass
class LLaDAMoEConfig7B_A1B(LLaDAMoEConfig):
    """LLaDA-MoE-7B-A1B, base and instruct. It has no dense layer."""

    num_layers: int = 16
    hidden_size: int = 2048
    num_attention_heads: int = 16
    num_query_groups: int = 16
    ffn_hidden_size: int = 8192
    num_moe_experts: int = 64
    moe_router_topk: int = 8
    moe_ffn_hidden_size: int = 1024
