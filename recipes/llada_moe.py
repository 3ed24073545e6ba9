"""LLaDA-MoE: pretraining from random or published weights, and fine-tuning."""

from nemo_dllm.collections.diffusion.models.llada_moe import LLaDAMoEConfig7B_A1B
from nemo_dllm.recipes.builder import Layout
from nemo_dllm.recipes.family_recipes import RecipeFamily, Size, register_family
from nemo_dllm.recipes.moe_fields import SOFTMAX_PRETRAINING

LLADA_MOE = RecipeFamily(
    name="llada_moe",
    title="LLaDA-MoE",
    mask_token_id=156895,
    kinds=("mdlm",),
    pretraining=SOFTMAX_PRETRAINING,
    sizes={
        "7b_a1b": Size(
            LLaDAMoEConfig7B_A1B,
            7_356_880_896,
            Layout(expert=8),
            micro_batch_size=2,
            fields={"vocab_size": 157184},
        ),
    },
)

register_family(LLADA_MOE)
