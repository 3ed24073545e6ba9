"""Dream: pretraining from random or published weights, and fine-tuning. Its logits predict the next token."""

from nemo_dllm.collections.diffusion.models.dream import DreamConfig7B
from nemo_dllm.recipes.builder import Layout
from nemo_dllm.recipes.family_recipes import RecipeFamily, Size, register_family

DREAM = RecipeFamily(
    name="dream",
    title="Dream",
    mask_token_id=151666,
    right_shift=True,
    bos_token_id=151665,
    kinds=("mdlm",),
    sizes={"7b": Size(DreamConfig7B, 7_615_616_512, Layout(tensor=4), micro_batch_size=2)},
)

register_family(DREAM)
