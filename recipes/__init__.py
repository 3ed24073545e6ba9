"""Recipes and commands of the ``nemo`` command line; importing this package registers them."""

from nemo_dllm.recipes import commands, qwen3, tiny

__all__ = ["commands", "qwen3", "tiny"]
