"""Text generation and infilling on top of the denoising loop.

Shape letters: B rows, T canvas positions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nemo_dllm.collections.diffusion.sampling.config import SamplerConfig
from nemo_dllm.collections.diffusion.sampling.denoise import DenoiseStep, denoise
from nemo_dllm.collections.diffusion.sampling.model_function import DenoiserFn

TokenRow = Sequence[int] | Tensor


@dataclass(frozen=True, eq=False)
class GenerateResult:
    """What a run produced, one entry per row, all int64 and one-dimensional.

    Attributes:
        sequences: the whole rows: prompt and completion, or the filled input.
        completions: the generated tokens alone, up to and including the end token where the run stops at one.
        steps: forward passes of the model.
    """

    sequences: list[Tensor]
    completions: list[Tensor]
    steps: int


class _Canvas(NamedTuple):
    tokens_BT: Tensor
    holes_BT: Tensor
    key_mask_BT: Tensor | None


def generate(
    model: DenoiserFn,
    prompts: Sequence[TokenRow],
    config: SamplerConfig,
    *,
    mask_token_id: int,
    pad_token_id: int | None = None,
    row_ids: Sequence[int] | None = None,
    device: torch.device | str | None = None,
) -> GenerateResult:
    """Continue each prompt by ``config.max_new_tokens`` tokens, or until its end token.

    A batch gives what its prompts give one by one. Repeat a prompt to get several samples of it.

    Args:
        model: scores every token at every position.
        prompts: token ids of each row, of any lengths, empty ones included.
        config: how positions are filled.
        mask_token_id: token shown to the model at unfilled positions; never generated.
        pad_token_id: fills the canvas behind shorter rows, where the key mask hides it; None takes the mask token.
        row_ids: identity of each row, keys its noise together with ``config.seed``; None is 0 to B - 1.
        device: where the canvas lives; None is the device of the prompts, the CPU for lists.

    Raises:
        ValueError: there are no prompts, or an id is outside the vocabulary.
    """
    steps = generate_stream(
        model,
        prompts,
        config,
        mask_token_id=mask_token_id,
        pad_token_id=pad_token_id,
        row_ids=row_ids,
        device=device,
    )
    for last in steps:  # noqa: B007
        pass
    return generation_result(last, prompts, config)


def generate_stream(
    model: DenoiserFn,
    prompts: Sequence[TokenRow],
    config: SamplerConfig,
    *,
    mask_token_id: int,
    pad_token_id: int | None = None,
    row_ids: Sequence[int] | None = None,
    device: torch.device | str | None = None,
) -> Iterator[DenoiseStep]:
    """As ``generate``, but hand out the canvas after every step; ``generation_result`` reads the last one."""
    if len(prompts) == 0:
        raise ValueError("prompts is empty; give at least one prompt, which may itself be empty")
    prompt_rows = [_as_row(prompt, device) for prompt in prompts]
    rows = [torch.cat([row, row.new_full((config.max_new_tokens,), mask_token_id)]) for row in prompt_rows]
    holes = [torch.arange(len(row), device=row.device) >= len(row) - config.max_new_tokens for row in rows]
    canvas = _build_canvas(rows, holes, mask_token_id if pad_token_id is None else pad_token_id)
    return denoise(model, canvas.tokens_BT, canvas.holes_BT, mask_token_id, config, canvas.key_mask_BT, row_ids)


def generation_result(last: DenoiseStep, prompts: Sequence[TokenRow], config: SamplerConfig) -> GenerateResult:
    """Cut prompts and completions out of the last step that ``generate_stream`` gave for them."""
    sequences, completions = [], []
    for tokens_T, prompt in zip(last.tokens_BT, prompts, strict=True):
        start, end = len(prompt), len(prompt) + config.max_new_tokens
        if config.stop_at_eos and config.eos_token_id is not None:
            ends = (tokens_T[start:end] == config.eos_token_id).nonzero().flatten().tolist()
            end = start + ends[0] + 1 if ends else end
        sequences.append(tokens_T[:end])
        completions.append(tokens_T[start:end])
    return GenerateResult(sequences, completions, last.step)


def infill(
    model: DenoiserFn,
    tokens: Sequence[TokenRow],
    holes: Sequence[Sequence[bool] | Tensor],
    config: SamplerConfig,
    *,
    mask_token_id: int,
    pad_token_id: int | None = None,
    row_ids: Sequence[int] | None = None,
    device: torch.device | str | None = None,
) -> GenerateResult:
    """Fill marked positions inside given rows; lengths and all other tokens stay.

    An end token does not stop a row, since text may follow it.

    Args:
        model: scores every token at every position.
        tokens: token ids of each row, of any lengths; those under holes are ignored.
        holes: per row as many booleans, True where a token is to be found.
        config: how positions are filled; ``max_new_tokens`` and ``stop_at_eos`` have no meaning here.
        mask_token_id: token shown to the model at holes; never chosen.
        pad_token_id: fills the canvas behind shorter rows, where the key mask hides it; None takes the mask token.
        row_ids: identity of each row, keys its noise together with ``config.seed``; None is 0 to B - 1.
        device: where the canvas lives; None is the device of the tokens, the CPU for lists.

    Returns:
        ``completions`` are the tokens at the holes, in order. Without any hole the rows come back as they are, after 0
        steps.

    Raises:
        ValueError: there are no rows, a row and its holes differ in length, or an id is outside the vocabulary.
    """
    lengths, hole_lengths = [len(row) for row in tokens], [len(row) for row in holes]
    if not lengths or lengths != hole_lengths:
        raise ValueError(
            f"holes has rows of lengths {hole_lengths} for tokens of lengths {lengths}; give at least one row and one "
            "boolean per token"
        )
    rows = [_as_row(row, device) for row in tokens]
    hole_rows = [torch.as_tensor(row, dtype=torch.bool, device=rows[0].device) for row in holes]
    canvas = _build_canvas(rows, hole_rows, mask_token_id if pad_token_id is None else pad_token_id)
    filled_BT, passes = canvas.tokens_BT, 0
    config = replace(config, stop_at_eos=False)
    for last in denoise(model, canvas.tokens_BT, canvas.holes_BT, mask_token_id, config, canvas.key_mask_BT, row_ids):
        filled_BT, passes = last.tokens_BT, last.step
    sequences = [filled_T[:length] for filled_T, length in zip(filled_BT, lengths, strict=True)]
    completions = [row[row_holes] for row, row_holes in zip(sequences, hole_rows, strict=True)]
    return GenerateResult(sequences, completions, passes)


def _as_row(ids: TokenRow, device: torch.device | str | None) -> Tensor:
    return torch.as_tensor(ids, dtype=torch.int64, device=device)


def _build_canvas(rows: list[Tensor], holes: list[Tensor], pad_token_id: int) -> _Canvas:
    """Stack rows left-aligned, so that positions run on from prompt to answer; pads on the right are no keys."""
    tokens_BT = pad_sequence(rows, batch_first=True, padding_value=pad_token_id)
    holes_BT = pad_sequence(holes, batch_first=True, padding_value=False)
    lengths_B = torch.tensor([len(row) for row in rows], device=tokens_BT.device)
    key_mask_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device) < lengths_B[:, None]
    # Without padding the mask would only keep attention off its fast path.
    return _Canvas(tokens_BT, holes_BT, None if len(set(map(len, rows))) == 1 else key_mask_BT)
