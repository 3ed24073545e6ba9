"""LLaDA2.0: block diffusion in blocks of 32, its experts balanced by biases."""

from nemo_dllm.collections.diffusion.models.llada2 import LLaDA2Config16B, LLaDA2Config100B
from nemo_dllm.recipes.builder import Layout
from nemo_dllm.recipes.family_recipes import RecipeFamily, Size, register_family
from nemo_dllm.recipes.moe_fields import BIAS_PRETRAINING, RECOMPUTE

LLADA2 = RecipeFamily(
    name="llada2",
    title="LLaDA2.0",
    mask_token_id=156895,
    kinds=("bd3lm",),
    objective={"block_size": 32},
    pretraining=BIAS_PRETRAINING,
    sizes={
        "mini": Size(LLaDA2Config16B, 16_255_638_528, Layout(expert=8), micro_batch_size=2, fields=RECOMPUTE),
        "flash": Size(
            LLaDA2Config100B,
            102_889_697_280,
            Layout(num_nodes=8, pipeline=4, expert=8),
            micro_batch_size=2,
            fields=RECOMPUTE,
        ),
    },
)

register_family(LLADA2)
