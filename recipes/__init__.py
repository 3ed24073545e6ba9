"""Recipes and commands of the ``nemo`` command line; importing this package registers them."""

from nemo_dllm.recipes import commands, conversion, dream, llada, llama, qwen2, qwen3, sdar, tiny

__all__ = ["commands", "conversion", "dream", "llada", "llama", "qwen2", "qwen3", "sdar", "tiny"]
