"""Recipes and commands of the ``nemo`` command line; importing this package registers them."""

from nemo_dllm.recipes import commands, dream, llada, llama, qwen2, qwen3, sdar, tiny

__all__ = ["commands", "dream", "llada", "llama", "qwen2", "qwen3", "sdar", "tiny"]
