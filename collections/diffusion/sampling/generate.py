"""Text generation and infilling on top of the denoising loop.

Shape letters: B rows, T canvas positions.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from nemo_dllm.collections.diffusion.sampling.config import SamplerConfig
from nemo_dllm.collections.diffusion.sampling.denoise import denoise
from nemo_dllm.collections.diffusion.sampling.model_function import CachedDenoiser, DenoiserFn
from nemo_dllm.collections.diffusion.sampling.step import DenoiseStep
from nemo_dllm.collections.diffusion.sampling.stopping import Decode, text_end

TokenRow = Sequence[int] | Tensor


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


class _Rows(NamedTuple):
    tokens_BT: Tensor
    holes_BT: Tensor
    key_mask_BT: Tensor | None


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
    starts = [_as_row(_start(prompt, index, config), f"prompts[{index}]") for index, prompt in enumerate(prompts)]
    lengths = [_new_tokens(len(start), index, config) for index, start in enumerate(starts)]
    holes = [numpy.arange(len(start) + length) >= len(start) for start, length in zip(starts, lengths, strict=True)]
    stacked = _stack_rows(starts, holes, mask_token_id if pad_token_id is None else pad_token_id, config)
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
        device=_device_of(prompts, device),
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
    rows = [_as_row(row, f"tokens[{index}]") for index, row in enumerate(tokens)]
    lengths, hole_lengths = [len(row) for row in rows], [len(row) for row in holes]
    if not lengths or lengths != hole_lengths:
        raise ValueError(
            f"holes has rows of lengths {hole_lengths} for tokens of lengths {lengths}; give at least one row and one "
            "boolean per token"
        )
    hole_rows = [torch.as_tensor(row, dtype=torch.bool).cpu().numpy() for row in holes]
    for index, hole_row in enumerate(hole_rows):
        if hole_row.ndim != 1:
            raise ValueError(f"holes[{index}] is of shape {list(hole_row.shape)}; give one boolean per token")
    config = replace(config, stop_at_eos=False, stop_token_ids=(), stop_strings=(), min_new_tokens=0)
    stacked = _stack_rows(rows, hole_rows, mask_token_id if pad_token_id is None else pad_token_id, config)
    filled_BT, passes = stacked.tokens_BT, 0
    canvas = (stacked.tokens_BT, stacked.holes_BT, mask_token_id, config, stacked.key_mask_BT, row_ids)
    for last in denoise(model, *canvas, seeds=seeds, device=_device_of(tokens, device)):
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


def _device_of(rows: Sequence[TokenRow], device: torch.device | str | None) -> torch.device:
    """The model's: the one that is given, or that of the rows."""
    if device is None:
        device = next((row.device for row in rows if isinstance(row, Tensor)), "cpu")
    return torch.device(device)


def _as_row(ids: TokenRow, name: str) -> Tensor:
    """On the CPU, where canvases are put together."""
    try:
        row = _as_tensor(ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name}={ids!r} is no sequence of token ids ({error})") from error
    whole = row.numel() == 0 or not (row.is_floating_point() or row.is_complex() or row.dtype == torch.bool)
    if row.ndim != 1 or not whole:
        raise ValueError(
            f"{name} is {row.dtype} of shape {list(row.shape)}; give each row as a sequence of token ids, which are "
            "whole numbers"
        )
    return row.long()


def _as_tensor(ids: TokenRow) -> Tensor:
    if isinstance(ids, list) and ids and type(ids[0]) is int:
        # Numpy reads them in a third of the time; what else there may be among them, it cannot.
        with suppress(TypeError, ValueError, RuntimeError):
            array = numpy.asarray(ids)
            if array.dtype == numpy.int64:
                return torch.from_numpy(array)
    return torch.as_tensor(ids).cpu()


def _start(prompt: TokenRow, index: int, config: SamplerConfig) -> TokenRow:
    """The prompt, or the start token where it is empty."""
    if not hasattr(prompt, "__len__"):
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


def _stack_rows(
    rows: Sequence[Tensor], holes: Sequence[numpy.ndarray], pad_token_id: int, config: SamplerConfig
) -> _Rows:
    """Stack rows left-aligned, so that positions run on from prompt to answer; pads on the right are no keys.

    Holes at the end of a row need no tokens.
    """
    shape, pad_token_id = (len(rows), max(map(len, holes))), int(pad_token_id)
    tokens_BT = numpy.full(shape, pad_token_id, dtype=numpy.int64)
    holes_BT, key_mask_BT = numpy.zeros((2, *shape), dtype=bool)
    for row, (tokens_T, holes_T) in enumerate(zip(rows, holes, strict=True)):
        tokens_BT[row, : len(tokens_T)] = tokens_T.numpy()
        holes_BT[row, : len(holes_T)] = holes_T
        key_mask_BT[row, : len(holes_T)] = True
    if config.quirks.pad_ids_are_padding:
        key_mask_BT &= holes_BT | (tokens_BT != pad_token_id)
    elif key_mask_BT.all():
        # A mask that hides nothing would only keep attention off its fast path.
        return _Rows(torch.from_numpy(tokens_BT), torch.from_numpy(holes_BT), None)
    return _Rows(*map(torch.from_numpy, (tokens_BT, holes_BT, key_mask_BT)))
