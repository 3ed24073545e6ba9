"""Qwen3 as masked and block diffusion models."""

from nemo.collections import llm

from nemo_dllm.recipes.builder import Layout
from nemo_dllm.recipes.family_recipes import RecipeFamily, Size, register_family

QWEN3 = RecipeFamily(
    name="qwen3",
    title="Qwen3",
    # The id that the next added token gets; inside the padded vocabulary, so the table does not grow.
    mask_token_id=151669,
    sizes={
        "0p6b": Size(llm.Qwen3Config600M, 596_049_920, Layout(), micro_batch_size=8),
        "1p7b": Size(llm.Qwen3Config1P7B, 1_720_574_976, Layout(), micro_batch_size=4),
        "4b": Size(llm.Qwen3Config4B, 4_022_468_096, Layout(tensor=2), micro_batch_size=4),
        "8b": Size(llm.Qwen3Config8B, 8_190_735_360, Layout(tensor=4), micro_batch_size=2),
        "14b": Size(llm.Qwen3Config14B, 14_768_307_200, Layout(tensor=8), micro_batch_size=2),
        "32b": Size(llm.Qwen3Config32B, 32_762_123_264, Layout(num_nodes=4, tensor=8, pipeline=2), micro_batch_size=1),
    },
)

register_family(QWEN3)
