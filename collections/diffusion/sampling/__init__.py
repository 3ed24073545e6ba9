"""Sampling from masked diffusion models: confidence-based iterative unmasking over any function tokens -> logits."""

from nemo_dllm.collections.diffusion.sampling.config import SamplerConfig
from nemo_dllm.collections.diffusion.sampling.denoise import DenoiseStep, denoise
from nemo_dllm.collections.diffusion.sampling.display import canvas_text, watch
from nemo_dllm.collections.diffusion.sampling.generate import (
    GenerateResult,
    generate,
    generate_stream,
    generation_result,
    infill,
)
from nemo_dllm.collections.diffusion.sampling.model_function import DenoiserFn
from nemo_dllm.collections.diffusion.sampling.remasking import REMASKING_POLICIES, Predictions, register_remasking
from nemo_dllm.collections.diffusion.sampling.transfer import linear_alpha, transfer_counts

__all__ = [
    "REMASKING_POLICIES",
    "DenoiseStep",
    "DenoiserFn",
    "GenerateResult",
    "Predictions",
    "SamplerConfig",
    "canvas_text",
    "denoise",
    "generate",
    "generate_stream",
    "generation_result",
    "infill",
    "linear_alpha",
    "register_remasking",
    "transfer_counts",
    "watch",
]
