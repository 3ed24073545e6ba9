"""From a batch of clean tokens to what the model needs on its device.

Shape letters: B samples, R rows of the model's input (B, or 2 B with complementary masks), L tokens of a row, S
positions of the model's input (L, or 2 L for [noised row | clean row]), N target positions of the micro-batch.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from nemo_dllm.collections.diffusion.attention.context import copies, take_shard
from nemo_dllm.collections.diffusion.attention.masks import Bidirectional, NoisyClean, Pattern
from nemo_dllm.collections.diffusion.models.balancing import RoutedTokens, routed_tokens
from nemo_dllm.collections.diffusion.models.core import Targets
from nemo_dllm.collections.diffusion.objectives import Objective

NUM_TIME_BUCKETS = 10
CLEAN_BUCKET = NUM_TIME_BUCKETS
"""Of tokens that are predicted from clean text, by a next-token loss."""


class DiffusionBatch(NamedTuple):
    """A corrupted micro-batch on the model's device."""

    input_ids: Tensor
    """int64 [R, S]: noised tokens, followed by the clean ones for block diffusion."""
    pattern: Pattern
    """Who attends to whom; it implies the positions too."""
    targets: Targets
    nll_weight_N: Tensor
    """fp32: weight of each target's negative log-likelihood in the likelihood bound."""
    time_bucket_N: Tensor
    """int64: time of each target, in NUM_TIME_BUCKETS equal steps over (0, 1]; or CLEAN_BUCKET."""
    count: int
    """Denominator of the loss."""
    counts_3: Tensor
    """fp64: ``count``, then the tokens that could have been masked (the denominator of the likelihood bound), then
    those that were, both a mean over the views of a sample. On the device, so that no metric waits for it."""
    routed: RoutedTokens | None = None
    """What routers must know; None for a model without experts."""


def corrupt_batch(batch: dict, objective: Objective, *, validation: bool, routes: bool = False) -> DiffusionBatch:
    """Draw the noise of a micro-batch, lay out the model's input and list its target positions, on the CPU.

    Args:
        batch: ``tokens`` int64 [B, L], ``loss_mask`` bool [B, L], ``sample_index`` int64 [B], optional ``key_mask``
            bool [B, L] (True = real token), optional ``document_ids`` int64 [B, L] (equal within a document).
        objective: an objective of ``nemo_dllm.collections.diffusion.objectives``.
        validation: use the fixed noise of validation.
        routes: whether the model has routers.
    """
    tokens_BL, key_mask_BL, document_BL = batch["tokens"], batch.get("key_mask"), batch.get("document_ids")
    # Without tensors, patterns take faster kernels.
    if key_mask_BL is not None and bool(key_mask_BL.all()):
        key_mask_BL = None
    if document_BL is not None and bool((document_BL == document_BL[:, :1]).all()):
        document_BL = None
    noised = objective.corrupt(
        tokens_BL, batch["loss_mask"], batch["sample_index"], document_BL=document_BL, validation=validation
    )
    scored = objective.score(tokens_BL, noised)
    input_ids, pattern = _model_input(objective, tokens_BL, noised.tokens, key_mask_BL, document_BL)
    return DiffusionBatch(
        input_ids,
        pattern,
        targets=Targets(
            row_N=scored.position * len(noised.tokens) + scored.row,
            token_N=scored.token,
            loss_weight_N=scored.loss_weight,
        ),
        nll_weight_N=scored.nll_weight,
        time_bucket_N=_time_bucket(scored.time),
        count=int(noised.count),
        counts_3=torch.stack(
            [noised.count, noised.maskable.sum() / objective.views, noised.masked.sum() / objective.views]
        ).double(),
        routed=routed_tokens(pattern, noised, loss_norm=objective.loss_norm, views=objective.views) if routes else None,
    )


def _model_input(
    objective: Objective, tokens_BL: Tensor, noised_RL: Tensor, key_mask_BL: Tensor | None, document_BL: Tensor | None
) -> tuple[Tensor, Pattern]:
    """Input ids and pattern."""
    views = objective.views
    rows = {
        name: None if value_BL is None else value_BL.repeat(views, 1)
        for name, value_BL in (("key_mask_BL", key_mask_BL), ("document_BL", document_BL))
    }
    if objective.block_size is None:
        return noised_RL, Bidirectional(**rows)
    pattern = NoisyClean(
        objective.block_size,
        tokens_BL.size(1),
        clean_causal=objective.causal_clean,
        clean_output=objective.scores_clean,
        **rows,
    )
    return torch.cat([noised_RL, tokens_BL.repeat(views, 1)], dim=1), pattern


def _time_bucket(time_N: Tensor) -> Tensor:
    bucket_N = (time_N * NUM_TIME_BUCKETS).ceil().long().sub(1).clamp(0, NUM_TIME_BUCKETS - 1)
    return bucket_N.masked_fill(time_N == 0, CLEAN_BUCKET)


def shard_context(batch: DiffusionBatch, rank: int, ranks: int) -> DiffusionBatch:
    """A context-parallel rank's shard of a micro-batch (``attention.context``): its input and its targets.

    The pattern stays that of all positions. The counts are the first rank's, as sums over ranks count each once.
    """
    if ranks == 1:
        return batch
    rows, positions = batch.input_ids.shape
    tokens = positions // copies(batch.pattern)
    position_N, sample_N = batch.targets.row_N // rows, batch.targets.row_N % rows
    copy_N, token_N = position_N // tokens, position_N % tokens
    shard = tokens // ranks
    here_N = token_N // shard == rank
    local_N = copy_N * shard + token_N % shard
    first = rank == 0
    routed = batch.routed
    if routed is not None:
        routed = routed._replace(kind_RS=take_shard(routed.kind_RS, 1, batch.pattern, rank, ranks))
    return DiffusionBatch(
        input_ids=take_shard(batch.input_ids, 1, batch.pattern, rank, ranks),
        pattern=batch.pattern,
        targets=Targets(*(x[here_N] for x in batch.targets._replace(row_N=local_N * rows + sample_N))),
        nll_weight_N=batch.nll_weight_N[here_N],
        time_bucket_N=batch.time_bucket_N[here_N],
        count=batch.count * first,
        counts_3=batch.counts_3 * first,
        routed=routed,
    )


def to_device(batch: DiffusionBatch) -> DiffusionBatch:
    """Move a batch to the current device; the host does not wait for the copies."""
    device = torch.cuda.current_device()

    def move(value):
        if isinstance(value, Targets | RoutedTokens):
            return type(value)(*map(move, value))
        if isinstance(value, Pattern):
            return replace(value, **{name: move(x) for name, x in vars(value).items() if isinstance(x, Tensor)})
        if isinstance(value, Tensor):
            return value.pin_memory().to(device, non_blocking=True)
        return value

    return DiffusionBatch(*map(move, batch))
