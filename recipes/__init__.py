"""Recipes and commands of the ``nemo`` command line; importing this package registers them."""

from nemo_dllm.recipes import (
    commands,
    conversion,
    data_commands,
    dream,
    executors,
    llada,
    llada2,
    llada_moe,
    llama,
    qwen2,
    qwen3,
    qwen3_moe,
    saved,
    sdar,
    sdar_moe,
    tiny,
)

__all__ = [
    "commands",
    "conversion",
    "data_commands",
    "dream",
    "executors",
    "llada",
    "llada2",
    "llada_moe",
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "saved",
    "sdar",
    "sdar_moe",
    "tiny",
]
