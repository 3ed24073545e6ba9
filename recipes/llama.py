"""LLaMA 2, 3.1 and 3.2 as masked and block diffusion models."""

from nemo.collections import llm

from nemo_dllm.recipes.builder import Layout
from nemo_dllm.recipes.family_recipes import RecipeFamily, Size, register_family

# All 32,000 tokens are in use: the mask token is a row of its own in both tables.
_LLAMA2 = {"vocab_size": 32001}
_LLAMA3 = {"vocab_size": 128256}

_NODES_OF_70B = Layout(num_nodes=8, tensor=8, pipeline=4)

LLAMA2 = RecipeFamily(
    name="llama2",
    title="LLaMA 2",
    mask_token_id=32000,
    sizes={
        "7b": Size(llm.Llama2Config7B, 6_738_415_616 + 2 * 4096, Layout(tensor=4), micro_batch_size=2, fields=_LLAMA2),
        "13b": Size(
            llm.Llama2Config13B, 13_015_864_320 + 2 * 5120, Layout(tensor=8), micro_batch_size=2, fields=_LLAMA2
        ),
        "70b": Size(
            llm.Llama2Config70B,
            68_976_648_192 + 2 * 8192,
            _NODES_OF_70B,
            micro_batch_size=1,
            fields=_LLAMA2,
            learning_rate=1.5e-4,
        ),
    },
)

# The last of the reserved tokens, which no published template uses.
_RESERVED = 128255

LLAMA31 = RecipeFamily(
    name="llama31",
    title="LLaMA 3.1",
    mask_token_id=_RESERVED,
    sizes={
        "8b": Size(llm.Llama31Config8B, 8_030_261_248, Layout(tensor=4), micro_batch_size=2, fields=_LLAMA3),
        "70b": Size(
            llm.Llama31Config70B,
            70_553_706_496,
            _NODES_OF_70B,
            micro_batch_size=1,
            fields=_LLAMA3,
            learning_rate=1.5e-4,
        ),
    },
)

LLAMA32 = RecipeFamily(
    name="llama32",
    title="LLaMA 3.2",
    mask_token_id=_RESERVED,
    sizes={
        "1b": Size(llm.Llama32Config1B, 1_235_814_400, Layout(), micro_batch_size=4, fields=_LLAMA3),
        "3b": Size(llm.Llama32Config3B, 3_212_749_824, Layout(tensor=2), micro_batch_size=4, fields=_LLAMA3),
    },
)

for _family in (LLAMA2, LLAMA31, LLAMA32):
    register_family(_family)
