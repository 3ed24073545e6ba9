"""Qwen3 with experts, as masked and block diffusion models."""

from nemo.collections import llm

from nemo_dllm.recipes.builder import Layout
from nemo_dllm.recipes.family_recipes import RecipeFamily, Size, register_family
from nemo_dllm.recipes.moe_fields import RECOMPUTE, SOFTMAX_PRETRAINING, SOFTMAX_ROUTER

QWEN3_MOE = RecipeFamily(
    name="qwen3",
    title="Qwen3",
    mask_token_id=151669,
    pretraining=SOFTMAX_PRETRAINING,
    sizes={
        "30b_a3b": Size(
            llm.Qwen3Config30B_A3B,
            30_532_122_624,
            Layout(num_nodes=2, pipeline=2, expert=8),
            micro_batch_size=2,
            fields={**SOFTMAX_ROUTER, **RECOMPUTE},
        ),
    },
)

register_family(QWEN3_MOE)
