"""LLaDA: pretraining from random or published weights, and fine-tuning."""

from nemo_dllm.collections.diffusion.models.llada import LLaDAConfig8B
from nemo_dllm.recipes.builder import Layout
from nemo_dllm.recipes.family_recipes import RecipeFamily, Size, register_family

LLADA = RecipeFamily(
    name="llada",
    title="LLaDA",
    mask_token_id=126336,
    kinds=("mdlm",),
    sizes={"8b": Size(LLaDAConfig8B, 8_015_581_184, Layout(tensor=4), micro_batch_size=2)},
)

register_family(LLADA)
