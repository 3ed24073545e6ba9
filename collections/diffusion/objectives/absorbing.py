"""What objectives that hide tokens behind the mask token share: how a batch is noised and how its loss adds up.

The model predicts the tokens that ``corrupt`` replaced by the mask token. ``reduce`` takes the negative
log-likelihood per token, not logits, so that how a vocabulary is sharded never reaches this room, and returns a sum
and a count, never a mean: both add over micro-batches and data-parallel ranks.

Suffixes: B samples, R rows of the model's input (B, or 2 B with complementary masks), L positions, P parts of a sample
with a time each, N scored tokens.
"""

import math
from dataclasses import dataclass, fields
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from nemo_dllm.collections.diffusion.objectives.documents import row_positions, segments
from nemo_dllm.collections.diffusion.objectives.losses import LOSS_NORMS, LOSS_WEIGHTS, LossSum
from nemo_dllm.collections.diffusion.objectives.noise import uniforms
from nemo_dllm.collections.diffusion.objectives.registry import look_up
from nemo_dllm.collections.diffusion.objectives.schedules import Schedule, get_schedule
from nemo_dllm.collections.diffusion.objectives.times import (
    SEQUENCE_TIMES,
    TimeSampling,
    training_times,
    validation_times,
)
from nemo_dllm.collections.diffusion.setting_types import of_type


class Corruption(NamedTuple):
    """A noised batch and the weights of its loss. Row ``view * B + sample`` is one of the views of a sample."""

    tokens: Tensor  # int64 [R, L], the model's input: mask_token_id where masked
    masked: Tensor  # bool [R, L], what was drawn; clean text may hold mask_token_id elsewhere
    time: Tensor  # float32 [R, L], diffusion time in (0, 1]
    loss_weight: Tensor  # float32 [R, L], weight of a position's NLL in the numerator of the loss; 0 unless masked
    nll_weight: Tensor  # float32 [R, L], weight in the NELBO per token, whatever the loss is; 0 unless masked
    count: Tensor  # int64 [], denominator of the loss
    maskable: Tensor  # bool [R, L], positions that may be masked
    position: Tensor  # int64 [B, L], or [1, L] where rows are documents: position of a token in its document


class ScoredTokens(NamedTuple):
    """The tokens that the model predicts, and where it does."""

    row: Tensor  # int64 [N], row of the model's input
    position: Tensor  # int64 [N], of the logits in that row; beyond L where they stand in a clean copy of the row
    token: Tensor  # int64 [N]
    loss_weight: Tensor  # float32 [N], of the negative log-likelihood, in the loss
    nll_weight: Tensor  # float32 [N], in the NELBO
    time: Tensor  # float32 [N], diffusion time; 0 where clean text is predicted from clean text


