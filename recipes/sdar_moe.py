"""SDAR with experts: block diffusion in blocks of four over the layers of Qwen3-30B-A3B."""

from nemo_dllm.collections.diffusion.models.sdar_moe import SDARMoEConfig30B_A3B
from nemo_dllm.recipes.builder import Layout
from nemo_dllm.recipes.family_recipes import RecipeFamily, Size, register_family
from nemo_dllm.recipes.moe_fields import RECOMPUTE, SOFTMAX_PRETRAINING

SDAR_MOE = RecipeFamily(
    name="sdar",
    title="SDAR",
    mask_token_id=151669,
    kinds=("bd3lm",),
    objective={"block_size": 4},
    pretraining=SOFTMAX_PRETRAINING,
    sizes={
        "30b_a3b": Size(
            SDARMoEConfig30B_A3B,
            30_532_122_624,
            Layout(num_nodes=2, pipeline=2, expert=8),
            micro_batch_size=2,
            fields=RECOMPUTE,
        ),
    },
)

register_family(SDAR_MOE)
