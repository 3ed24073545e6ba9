"""Masked (absorbing-state) diffusion: what is hidden from the model, and how its losses add up.

The model predicts the tokens that ``corrupt`` replaced by the mask token. ``reduce`` takes the negative
log-likelihood per token, not logits, so that how a vocabulary is sharded never reaches this file, and returns a sum
and a count, never a mean: both add over micro-batches and data-parallel ranks.

Suffixes: B samples, L positions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nemo_dllm.collections.diffusion.objectives.noise import uniforms
from nemo_dllm.collections.diffusion.objectives.registry import look_up
from nemo_dllm.collections.diffusion.objectives.schedules import Schedule, get_schedule
from nemo_dllm.collections.diffusion.objectives.times import TIME_SAMPLINGS, training_times, validation_times


class Corruption(NamedTuple):
    """A noised batch and the weights of its loss."""

    tokens: Tensor  # int64 [B, L], the model's input: mask_token_id where masked
    masked: Tensor  # bool [B, L], what was drawn; clean text may hold mask_token_id elsewhere
    time: Tensor  # float32 [B], diffusion time in (0, 1]
    loss_weight: Tensor  # float32 [B, L], weight of a position's NLL in the numerator of the loss; 0 unless masked
    nll_weight: Tensor  # float32 [B, L], weight in the NELBO per token, whatever the loss is; 0 unless masked
    count: Tensor  # int64 [], denominator of the loss
    maskable: Tensor  # bool [B, L], positions that may be masked


class LossSum(NamedTuple):
    """Numerator and denominator of a loss; each adds over micro-batches and ranks."""

    sum: Tensor  # float32 []
    count: Tensor  # int64 []

    @property
    def mean(self) -> Tensor:
        """sum / count in nats; 0 where there is nothing to count."""
        return self.sum / self.count.clamp(min=1)


def _per_token(maskable_BL: Tensor) -> tuple[Tensor, Tensor]:
    return maskable_BL.new_ones((), dtype=torch.float32), maskable_BL.sum()


def _per_sequence(maskable_BL: Tensor) -> tuple[Tensor, Tensor]:
    return 1 / maskable_BL.sum(dim=1, keepdim=True).clamp(min=1), _rows(maskable_BL)


def _per_batch(maskable_BL: Tensor) -> tuple[Tensor, Tensor]:
    return maskable_BL.new_ones((), dtype=torch.float32), _rows(maskable_BL)


def _rows(maskable_BL: Tensor) -> Tensor:
    return maskable_BL.new_full((), maskable_BL.shape[0], dtype=torch.int64)


# loss_norm -> (scale of the loss weights, broadcastable to [B, L]; denominator).
LOSS_NORMS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "token": _per_token,
    "sequence": _per_sequence,
    "batch": _per_batch,
}

# loss_weight -> weight of a masked position from its schedule weight.
LOSS_WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {"scheduler": lambda weight: weight, "uniform": torch.ones_like}


@dataclass
class MaskedDiffusion:
    """Masked diffusion with a time per sequence; defaults give the NELBO per token (Sahoo et al. 2024, equation 10).

    Args:
        mask_token_id: id that replaces a masked token, not negative; None leaves it to whoever knows the tokenizer,
            before the first ``corrupt``.
        schedule: a registered name or a ``Schedule``.
        time_sampling: ``antithetic``, or ``iid`` (alias ``per_sequence``); see ``times``.
        time_epsilon: smallest time, in (0, 1).
        loss_weight: ``scheduler`` weighs by -alpha'(t) / (1 - alpha(t)); ``uniform`` by 1, which is no NELBO.
        weight_epsilon: added to the denominator of that weight; 0, except for parity with trainers that add one.
        loss_norm: ``token`` divides by the maskable (not: masked) tokens; ``sequence`` averages each row over its
            maskable tokens and then over rows; ``batch`` divides the sum by the rows. Rows without a maskable token
            count as rows.
        right_shift: the logits at position i - 1 predict token i, as in models that began autoregressive. Position 0
            then has no logits and is never masked: prepend a BOS token where the first token is to be trained.
        force_mask: mask in every row at least the maskable position with the smallest uniform. The weight does not
            account for it, so the loss is no longer exactly the NELBO.
        group_size: samples that share antithetic strata, the global batch size; a trainer may set it later.
        seed: of all noise, in [0, 2**64).
    """

    mask_token_id: int | None = None
    schedule: str | Schedule = "linear"
    time_sampling: str = "antithetic"
    time_epsilon: float = 1e-3
    loss_weight: str = "scheduler"
    weight_epsilon: float = 0.0
    loss_norm: str = "token"
    right_shift: bool = False
    force_mask: bool = False
    group_size: int | None = None
    seed: int = 1234

    def __post_init__(self):
        get_schedule(self.schedule)
        look_up("time_sampling", self.time_sampling, TIME_SAMPLINGS)
        look_up("loss_weight", self.loss_weight, LOSS_WEIGHTS)
        look_up("loss_norm", self.loss_norm, LOSS_NORMS)
        if self.mask_token_id is not None and self.mask_token_id < 0:
            raise ValueError(f"mask_token_id={self.mask_token_id} is no token id; set the id of the mask token")
        if not 0 < self.time_epsilon < 1:
            raise ValueError(f"time_epsilon={self.time_epsilon} must be in (0, 1); 1e-3 is usual")
        if not self.weight_epsilon >= 0:
            raise ValueError(f"weight_epsilon={self.weight_epsilon} must not be negative; 0 is the exact weight")
        if self.group_size is not None and self.group_size < 1:
            raise ValueError(f"group_size={self.group_size} must be at least 1; it is the global batch size in samples")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed={self.seed} is outside [0, 2**64)")

    @property
    def shift(self) -> int:
        """The logits that predict position i stand at position i - shift."""
        return int(self.right_shift)

    def draw_times(self, sample_index_B: Tensor, *, validation: bool = False) -> Tensor:
        """Draw the diffusion times of samples: float32 [B] in [time_epsilon, 1], on the CPU.

        ``sample_index_B``: int64 [B], positions in consumption order counted across epochs, or the row in the
        validation set. ``ValueError`` for antithetic training times while ``group_size`` is None.
        """
        if validation:
            return validation_times(self.seed, sample_index_B, time_epsilon=self.time_epsilon)
        return training_times(
            self.time_sampling,
            self.seed,
            sample_index_B,
            group_size=self.group_size,
            time_epsilon=self.time_epsilon,
        )

    def corrupt(
        self,
        tokens_BL: Tensor,
        loss_mask_BL: Tensor,
        sample_index_B: Tensor,
        *,
        time_B: Tensor | None = None,
        uniforms_BL: Tensor | None = None,
        validation: bool = False,
    ) -> Corruption:
        """Mask each maskable token of sample i with probability 1 - alpha(t_i). The result is on the tokens' device.

        Args:
            tokens_BL: int64 [B, L], clean text.
            loss_mask_BL: [B, L], non-zero where a token may be masked and trained; prompts and pads are 0.
            sample_index_B: int64 [B], as in ``draw_times``; all noise follows from it and ``seed``.
            time_B: [B] in (0, 1], in place of the drawn times.
            uniforms_BL: float32 [B, L] in [0, 1), in place of the drawn ones; masked where below 1 - alpha(t).
            validation: draw from the validation streams.
        """
        if self.mask_token_id is None:
            raise ValueError("mask_token_id is None; set it to the id of the tokenizer's mask token")
        if time_B is None:
            time_B = self.draw_times(sample_index_B, validation=validation)
        if uniforms_BL is None:
            stream = "validation_mask" if validation else "mask"
            uniforms_BL = uniforms(self.seed, sample_index_B, tokens_BL.shape[1], stream)
        schedule = get_schedule(self.schedule)
        # Evaluated where the times were drawn, on the CPU: the range check would synchronise with a GPU.
        mask_rate_B, weight_B = schedule.mask_rate(time_B), schedule.weight(time_B, self.weight_epsilon)

        device = tokens_BL.device
        uniforms_BL, time_B, mask_rate_B, weight_B = (
            noise.to(device, dtype=torch.float32, non_blocking=True)
            for noise in (uniforms_BL, time_B, mask_rate_B, weight_B)
        )
        maskable_BL = loss_mask_BL.to(device) != 0
        maskable_BL[:, : self.shift] = False
        masked_BL = self._draw_masked(maskable_BL, uniforms_BL, mask_rate_B[:, None])
        weight_B1 = weight_B[:, None]
        scale, count = LOSS_NORMS[self.loss_norm](maskable_BL)
        return Corruption(
            tokens=tokens_BL.masked_fill(masked_BL, self.mask_token_id),
            masked=masked_BL,
            time=time_B,
            loss_weight=torch.where(masked_BL, LOSS_WEIGHTS[self.loss_weight](weight_B1) * scale, 0.0),
            nll_weight=torch.where(masked_BL, weight_B1, 0.0),
            count=count,
            maskable=maskable_BL,
        )

    def _draw_masked(self, maskable_BL: Tensor, uniforms_BL: Tensor, mask_rate_B1: Tensor) -> Tensor:
        masked_BL = uniforms_BL < mask_rate_B1
        if self.force_mask:
            # If any position of a row is masked, so is the one with the smallest uniform: adding it changes nothing.
            smallest_B1 = uniforms_BL.masked_fill(~maskable_BL, 1.0).argmin(dim=1, keepdim=True)
            masked_BL = masked_BL.scatter(1, smallest_B1, True)
        return masked_BL & maskable_BL

    def reduce(self, nll_BL: Tensor, corruption: Corruption) -> LossSum:
        """Sum the weighted negative log-likelihoods (nats, [B, L]) of the clean tokens at masked positions, in float32.

        Values at other positions do not matter. A batch with nothing maskable sums to 0, with zero gradients.
        """
        nll_BL = nll_BL.masked_fill(~corruption.masked, 0.0)
        return LossSum((nll_BL * corruption.loss_weight).sum(), corruption.count)
