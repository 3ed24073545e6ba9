"""What the commands share: a loaded model with sampler settings, and ways to follow the denoising of a row."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from nemo_dllm.collections.diffusion.inference.load import LoadedModel, load_checkpoint
from nemo_dllm.collections.diffusion.inference.replay import Replay
from nemo_dllm.collections.diffusion.sampling import DenoiseStep, SamplerConfig, watch


@dataclass(frozen=True, eq=False)
class Session:
    """A model, and how it is sampled.

    Attributes:
        model: see ``load_checkpoint``.
        config: see ``LoadedModel.sampler_config``.
        screen: where denoising is shown; None shows nothing.
        replay: what records it; None records nothing.
    """

    model: LoadedModel
    config: SamplerConfig
    screen: Console | None = None
    replay: Replay | None = None

    def follow(self, steps: Iterable[DenoiseStep], start: int = 0) -> DenoiseStep | None:
        """Run the denoising of a single row to its end, shown and recorded from position ``start`` on.

        Returns:
            The last step, of the whole row; None where there was nothing to do.
        """
        seen: list[DenoiseStep | None] = [None]

        def parts() -> Iterator[DenoiseStep]:
            for seen[0] in steps:
                part = row_part(seen[0], start)
                if self.replay is not None:
                    self.replay.add(part, self.model.decode)
                yield part

        if self.screen is None:
            for _ in parts():
                pass
        else:
            watch(parts(), self.model.decode, self.screen)
        return seen[0]

    def canvas(self) -> dict[str, Any]:
        """Arguments of the sampler that come from the model."""
        return {"mask_token_id": self.model.mask_token_id, "device": self.model.device}

    def check_length(self, name: str, tokens: int) -> None:
        """Check that a prompt leaves room in the model's context.

        Raises:
            ValueError: where it leaves none.
        """
        context = self.model.seq_length
        if tokens >= context:
            raise ValueError(
                f"{name} has {tokens} tokens, and the model's context is {context}, new tokens included; shorten it"
            )

    def note_length(self, tokens: int) -> None:
        """Say on standard error where the continuation of a prompt goes beyond the model's context."""
        length = min(tokens + self.config.max_new_tokens, self.config.max_length or sys.maxsize)
        if length > self.model.seq_length:
            print(
                f"note: {length} tokens are more than the model's context of {self.model.seq_length}",
                file=sys.stderr,
            )

    def note_samples(self, number: int) -> None:
        """Say on standard error where several texts of a prompt are bound to be the same."""
        config = self.config
        if number > 1 and not config.temperature and not config.remasking_temperature and config.remasking != "random":
            print(
                f"note: the {number} texts of a prompt are equal at a temperature of 0; choose a higher one",
                file=sys.stderr,
            )


def open_session(
    path: str | Path,
    *,
    best: bool,
    preset: str | None,
    settings: Mapping[str, Any],
    watch: bool | None = False,
    replay: str | Path | None = None,
) -> Session:
    """Load a checkpoint to sample from.

    Args:
        path, best: see ``load_checkpoint``.
        preset, settings: see ``LoadedModel.sampler_config``. Without a seed one is drawn, so that each call gives
            another text at temperatures above 0.
        watch: show denoising on standard error; None does so on a terminal.
        replay: HTML or GIF file to write.

    Raises:
        FileNotFoundError, ValueError: see :func:`load_checkpoint`, ``LoadedModel.sampler_config`` and ``Replay``.
    """
    # Lists, as command lines give them, are tuples in SamplerConfig.
    settings = {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
    # What it refuses, it refuses before the model is loaded, which takes long.
    recorded = None if replay is None else Replay(Path(replay))
    model = load_checkpoint(path, best=best)
    if settings.get("seed") is None:
        settings["seed"] = torch.seed() % 2**31
    shown = sys.stderr.isatty() if watch is None else watch
    return Session(
        model,
        model.sampler_config(preset, **settings),
        Console(stderr=True) if shown else None,
        recorded,
    )


def row_part(step: DenoiseStep, start: int) -> DenoiseStep:
    """A step as seen from position ``start`` on."""
    parts = {name: value[:, start:] for name, value in vars(step).items() if isinstance(value, torch.Tensor)}
    return replace(step, **parts)
