"""Qwen2.5 as masked and block diffusion models."""

from nemo.collections import llm

from nemo_dllm.recipes.builder import Layout
from nemo_dllm.recipes.family_recipes import RecipeFamily, Size, register_family

QWEN25 = RecipeFamily(
    name="qwen25",
    title="Qwen2.5",
    # The id that the next added token gets; inside the padded vocabulary, so the table does not grow.
    mask_token_id=151665,
    sizes={
        "0p5b": Size(
            llm.Qwen25Config500M,
            494_032_768,
            Layout(),
            micro_batch_size=8,
            # As published; NeMo's class says otherwise.
            fields={"share_embeddings_and_output_weights": True},
        ),
        "7b": Size(llm.Qwen25Config7B, 7_615_616_512, Layout(tensor=4), micro_batch_size=2),
    },
)

register_family(QWEN25)
