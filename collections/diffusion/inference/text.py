"""Text that goes on from prompts."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from rich.console import Console

from nemo_dllm.collections.diffusion.inference.load import LoadedModel, context_length
from nemo_dllm.collections.diffusion.inference.output_file import check_can_write, whole_file
from nemo_dllm.collections.diffusion.inference.prompts import is_json_lines, read_prompts
from nemo_dllm.collections.diffusion.inference.session import Session, open_session
from nemo_dllm.collections.diffusion.sampling import (
    DenoiseStep,
    SamplerConfig,
    generate_stream,
    generation_result,
)
from nemo_dllm.collections.diffusion.sampling import generate as generate_tokens
from nemo_dllm.collections.diffusion.sampling.display import VISIBLE_CONTROLS

# Models of blocks write texts of ten times their training's length (Arriola et al. 2025).
_MOST_CONTEXTS = 16


class Completion(NamedTuple):
    """What a model made of a prompt; a line of JSON has these fields."""

    prompt: str
    sample: int
    """Which of the samples of a prompt, from 0."""
    completion: str
    finish_reason: str
    """``stop`` where the text ended, else ``length``."""
    tokens: int
    """Generated ones, the end token included."""


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
    return _single_text(Session(model, config, show_on), prompt)


def complete(session: Session, prompts: Sequence[str], num_samples: int, batch_size: int) -> Iterator[Completion]:
    """Continue many texts, in order, several at a time; what a text gets does not depend on the others.

    Args:
        session: the model and its settings.
        prompts: texts to go on from.
        num_samples: how many continuations each gets.
        batch_size: rows at a time.

    Raises:
        ValueError: where a prompt is longer than the model's context, before anything is generated.
    """
    model = session.model
    encoded = [model.encode(prompt) for prompt in prompts]
    for number, tokens in enumerate(encoded, start=1):
        session.check_length(f"prompt {number}", len(tokens))
    session.note_length(max(map(len, encoded)))
    rows = [(prompt, sample) for prompt in range(len(prompts)) for sample in range(num_samples)]
    for start in range(0, len(rows), batch_size):
        batch = rows[start : start + batch_size]
        result = generate_tokens(
            model.denoiser,
            [encoded[prompt] for prompt, _ in batch],
            session.config,
            row_ids=range(start, start + len(batch)),
            decode=model.decode,
            **session.canvas(),
        )
        for (prompt, sample), tokens, reason in zip(batch, result.completions, result.finish_reasons, strict=True):
            text = model.decode(tokens.tolist())
            yield Completion(prompts[prompt], sample, text, reason, len(tokens))


def generate(
    path: str | Path,
    prompt: str,
    prompt_file: Path | None,
    output: Path | None,
    num_samples: int,
    batch_size: int,
    stream: bool,
    watch: bool | None,
    replay: Path | None,
    best: bool,
    preset: str | None,
    settings: Mapping[str, Any],
) -> None:
    """Continue texts and print or write them; see ``cli.sampling`` for the arguments.

    A single text is printed with its prompt, several as lines of JSON. ``output`` is there when all of them are.

    Raises:
        ValueError: for numbers below 1, options that exclude each other, and many more new tokens than the model's
            context; see also :func:`open_session`.
        OSError: where ``output`` cannot be written.
    """
    for name, value in (("num_samples", num_samples), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    prompts = [prompt] if prompt_file is None else read_prompts(Path(prompt_file))
    in_lines = output is not None or num_samples > 1 or (prompt_file is not None and is_json_lines(Path(prompt_file)))
    if in_lines and (stream or watch or replay):
        raise ValueError(
            "stream=True, watch=True and replay=FILE follow a single text; leave them out, or give a single prompt"
        )
    if output is not None:
        check_can_write(output)
    _check_new_tokens(path, best, settings)
    watch = False if stream or in_lines else watch
    session = open_session(path, best=best, preset=preset, settings=settings, watch=watch, replay=replay)
    if in_lines:
        session.note_samples(num_samples)
        completions = complete(session, prompts, num_samples, batch_size)
        if output is None:
            _write_lines(completions, sys.stdout)
        else:
            with whole_file(output) as file:
                _write_lines(completions, file)
        return
    length = len(session.model.encode(prompts[0]))
    session.check_length("the prompt", length)
    session.note_length(length)
    text = _single_text(session, prompts[0], stream_to=sys.stdout if stream else None)
    if not stream:
        print(printable(text))
    if session.replay is not None:
        session.replay.write()


def _check_new_tokens(path: str | Path, best: bool, settings: Mapping[str, Any]) -> None:
    """Refuse what would take hours and all memory, before the model is loaded; what is less gets a note."""
    asked = settings.get("max_new_tokens")
    if asked is None:
        return
    context = context_length(path, best=best)
    if min(asked, settings.get("max_length") or asked) > _MOST_CONTEXTS * context:
        raise ValueError(
            f"max_new_tokens={asked} is more than {_MOST_CONTEXTS} times the model's context of {context}; choose "
            f"{context} or less, prompt included"
        )


def _single_text(session: Session, prompt: str, stream_to: TextIO | None = None) -> str:
    model, prompts = session.model, [session.model.encode(prompt)]
    steps = generate_stream(model.denoiser, prompts, session.config, decode=model.decode, **session.canvas())
    if stream_to is not None:
        steps = _printing_settled(steps, model, stream_to)
    last = session.follow(steps)
    result = generation_result(last, prompts, session.config, model.decode)
    return model.decode(result.sequences[0].tolist())


def _printing_settled(steps: Iterator[DenoiseStep], model: LoadedModel, file: TextIO) -> Iterator[DenoiseStep]:
    """Pass steps on, and print the prompt and what follows it once no later step can change it."""
    printed, given_T = "", None
    for step in steps:
        if given_T is None:
            given_T = ~(step.holes_BT | step.committed_BT)[0]
        # A character that lacks some bytes is decoded as U+FFFD.
        text = model.decode(step.tokens_BT[0][given_T | step.settled_BT[0]].tolist())
        text = text.rstrip("\N{REPLACEMENT CHARACTER}")
        if text.startswith(printed):
            print(printable(text[len(printed) :]), end="", flush=True, file=file)
            printed = text
        yield step
    print(file=file)


def printable(text: str) -> str:
    """A text without control characters, where it goes to a terminal, which would obey them."""
    return text.translate(VISIBLE_CONTROLS) if sys.stdout.isatty() else text


def _write_lines(completions: Iterator[Completion], file: TextIO) -> None:
    for completion in completions:
        print(json.dumps(completion._asdict(), ensure_ascii=False), file=file, flush=True)