@dataclass
class AbsorbingDiffusion:
    """The fields and draws that the objectives share; defaults give the NELBO per token.

    Args:
        mask_token_id: id that replaces a masked token, not negative; None leaves it to whoever knows the tokenizer,
            before the first ``corrupt``.
        schedule: a registered name or a ``Schedule``.
        time_sampling: how diffusion times are drawn, a name of ``time_samplings``; see ``times``.
        time_epsilon: smallest time, in (0, 1).
        time_range: (low, high), 0 < low < high <= 1: training times come from this part only, as in the clipped
            schedules of Arriola et al. 2025, "Block Diffusion". Weights are scaled so that uniform logits still cost
            ln V, which for the linear schedule changes nothing. Validation is not clipped. None is (time_epsilon, 1).
        loss_weight: ``scheduler`` weighs by -alpha'(t) / (1 - alpha(t)); ``uniform`` by 1, which is no NELBO.
        weight_epsilon: added to the denominator of that weight; 0, except for parity with trainers that add one.
        loss_norm: ``token`` divides by the maskable (not: masked) tokens; ``sequence`` averages each row over its
            maskable tokens and then over rows; ``batch`` divides the sum by the rows. Rows without a maskable token
            count as rows.
        right_shift: the logits at position i - 1 predict token i, as in models that began autoregressive. The first
            position of a row (of each document, in packed rows) then has no logits and is never masked: prepend a BOS
            token where the first token is to be trained.
        force_mask: mask in every document at least the maskable position with the smallest uniform. The weight does
            not account for it, so the loss is no longer exactly the NELBO.
        complementary: give the model each sample twice, the second time with exactly those maskable tokens masked
            that the first view shows, so that every one is scored once (Wu et al. 2025, "Fast-dLLM v2"). A batch of B
            samples becomes 2 B rows, at twice the cost. The pair counts as one sample in every denominator. Its
            ``scheduler`` weights are half the NELBO's, -alpha'(t) / (1 - alpha(t)) in the first view and
            -alpha'(t) / alpha(t) in the second, whose mask rate is alpha(t); times stay below 1 - time_epsilon.
        group_size: samples that share antithetic strata, the global batch size; a trainer may set it later.
        seed: of all noise, in [0, 2**64).
    """

    mask_token_id: int | None = None
    schedule: str | Schedule = "linear"
    time_sampling: str = "antithetic"
    time_epsilon: float = 1e-3
    time_range: tuple[float, float] | None = None
    loss_weight: str = "scheduler"
    weight_epsilon: float = 0.0
    loss_norm: str = "token"
    right_shift: bool = False
    force_mask: bool = False
    complementary: bool = False
    group_size: int | None = None
    seed: int = 1234

    time_samplings: ClassVar[dict[str, TimeSampling]] = SEQUENCE_TIMES
    block_size: ClassVar[int | None] = None

    def __post_init__(self):
        get_schedule(self.schedule)
        look_up("time_sampling", self.time_sampling, self.time_samplings)
        look_up("loss_weight", self.loss_weight, LOSS_WEIGHTS)
        look_up("loss_norm", self.loss_norm, LOSS_NORMS)
        for field in fields(self):
            if field.type is not str:
                setattr(self, field.name, of_type(field.name, getattr(self, field.name), field.type))
        if self.mask_token_id is not None and self.mask_token_id < 0:
            raise ValueError(f"mask_token_id={self.mask_token_id} is no token id; set the id of the mask token")
        if not 0 < self.time_epsilon < 1:
            raise ValueError(f"time_epsilon={self.time_epsilon} must be in (0, 1); 1e-3 is usual")
        if self.time_range is not None:
            self._check_time_range()
        if not 0 <= self.weight_epsilon < math.inf:
            raise ValueError(
                f"weight_epsilon={self.weight_epsilon} must not be negative; 0 is the exact weight, infinity is none"
            )
        if self.group_size is not None and self.group_size < 1:
            raise ValueError(f"group_size={self.group_size} must be at least 1; it is the global batch size in samples")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed={self.seed} is outside [0, 2**64)")

    def _check_time_range(self) -> None:
        if len(self.time_range) != 2 or not 0 < self.time_range[0] < self.time_range[1] <= 1:
            raise ValueError(f"time_range={self.time_range} must be (low, high) with 0 < low < high <= 1")
        if self.time_range[0] >= self._latest:
            raise ValueError(
                f"time_range={self.time_range} leaves no times for complementary=True, which end at 1 - time_epsilon = "
                f"{self._latest:g}; choose a smaller time"
            )

    @property
    def _latest(self) -> float:
        # The complement of a row that is all masked has nothing to weigh.
        return 1 - self.time_epsilon if self.complementary else 1.0

    @property
    def _training_range(self) -> tuple[float, float]:
        low, high = self.time_range or (self.time_epsilon, 1.0)
        return low, min(high, self._latest)

    @property
    def shift(self) -> int:
        """The logits that predict position i stand at position i - shift."""
        return int(self.right_shift)

    @property
    def views(self) -> int:
        """Rows of the model's input per sample."""
        return 2 if self.complementary else 1

    def draw_times(self, sample_index_B: Tensor, parts_B: Tensor, *, validation: bool = False) -> Tensor:
        """Draw the diffusion times of samples: float32 [B, P], on the CPU.

        Args:
            sample_index_B: int64 [B], positions in consumption order counted across epochs, or the row in the
                validation set.
            parts_B: int64 [B], how many documents, or blocks where these have times of their own, each sample has.
            validation: draw from the stream of validation, which knows no ``time_range``.

        Raises:
            ValueError: for stratified training times while ``group_size`` is None.
        """
        if validation:
            return validation_times(self.seed, sample_index_B, parts_B, time_range=(self.time_epsilon, self._latest))
        return training_times(
            self.time_sampling,
            self.seed,
            sample_index_B,
            parts_B,
            group_size=self.group_size,
            time_range=self._training_range,
        )

    def corrupt(
        self,
        tokens_BL: Tensor,
        loss_mask_BL: Tensor,
        sample_index_B: Tensor,
        *,
        document_BL: Tensor | None = None,
        time: Tensor | None = None,
        uniforms_BL: Tensor | None = None,
        validation: bool = False,
    ) -> Corruption:
        """Mask each maskable token with probability 1 - alpha(t). The result is on the tokens' device.

        Args:
            tokens_BL: int64 [B, L], clean text.
            loss_mask_BL: [B, L], non-zero where a token may be masked and trained; prompts and pads are 0.
            sample_index_B: int64 [B], as in ``draw_times``; all noise follows from it and ``seed``.
            document_BL: int64 [B, L], which document of its row a token belongs to; None: rows are documents.
            time: [B], or [B, L] for times that differ within a row, in (0, 1]; in place of the drawn times.
            uniforms_BL: float32 [B, L] in [0, 1), in place of the drawn ones; masked where below 1 - alpha(t).
            validation: draw from the validation streams.
        """
        if self.mask_token_id is None:
            raise ValueError("mask_token_id is None; set it to the id of the tokenizer's mask token")
        device, length = tokens_BL.device, tokens_BL.shape[1]
        position_BL = row_positions(length, document_BL)
        time_BP, part_BL = self._parts(time, position_BL.expand(len(tokens_BL), -1), sample_index_B, validation)
        if uniforms_BL is None:
            uniforms_BL = uniforms(self.seed, sample_index_B, length, "validation_mask" if validation else "mask")
        position_BL = position_BL.to(device)
        maskable_BL = (loss_mask_BL.to(device) != 0) & (position_BL >= self.shift)
        clipped = not validation and self.time_range is not None
        part_RL = part_BL.repeat(self.views, 1).to(device)
        rate_RL, time_RL, weight_RL = (
            noise_RP.to(device, torch.float32, non_blocking=True).gather(1, part_RL)
            for noise_RP in self._noise(time_BP, clipped)
        )
        uniforms_BL = uniforms_BL.to(device, torch.float32, non_blocking=True)
        masked_BL = self._draw_masked(maskable_BL, uniforms_BL, rate_RL[: len(tokens_BL)], position_BL)
        masked_RL = torch.cat([masked_BL, maskable_BL & ~masked_BL]) if self.complementary else masked_BL
        scale_B1, count = LOSS_NORMS[self.loss_norm](maskable_BL)
        loss_weight_RL = LOSS_WEIGHTS[self.loss_weight](weight_RL) * scale_B1.repeat(self.views, 1)
        return Corruption(
            tokens=tokens_BL.repeat(self.views, 1).masked_fill(masked_RL, self.mask_token_id),
            masked=masked_RL,
            time=time_RL,
            loss_weight=torch.where(masked_RL, loss_weight_RL, 0.0),
            nll_weight=torch.where(masked_RL, weight_RL, 0.0),
            count=count,
            maskable=maskable_BL.repeat(self.views, 1),
            position=position_BL,
        )

    def _parts(
        self, time: Tensor | None, position_BL: Tensor, sample_index_B: Tensor, validation: bool
    ) -> tuple[Tensor, Tensor]:
        """Times [B, P], given or drawn, and the part that each position belongs to, int64 [B, L]."""
        if time is not None and time.dim() == 1:
            return time[:, None], torch.zeros_like(position_BL)
        if time is not None:
            return time, torch.arange(position_BL.shape[1]).expand_as(position_BL)
        # Validation takes the finest times whatever training does: a model has one validation loss.
        per_block = validation or self.time_samplings[self.time_sampling].per_block
        part_BL = segments(position_BL, self.block_size if per_block else None)
        return self.draw_times(sample_index_B, part_BL[:, -1].cpu() + 1, validation=validation), part_BL

    def _noise(self, time_BP: Tensor, clipped: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Mask rates, times and NELBO weights of the parts in every view: [R, P].

        Evaluated where the times were drawn, on the CPU: the schedules' range check would synchronise with a GPU.
        """
        schedule = get_schedule(self.schedule)
        rate_RP, time_RP = schedule.mask_rate(time_BP), time_BP
        weight_RP = schedule.weight(time_BP, self.weight_epsilon)
        if self.complementary:
            complement_BP = schedule.alpha(time_BP)
            rate_RP = torch.cat([rate_RP, complement_BP])
            time_RP = torch.cat([time_RP, schedule.time_of_mask_rate(complement_BP)])
            weight_RP = torch.cat([weight_RP, schedule.complement_weight(time_BP, self.weight_epsilon)]) / 2
        if clipped:
            low, high = self._training_range
            weight_RP = weight_RP * ((high - low) / (schedule.alpha(low) - schedule.alpha(high)))
        return rate_RP, time_RP, weight_RP

    def _draw_masked(
        self, maskable_BL: Tensor, uniforms_BL: Tensor, mask_rate_BL: Tensor, position_BL: Tensor
    ) -> Tensor:
        masked_BL = uniforms_BL < mask_rate_BL
        if self.force_mask:
            # If any position of a document is masked, so is the one with the smallest uniform: this changes nothing.
            document_BL = segments(position_BL, None).expand_as(maskable_BL)
            candidates_BL = uniforms_BL.masked_fill(~maskable_BL, 1.0)
            smallest_BL = torch.ones_like(candidates_BL).scatter_reduce(1, document_BL, candidates_BL, "amin")
            masked_BL = masked_BL | (candidates_BL == smallest_BL.gather(1, document_BL))
        return masked_BL & maskable_BL

    def score(self, tokens_BL: Tensor, corruption: Corruption) -> ScoredTokens:
        """List the masked tokens, each with the place of the logits that predict it.

        ``tokens_BL``: the clean text that ``corruption`` was drawn for.
        """
        row, position = corruption.masked.nonzero(as_tuple=True)
        return ScoredTokens(
            row=row,
            position=position - self.shift,
            token=tokens_BL[row % len(tokens_BL), position],
            loss_weight=corruption.loss_weight[row, position],
            nll_weight=corruption.nll_weight[row, position],
            time=corruption.time[row, position],
        )

    def reduce(self, nll_RL: Tensor, corruption: Corruption) -> LossSum:
        """Sum the weighted negative log-likelihoods (nats, [R, L]) of the clean tokens at masked positions, in float32.

        Values at other positions do not matter. A batch with nothing maskable sums to 0, with zero gradients.
        """
        nll_RL = nll_RL.masked_fill(~corruption.masked, 0.0)
        return LossSum((nll_RL * corruption.loss_weight).sum(), corruption.count)
