"""The denoising loop: predict every candidate, commit the best, repeat until no hole is left.

Shape letters: B rows, T canvas positions, N candidate positions of all rows in row-major order, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_dllm.collections.diffusion.sampling.blocks import block_indices, current_block_holes
from nemo_dllm.collections.diffusion.sampling.config import SamplerConfig
from nemo_dllm.collections.diffusion.sampling.model_function import DenoiserFn
from nemo_dllm.collections.diffusion.sampling.noise import RowNoise
from nemo_dllm.collections.diffusion.sampling.remasking import REMASKING_POLICIES, Predictions
from nemo_dllm.collections.diffusion.sampling.token_choice import choose_tokens, forbid_tokens
from nemo_dllm.collections.diffusion.sampling.transfer import commit_quotas


@dataclass(frozen=True, eq=False)
class DenoiseStep:
    """The canvas after one forward pass; later steps leave these tensors alone.

    Attributes:
        tokens_BT: int64, holes hold the mask token.
        holes_BT: bool, positions still to fill.
        committed_BT: bool, positions filled by this step, those closed by an end token included.
        step: forward passes so far, from 1.
    """

    tokens_BT: Tensor
    holes_BT: Tensor
    committed_BT: Tensor
    step: int


def denoise(
    model: DenoiserFn,
    canvas_BT: Tensor,
    holes_BT: Tensor,
    mask_token_id: int,
    config: SamplerConfig,
    key_mask_BT: Tensor | None = None,
    row_ids: Sequence[int] | None = None,
) -> Iterator[DenoiseStep]:
    """Fill the holes of a canvas, one forward pass per step.

    Only holes are ever written, wherever else the mask token occurs. Rows do not influence each other: each has its
    own schedule, block and noise, and a full row stays as it is.

    Args:
        model: scores every token at every position.
        canvas_BT: int64 token ids; those under holes are ignored.
        holes_BT: bool, positions to fill.
        mask_token_id: token shown to the model at holes; never chosen.
        config: ``max_new_tokens`` is not read.
        key_mask_BT: bool, False at padding; handed to the model.
        row_ids: identity of each row, keys its noise together with ``config.seed``; None is 0 to B - 1. A row sampled
            alone under its id repeats what it gave in a batch.

    Returns:
        An iterator over the steps; empty, without any forward pass, if there is no hole.

    Raises:
        ValueError: shapes or dtypes disagree, or an id is outside the vocabulary.
    """
    if holes_BT.dtype != torch.bool or holes_BT.shape != canvas_BT.shape or canvas_BT.ndim != 2:
        raise ValueError(
            f"holes_BT is {holes_BT.dtype} {list(holes_BT.shape)} for canvas_BT of shape {list(canvas_BT.shape)}; "
            "give both as [rows, positions] and holes_BT as bool"
        )
    row_ids = range(len(canvas_BT)) if row_ids is None else row_ids
    if len(row_ids) != len(canvas_BT):
        raise ValueError(f"row_ids has {len(row_ids)} entries for {len(canvas_BT)} rows; give one per row")
    noise = RowNoise(config.seed, row_ids, canvas_BT.device)
    return _steps(model, canvas_BT, holes_BT, mask_token_id, config, key_mask_BT, noise)


def _steps(model, canvas_BT, holes_BT, mask_token_id, config, key_mask_BT, noise) -> Iterator[DenoiseStep]:
    tokens_BT = canvas_BT.masked_fill(holes_BT, mask_token_id)
    generated_BT = holes_BT
    blocks_BT = block_indices(holes_BT, config.block_size)
    quotas = commit_quotas(holes_BT, blocks_BT, config.steps, config.alpha)
    step = 0
    while holes_BT.any():
        candidates_BT = current_block_holes(holes_BT, blocks_BT)
        with torch.no_grad():
            logits_BTV = model(tokens_BT, key_mask_BT=key_mask_BT)
        logits_NV = _candidate_logits(logits_BTV, candidates_BT, config.right_shift)
        logits_NV = forbid_tokens(logits_NV, mask_token_id, config.suppress_token_ids)
        predictions = _predict(logits_NV, candidates_BT, config, noise)
        committed_BT = _select(predictions, candidates_BT, next(quotas), config)
        proposed_BT = tokens_BT.masked_scatter(candidates_BT, predictions.tokens_N)
        tokens_BT = torch.where(committed_BT, proposed_BT, tokens_BT)
        open_BT = holes_BT & ~committed_BT
        if config.stop_at_eos and config.eos_token_id is not None:
            ended_BT = _holes_after_end(tokens_BT, open_BT, generated_BT, config.eos_token_id)
            tokens_BT = tokens_BT.masked_fill(ended_BT, config.eos_token_id)
            open_BT = open_BT & ~ended_BT
        step += 1
        yield DenoiseStep(tokens_BT, open_BT, holes_BT & ~open_BT, step)
        holes_BT = open_BT


def _candidate_logits(logits_BTV: Tensor, candidates_BT: Tensor, right_shift: bool) -> Tensor:
    rows_N, positions_N = candidates_BT.nonzero(as_tuple=True)
    if right_shift:
        positions_N = (positions_N - 1).clamp_min(0)
    return logits_BTV[rows_N, positions_N]


def _predict(logits_NV: Tensor, candidates_BT: Tensor, config: SamplerConfig, noise: RowNoise) -> Predictions:
    # Noise is drawn for the row's own candidates alone: numbers spent on padding would tie a row to its batch.
    per_row = candidates_BT.sum(dim=1).tolist()
    return Predictions(
        tokens_N=choose_tokens(logits_NV, per_row, config, noise),
        probabilities_NV=logits_NV.softmax(dim=-1),
        draw_uniform_N=lambda: noise.uniform(per_row),
    )


def _select(predictions: Predictions, candidates_BT: Tensor, quota_B: Tensor, config: SamplerConfig) -> Tensor:
    """Positions to commit: the ``quota_B`` best of each row and, with a threshold, all above it; bool [B, T]."""
    scores_N = REMASKING_POLICIES[config.remasking](predictions)
    lowest_BT = torch.full(candidates_BT.shape, -torch.inf, dtype=scores_N.dtype, device=scores_N.device)
    scores_BT = lowest_BT.masked_scatter(candidates_BT, scores_N)
    # topk may return equal scores in any order; a stable sort puts the lowest position first.
    order_BT = scores_BT.argsort(dim=1, descending=True, stable=True)
    selected_BT = order_BT.argsort(dim=1) < quota_B[:, None]
    if config.threshold is not None:
        above_N = predictions.chosen_probability() > config.threshold
        selected_BT = selected_BT.masked_scatter(candidates_BT, selected_BT[candidates_BT] | above_N)
    return selected_BT & candidates_BT


def _holes_after_end(tokens_BT: Tensor, holes_BT: Tensor, generated_BT: Tensor, eos_token_id: int) -> Tensor:
    """Holes behind a generated end token that has no hole before it: nothing there can change the text."""
    settled_BT = holes_BT.cumsum(dim=1) == 0
    ended_B = ((tokens_BT == eos_token_id) & generated_BT & settled_BT).any(dim=1)
    return holes_BT & ended_B[:, None]
