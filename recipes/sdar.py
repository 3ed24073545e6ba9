"""SDAR: block diffusion in blocks of four over Qwen3's layers, pretrained and fine-tuned."""

from nemo_dllm.collections.diffusion.models.sdar import SDARConfig1P7B, SDARConfig4B, SDARConfig8B
from nemo_dllm.recipes.builder import Layout
from nemo_dllm.recipes.family_recipes import RecipeFamily, Size, register_family

SDAR = RecipeFamily(
    name="sdar",
    title="SDAR",
    mask_token_id=151669,
    kinds=("bd3lm",),
    objective={"block_size": 4},
    sizes={
        "1p7b": Size(SDARConfig1P7B, 2_031_739_904, Layout(), micro_batch_size=4),
        "4b": Size(SDARConfig4B, 4_411_424_256, Layout(tensor=2), micro_batch_size=4),
        "8b": Size(SDARConfig8B, 8_190_735_360, Layout(tensor=4), micro_batch_size=2),
    },
)

register_family(SDAR)
