"""Diffusion objectives in plain torch: schedules, noise, corruption and loss."""

from nemo_dllm.collections.diffusion.objectives.absorbing import AbsorbingDiffusion, Corruption, ScoredTokens
from nemo_dllm.collections.diffusion.objectives.block import BlockDiffusion
from nemo_dllm.collections.diffusion.objectives.losses import LossSum
from nemo_dllm.collections.diffusion.objectives.masked import MaskedDiffusion
from nemo_dllm.collections.diffusion.objectives.noise import permutation, uniforms
from nemo_dllm.collections.diffusion.objectives.objective import Objective
from nemo_dllm.collections.diffusion.objectives.presets import preset
from nemo_dllm.collections.diffusion.objectives.schedules import (
    CosineSchedule,
    GeometricSchedule,
    LinearSchedule,
    PolynomialSchedule,
    Schedule,
    get_schedule,
    of_time,
    register_schedule,
)
from nemo_dllm.collections.diffusion.objectives.times import training_times, validation_times

__all__ = [
    "AbsorbingDiffusion",
    "BlockDiffusion",
    "Corruption",
    "CosineSchedule",
    "GeometricSchedule",
    "LinearSchedule",
    "LossSum",
    "MaskedDiffusion",
    "Objective",
    "PolynomialSchedule",
    "Schedule",
    "ScoredTokens",
    "get_schedule",
    "of_time",
    "permutation",
    "preset",
    "register_schedule",
    "training_times",
    "uniforms",
    "validation_times",
]
