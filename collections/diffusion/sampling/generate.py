"""Text generation and infilling on top of the denoising loop.

Shape letters: B rows, T canvas positions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy
import torch
from torch import Tensor

from nemo_dllm.collections.diffusion.sampling.config import SamplerConfig
from nemo_dllm.collections.diffusion.sampling.denoise import denoise
from nemo_dllm.collections.diffusion.sampling.model_function import CachedDenoiser, DenoiserFn
from nemo_dllm.collections.diffusion.sampling.rows import (
    TokenRow,
    as_holes,
    as_row,
    canvas_of,
    device_of,
    padding_of,
)
from nemo_dllm.collections.diffusion.sampling.step import DenoiseStep
from nemo_dllm.collections.diffusion.sampling.stopping import Decode, text_end


@dataclass(frozen=True, eq=False)
class GenerateResult:
    """What a run produced, one entry per row; tokens are int64, one-dimensional and on the CPU.

    Attributes:
        sequences: the whole rows: prompt and completion, or the filled input.
        completions: the generated tokens alone, up to and including what ends the text.
        steps: forward passes of the model.
        finish_reasons: "stop" where an end token or a stop string ended the text, else "length".
    """

    sequences: list[Tensor]
    completions: list[Tensor]
    steps: int
    finish_reasons: list[str]


def generate(
    model: DenoiserFn | CachedDenoiser,
    prompts: Sequence[TokenRow],
    config: SamplerConfig,
    *,
    mask_token_id: int,
    pad_token_id: int | None = None,
    row_ids: Sequence[int] | None = None,
    seeds: Sequence[int] | None = None,
    decode: Decode | None = None,
    device: torch.device | str | None = None,
) -> GenerateResult:
    """Continue each prompt by ``config.max_new_tokens`` tokens, or until its text ends.

    A batch gives what its prompts give one by one. Repeat a prompt to get several samples of it.

    Args:
        model: scores every token at every position; with ``config.cache`` a ``CachedDenoiser``.
        prompts: token ids of each row, of any lengths. Mask tokens in a prompt are text like any other: they are shown
            to the model, and stay.
        config: how positions are filled.
        mask_token_id: token shown to the model at unfilled positions; never generated.
        pad_token_id: fills the canvas behind shorter rows, where the key mask hides it; None takes the mask token.
        row_ids: identity of each row, keys its noise together with its seed; None is 0 to B - 1, or 0 for every row
            where ``seeds`` are given.
        seeds: one per row, in place of ``config.seed``: requests of a batch repeat what each gave alone.
        decode: token ids -> text, for ``config.stop_strings``.
        device: of the model; None is the device of the prompts, the CPU for lists.

    Raises:
        ValueError: there are no prompts, one is empty where it must not be or leaves no room for new tokens, an id is
            outside the vocabulary, or the model does not fit the cache.
    """
    steps = generate_stream(
        model,
        prompts,
        config,
        mask_token_id=mask_token_id,
        pad_token_id=pad_token_id,
        row_ids=row_ids,
        seeds=seeds,
        decode=decode,
        device=device,
    )
    for last in steps:  # noqa: B007
        pass
    return generation_result(last, prompts, config, decode)


def generate_stream(
    model: DenoiserFn | CachedDenoiser,
    prompts: Sequence[TokenRow],
    config: SamplerConfig,
    *,
    mask_token_id: int,
    pad_token_id: int | None = None,
    row_ids: Sequence[int] | None = None,
    seeds: Sequence[int] | None = None,
    decode: Decode | None = None,
    device: torch.device | str | None = None,
) -> Iterator[DenoiseStep]:
    """As ``generate``, but hand out the canvas after every step; ``generation_result`` reads the last one."""
    if len(prompts) == 0:
        raise ValueError("prompts is empty; give at least one prompt, as a list of token ids")
    starts = [as_row(_start(prompt, index, config), f"prompts[{index}]") for index, prompt in enumerate(prompts)]
    lengths = [_new_tokens(len(start), index, config) for index, start in enumerate(starts)]
    holes = [numpy.arange(len(start) + length) >= len(start) for start, length in zip(starts, lengths, strict=True)]
    stacked = canvas_of(starts, holes, padding_of(mask_token_id, pad_token_id), config)
    return denoise(
        model,
        stacked.tokens_BT,
        stacked.holes_BT,
        mask_token_id,
        config,
        stacked.key_mask_BT,
        row_ids,
        seeds=seeds,
        decode=decode,
        device=device_of(prompts, device),
    )


def generation_result(
    last: DenoiseStep, prompts: Sequence[TokenRow], config: SamplerConfig, decode: Decode | None = None
) -> GenerateResult:
    """Cut prompts and completions out of the last step that ``generate_stream`` gave for them."""
    sequences, completions, reasons = [], [], []
    for index, (tokens_T, prompt) in enumerate(zip(last.tokens_BT, prompts, strict=True)):
        start = len(_start(prompt, index, config))
        end = start + _new_tokens(start, index, config)
        length = text_end(tokens_T[start:end].tolist(), config, decode)
        end = end if length is None else start + length
        sequences.append(tokens_T[:end])
        completions.append(tokens_T[start:end])
        reasons.append("length" if length is None else "stop")
    return GenerateResult(sequences, completions, last.step, reasons)


def infill(
    model: DenoiserFn | CachedDenoiser,
    tokens: Sequence[TokenRow],
    holes: Sequence[Sequence[bool] | Tensor],
    config: SamplerConfig,
    *,
    mask_token_id: int,
    pad_token_id: int | None = None,
    row_ids: Sequence[int] | None = None,
    seeds: Sequence[int] | None = None,
    device: torch.device | str | None = None,
) -> GenerateResult:
    """Fill marked positions inside given rows; lengths and all other tokens stay.

    Nothing stops a row, since text may follow. A block-causal model sees of that text what lies in the block at hand.

    Args:
        model: scores every token at every position; with ``config.cache`` a ``CachedDenoiser``.
        tokens: token ids of each row, of any lengths; those under holes are ignored.
        holes: per row as many booleans, True where a token is to be found.
        config: how positions are filled; lengths, end tokens and stop strings have no meaning here. See
            ``settings_of_gaps`` for more steps than ``max_new_tokens``.
        mask_token_id: token shown to the model at holes; never chosen.
        pad_token_id, row_ids, seeds: as for ``generate``.
        device: of the model; None is the device of the tokens, the CPU for lists.

    Returns:
        ``completions`` are the tokens at the holes, in order. Without any hole the rows come back as they are, after 0
        steps.

    Raises:
        ValueError: there are no rows, a row and its holes differ in length, or an id is outside the vocabulary.
    """
    rows = [as_row(row, f"tokens[{index}]") for index, row in enumerate(tokens)]
    hole_rows = [as_holes(row, f"holes[{index}]") for index, row in enumerate(holes)]
    lengths, hole_lengths = list(map(len, rows)), list(map(len, hole_rows))
    if not lengths or lengths != hole_lengths:
        raise ValueError(
            f"holes has rows of lengths {hole_lengths} for tokens of lengths {lengths}; give at least one row and one "
            "boolean per token"
        )
    config = replace(config, stop_at_eos=False, stop_token_ids=(), stop_strings=(), min_new_tokens=0)
    stacked = canvas_of(rows, hole_rows, padding_of(mask_token_id, pad_token_id), config)
    filled_BT, passes = stacked.tokens_BT, 0
    canvas = (stacked.tokens_BT, stacked.holes_BT, mask_token_id, config, stacked.key_mask_BT, row_ids)
    for last in denoise(model, *canvas, seeds=seeds, device=device_of(tokens, device)):
        filled_BT, passes = last.tokens_BT, last.step
    sequences = [filled_T[:length] for filled_T, length in zip(filled_BT, lengths, strict=True)]
    completions = [row[row_holes] for row, row_holes in zip(sequences, hole_rows, strict=True)]
    return GenerateResult(sequences, completions, passes, ["length"] * len(rows))


def span_between(prefix: Sequence[int], suffix: Sequence[int], length: int) -> tuple[list[int], list[bool]]:
    """One row for ``infill``: ``length`` holes between two texts. Returns its tokens and its holes.

    Raises:
        ValueError: ``length`` is negative.
    """
    if length < 0:
        raise ValueError(f"length={length} must be at least 0")
    tokens = [*prefix, *[0] * length, *suffix]
    return tokens, [len(prefix) <= index < len(prefix) + length for index in range(len(tokens))]


def _start(prompt: TokenRow, index: int, config: SamplerConfig) -> TokenRow:
    """The prompt, or the start token where it is empty."""
    # A tensor that is a single number has no length, whatever its methods.
    if not hasattr(prompt, "__len__") or getattr(prompt, "ndim", 1) == 0:
        raise ValueError(f"prompts[{index}]={prompt!r} is no sequence of token ids; give one per row, as [[1, 2, 3]]")
    if len(prompt) > 0:
        return prompt
    if config.bos_token_id is not None:
        return [config.bos_token_id]
    if config.right_shift:
        raise ValueError(
            f"prompts[{index}] is empty, and right_shift scores each token from its left neighbour; set bos_token_id, "
            "or start the prompt with a token"
        )
    return prompt


def _new_tokens(start: int, index: int, config: SamplerConfig) -> int:
    """How many tokens a row gets after ``start`` given ones."""
    if config.max_length is None:
        return config.max_new_tokens
    room = config.max_length - start
    if room < 1:
        raise ValueError(
            f"prompts[{index}] has {start} tokens, which leaves no room for new ones within "
            f"max_length={config.max_length}; shorten the prompt or raise max_length"
        )
    return min(room, config.max_new_tokens)
