"""Recipes and commands of the ``nemo`` command line; importing this package registers them."""

from nemo_dllm.recipes import qwen3, tiny

__all__ = ["qwen3", "tiny"]
