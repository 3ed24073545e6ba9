"""Sampling from masked diffusion models: confidence-based iterative unmasking over any function tokens -> logits."""

from nemo_dllm.collections.diffusion.sampling.config import (
    CACHES,
    SamplerConfig,
    SamplerField,
    sampler_fields,
    settings_of_gaps,
)
from nemo_dllm.collections.diffusion.sampling.denoise import denoise
from nemo_dllm.collections.diffusion.sampling.display import canvas_pieces, canvas_text, watch
from nemo_dllm.collections.diffusion.sampling.generate import (
    GenerateResult,
    generate,
    generate_stream,
    generation_result,
    infill,
    span_between,
)
from nemo_dllm.collections.diffusion.sampling.kv_cache import CacheMemory, CacheWindow, KVCache
from nemo_dllm.collections.diffusion.sampling.model_function import CachedDenoiser, DenoiserFn, JointDenoiser
from nemo_dllm.collections.diffusion.sampling.presets import PRESETS, REFERENCE_PRESETS, preset, preset_fields
from nemo_dllm.collections.diffusion.sampling.quirks import ReferenceQuirks
from nemo_dllm.collections.diffusion.sampling.remasking import REMASKING_POLICIES, Predictions, register_remasking
from nemo_dllm.collections.diffusion.sampling.step import DenoiseStep
from nemo_dllm.collections.diffusion.sampling.transfer import (
    SCHEDULES,
    linear_alpha,
    register_schedule,
    transfer_counts,
)

__all__ = [
    "CACHES",
    "PRESETS",
    "REFERENCE_PRESETS",
    "REMASKING_POLICIES",
    "SCHEDULES",
    "CacheMemory",
    "CacheWindow",
    "CachedDenoiser",
    "DenoiseStep",
    "DenoiserFn",
    "GenerateResult",
    "JointDenoiser",
    "KVCache",
    "Predictions",
    "ReferenceQuirks",
    "SamplerConfig",
    "SamplerField",
    "canvas_pieces",
    "canvas_text",
    "denoise",
    "generate",
    "generate_stream",
    "generation_result",
    "infill",
    "linear_alpha",
    "preset",
    "preset_fields",
    "register_remasking",
    "register_schedule",
    "sampler_fields",
    "settings_of_gaps",
    "span_between",
    "transfer_counts",
    "watch",
]
