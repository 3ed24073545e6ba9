"""Weights and denominators of a loss. Suffixes: B samples, L positions."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class LossSum(NamedTuple):
    """Numerator and denominator of a loss; each adds over micro-batches and ranks."""

    sum: Tensor  # float32 []
    count: Tensor  # int64 []

    @property
    def mean(self) -> Tensor:
        """sum / count in nats; 0 where there is nothing to count."""
        return self.sum / self.count.clamp(min=1)


def _per_token(maskable_BL: Tensor) -> tuple[Tensor, Tensor]:
    return maskable_BL.new_ones((len(maskable_BL), 1), dtype=torch.float32), maskable_BL.sum()


def _per_sequence(maskable_BL: Tensor) -> tuple[Tensor, Tensor]:
    return 1 / maskable_BL.sum(dim=1, keepdim=True).clamp(min=1), _rows(maskable_BL)


def _per_batch(maskable_BL: Tensor) -> tuple[Tensor, Tensor]:
    return maskable_BL.new_ones((len(maskable_BL), 1), dtype=torch.float32), _rows(maskable_BL)


def _rows(maskable_BL: Tensor) -> Tensor:
    return maskable_BL.new_full((), maskable_BL.shape[0], dtype=torch.int64)


# loss_norm -> (scale of the loss weights of each row, float32 [B, 1]; denominator).
LOSS_NORMS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "token": _per_token,
    "sequence": _per_sequence,
    "batch": _per_batch,
}

# loss_weight -> weight of a masked position from its weight in the NELBO.
LOSS_WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {"scheduler": lambda weight: weight, "uniform": torch.ones_like}
