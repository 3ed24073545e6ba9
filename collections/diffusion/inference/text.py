"""Text from a model, with a view of how it comes about."""

import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from nemo_dllm.collections.diffusion.inference.load import LoadedModel, load_checkpoint
from nemo_dllm.collections.diffusion.sampling import SamplerConfig, generate_stream, generation_result, watch
from nemo_dllm.collections.diffusion.sampling.display import VISIBLE_CONTROLS


def generate_text(model: LoadedModel, prompt: str, config: SamplerConfig, *, show_on: Console | None = None) -> str:
    """Continue a text.

    Args:
        model: see ``load_checkpoint``.
        prompt: the text to go on from; may be empty.
        config: how positions are filled, see ``LoadedModel.sampler_config``.
        show_on: where to show the canvas while it is denoised; None shows nothing.

    Returns:
        Prompt and continuation, up to the end token.
    """
    prompts = [model.encode(prompt)]
    fixed = {"mask_token_id": model.mask_token_id, "device": model.device, "decode": model.decode}
    steps = generate_stream(model.denoiser, prompts, config, **fixed)
    if show_on is None:
        for last in steps:  # noqa: B007
            pass
    else:
        last = watch(steps, model.decode, show_on)
    return model.decode(generation_result(last, prompts, config, model.decode).sequences[0].tolist())


def print_generated(
    path: str | Path, prompt: str, *, best: bool, watch: bool, seed: int | None, **settings: Any
) -> None:
    """Continue a text with the model of a checkpoint, and print it.

    Args:
        path, best: see ``load_checkpoint``.
        prompt: the text to go on from; may be empty.
        watch: show the canvas on standard error while it is denoised.
        seed: of the sampler; None draws one, so that each call gives another text at temperatures above 0.
        settings: further fields of ``SamplerConfig``.
    """
    model = load_checkpoint(path, best=best)
    if seed is None:
        seed = torch.seed() % 2**31
    config = model.sampler_config(seed=seed, **settings)
    length = len(model.encode(prompt)) + config.max_new_tokens
    if length > model.seq_length:
        print(f"note: {length} tokens are more than the {model.seq_length} of the training samples", file=sys.stderr)
    text = generate_text(model, prompt, config, show_on=Console(stderr=True) if watch else None)
    print(text.translate(VISIBLE_CONTROLS) if sys.stdout.isatty() else text)
