"""From a batch of clean tokens to what the model needs on its device.

Shape letters: B samples, L positions, N target positions of the micro-batch.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nemo_dllm.collections.diffusion.models.core import Targets
from nemo_dllm.collections.diffusion.objectives import Objective

NUM_TIME_BUCKETS = 10


class DiffusionBatch(NamedTuple):
    """A corrupted micro-batch on the model's device."""

    input_ids: Tensor
    """int64 [B, L]: noised tokens."""
    key_mask: Tensor | None
    """bool [B, L], True = real token; None where there is no padding."""
    targets: Targets
    nll_weight_N: Tensor
    """fp32: weight of each target's negative log-likelihood in the likelihood bound."""
    time_bucket_N: Tensor
    """int64 in [0, NUM_TIME_BUCKETS): time of each target's sequence, in equal steps over (0, 1]."""
    count: int
    """Denominator of the loss."""
    counts_3: Tensor
    """fp64: ``count``, then the tokens that could have been masked (the denominator of the likelihood bound), then
    those that were. On the device, so that no metric waits for it."""


def corrupt_batch(batch: dict, objective: Objective, *, validation: bool) -> DiffusionBatch:
    """Draw the noise of a micro-batch and list its target positions, on the CPU.

    Args:
        batch: ``tokens`` int64 [B, L], ``loss_mask`` bool [B, L], ``sample_index`` int64 [B], optional ``key_mask``
            bool [B, L] (True = real token).
        objective: an objective of ``nemo_dllm.collections.diffusion.objectives``.
        validation: use the fixed noise of validation.
    """
    tokens_BL = batch["tokens"]
    noised = objective.corrupt(tokens_BL, batch["loss_mask"], batch["sample_index"], validation=validation)
    sample_N, position_N = noised.masked.nonzero(as_tuple=True)
    key_mask = batch.get("key_mask")
    if key_mask is not None and bool(key_mask.all()):
        key_mask = None
    bucket_B = (noised.time * NUM_TIME_BUCKETS).ceil().long().sub(1).clamp(0, NUM_TIME_BUCKETS - 1)
    return DiffusionBatch(
        input_ids=noised.tokens,
        key_mask=key_mask,
        targets=Targets(
            row_N=(position_N - objective.shift).clamp(min=0) * len(tokens_BL) + sample_N,
            token_N=tokens_BL[sample_N, position_N],
            loss_weight_N=noised.loss_weight[sample_N, position_N],
        ),
        nll_weight_N=noised.nll_weight[sample_N, position_N],
        time_bucket_N=bucket_B[sample_N],
        count=int(noised.count),
        counts_3=torch.stack([noised.count, noised.maskable.sum(), noised.masked.sum()]).double(),
    )


def to_device(batch: DiffusionBatch) -> DiffusionBatch:
    """Move a batch to the current device; the host does not wait for the copies."""
    device = torch.cuda.current_device()

    def move(value):
        if isinstance(value, Targets):
            return Targets(*map(move, value))
        if isinstance(value, Tensor):
            return value.pin_memory().to(device, non_blocking=True)
        return value

    return DiffusionBatch(*map(move, batch))
