"""Models of random weights whose sampling is measured."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from nemo.collections.llm.gpt.model.base import GPTConfig
from nemo.collections.llm.gpt.model.qwen3 import Qwen3Config600M

from nemo_dllm.collections.diffusion.inference import MegatronDenoiser
from nemo_dllm.collections.diffusion.models.bd3lm import BD3LMModel
from nemo_dllm.collections.diffusion.models.llada import LLaDAConfig8B
from nemo_dllm.collections.diffusion.models.mdlm import MDLMModel
from nemo_dllm.collections.diffusion.models.sdar import (
    SDARConfig,
    SDARConfig1P7B,
    SDARConfig4B,
    SDARConfig8B,
)
from nemo_dllm.collections.diffusion.objectives import BlockDiffusion, MaskedDiffusion
from nemo_dllm.collections.diffusion.single_process import start_single_process
from nemo_dllm.connectors.build import build_on_cpu


class Shape(NamedTuple):
    """A model to measure."""

    config: Callable[[], GPTConfig]
    block_size: int | None
    """Of a block-causal model; None is a bidirectional one."""


def tiny() -> SDARConfig:
    """For a machine without a GPU."""
    sizes = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64, "kv_channels": 8}
    return SDARConfig(**sizes, num_attention_heads=4, num_query_groups=2, vocab_size=128, apply_rope_fusion=False)


SHAPES = {
    "tiny": Shape(tiny, 4),
    "tiny_canvas": Shape(tiny, None),
    "qwen3_0p6b": Shape(Qwen3Config600M, None),
    "sdar_1p7b": Shape(SDARConfig1P7B, 4),
    "sdar_4b": Shape(SDARConfig4B, 4),
    "sdar_8b": Shape(SDARConfig8B, 4),
    "llada_8b": Shape(LLaDAConfig8B, None),
}


def build(shape: Shape, block_size: int | None, layers: int | None) -> MegatronDenoiser:
    """The model with random weights: bf16 on the GPU, fp32 elsewhere. Token 0 is the mask."""
    start_single_process()
    block_size = shape.block_size and (block_size or shape.block_size)
    config = shape.config()
    config.apply_rope_fusion = False
    if layers is not None:
        config.num_layers = layers
    if block_size is None:
        model = MDLMModel(config, MaskedDiffusion(mask_token_id=0))
    else:
        model = BD3LMModel(config, BlockDiffusion(mask_token_id=0, block_size=block_size))
    on_gpu = torch.cuda.is_available()
    build_on_cpu(model, dtype=torch.bfloat16 if on_gpu else torch.float32)
    core = model.module.eval().requires_grad_(False)
    if on_gpu:
        core.cuda()
    torch.manual_seed(0)
    for parameter in core.parameters():
        parameter.fill_(1.0) if parameter.dim() == 1 else parameter.normal_(std=0.02)
    return MegatronDenoiser(core, block_size)
