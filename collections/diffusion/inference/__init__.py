"""Trained models as functions that samplers call, and text from them."""

from nemo_dllm.collections.diffusion.inference.cached import MegatronDenoiser
from nemo_dllm.collections.diffusion.inference.load import LoadedModel, load_checkpoint
from nemo_dllm.collections.diffusion.inference.locate import locate_checkpoint
from nemo_dllm.collections.diffusion.inference.text import generate_text

__all__ = ["LoadedModel", "MegatronDenoiser", "generate_text", "load_checkpoint", "locate_checkpoint"]
