"""Logits of the positions that a step asks for: from the whole canvas, or with keys and values kept from earlier steps.

A scorer is told the block of each row at hand where one of them moves on, ``begin(tokens_BT, blocks)``, and called
for each step as (tokens_BT, places) -> logits_NV: the canvas, and the places to score, ascending (some of the active
ones, counted row after row). The tensors that it gets are on the CPU, where looking into them costs little; the logits
are on the model's device, and it never waits for that. One whose rows can be moved between passes has ``join_rows``
(see ``joining``), after which ``begin`` comes first.

Shape letters: B rows, T canvas positions, L positions of one pass, N scored positions, V vocabulary.
"""

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any, Protocol

import numpy
import torch
from torch import Tensor

from nemo_dllm.collections.diffusion.sampling.approximate_caches import ApproximateCache, DelayedCache
from nemo_dllm.collections.diffusion.sampling.blocks import Canvas, on_device
from nemo_dllm.collections.diffusion.sampling.cached_scorer import CachedScorer, Pass
from nemo_dllm.collections.diffusion.sampling.config import DELAYED, SamplerConfig
from nemo_dllm.collections.diffusion.sampling.joining import Picked, attribute_of, join_attribute, stack_rows
from nemo_dllm.collections.diffusion.sampling.model_function import CachedDenoiser, DenoiserFn

_LARGEST = torch.finfo(torch.float32).max


class Scorer(Protocol):
    """See above."""

    def begin(self, tokens_BT: Tensor, blocks: Sequence[int | None]) -> None: ...

    def __call__(self, tokens_BT: Tensor, places: Sequence[int]) -> Tensor: ...


class WholeCanvas:
    """Every step sees the whole canvas."""

    def __init__(self, model: DenoiserFn, canvas: Canvas, right_shift: bool, device: torch.device):
        self._model, self._right_shift, self._device = model, right_shift, device
        # A mask that hides nothing would only keep attention off its fast path.
        self._key_mask_BT = on_device(canvas.keys_BT, device) if canvas.padded else None

    @classmethod
    def join_rows(cls, picked: Sequence[Picked], canvas: Canvas) -> "WholeCanvas":
        """For rows of several runs, of which it keeps nothing."""
        first = picked[0].part
        return cls(first._model, canvas, first._right_shift, first._device)

    def begin(self, tokens_BT: Tensor, blocks: Sequence[int | None]) -> None:
        """Blocks make no difference."""

    def __call__(self, tokens_BT: Tensor, places: Sequence[int]) -> Tensor:
        rows_N, positions_N = divmod(numpy.array(places), tokens_BT.shape[1])
        if self._right_shift:
            positions_N = (positions_N - 1).clip(0)
        entries_2N = torch.from_numpy(numpy.array([rows_N, positions_N]))
        rows_N, positions_N = on_device(entries_2N, self._device)
        # A copy, for the canvas is written to.
        tokens_BT = tokens_BT.to(self._device, non_blocking=True, copy=True)
        if hasattr(self._model, "score_positions"):
            return self._model.score_positions(tokens_BT, rows_N, positions_N, key_mask_BT=self._key_mask_BT)
        logits_BTV = self._model(tokens_BT, key_mask_BT=self._key_mask_BT)
        if not isinstance(logits_BTV, Tensor) or logits_BTV.ndim != 3 or logits_BTV.shape[:2] != tokens_BT.shape:
            what = list(logits_BTV.shape) if isinstance(logits_BTV, Tensor) else type(logits_BTV).__name__
            raise ValueError(
                f"the model returned {what} for tokens of shape {list(tokens_BT.shape)}; return logits as one tensor "
                "[rows, positions, vocabulary]"
            )
        return logits_BTV[rows_N, positions_N]


class CommittedBlocks(CachedScorer):
    """Finished blocks are encoded once; a step sees them through the cache, and the block at hand. Exact for
    block-causal models, in which nothing later changes what a block is encoded to.
    """

    def __init__(self, model: CachedDenoiser, canvas: Canvas, right_shift: bool, device: torch.device):
        super().__init__(model, canvas, right_shift, device)
        self._committed_BT = torch.zeros_like(canvas.keys_BT)
        self._last_BV = self._blocks = None

    @classmethod
    def join_rows(cls, picked: Sequence[Picked], canvas: Canvas) -> "CommittedBlocks":
        """For rows of several runs, with the blocks that they have committed."""
        joined = cls._with_rows(picked, canvas)
        joined._committed_BT = stack_rows(attribute_of(picked, "_committed_BT"), canvas.keys_BT.shape[1])
        joined._last_BV, joined._blocks = stack_rows(attribute_of(picked, "_last_BV")), None
        return joined

    def begin(self, tokens_BT: Tensor, blocks: Sequence[int | None]) -> None:
        """Encode the blocks before those at hand."""
        at = self._pass if self._moves_on(blocks) else self._pending(blocks)
        if at is not None:
            self._commit(tokens_BT, at)
        # What a shift needs besides the block at hand is put in front of its logits.
        self._take(self._canvas.at(blocks), shifted=False)
        self._blocks = blocks

    def _moves_on(self, blocks: Sequence[int | None]) -> bool:
        """Whether each row goes from the block at hand to the next one."""
        return self._blocks is not None and all(
            block is before if before is None else block == before + 1
            for block, before in zip(blocks, self._blocks, strict=True)
        )

    def _pending(self, blocks: Sequence[int | None]) -> Pass | None:
        """The blocks before these that are not encoded yet; None where there is nothing."""
        lowest = torch.iinfo(torch.int64).min
        current_B1 = torch.tensor([[lowest if block is None else block] for block in blocks])
        pending_BT = self._canvas.keys_BT & (self._canvas.blocks_BT < current_B1) & ~self._committed_BT
        return self._pass_over(pending_BT) if pending_BT.any() else None

    def __call__(self, tokens_BT: Tensor, places: Sequence[int]) -> Tensor:
        if not self._right_shift:
            return self._logits_of(places, self._denoise(tokens_BT))
        entries_BT = self._entries_BT.numpy()
        rows_N, columns_N = divmod(entries_BT.reshape(-1)[places], self._pass.positions_BL.shape[1])
        has_neighbour_B = self._committed_BT.any(dim=1)
        if not columns_N.any() and has_neighbour_B.numpy()[rows_N].all():
            # With blocks of one token always so: the commit has given all that would be read of a pass.
            return self._last_BV[on_device(torch.from_numpy(rows_N), self._device)]
        logits_BLV = self._denoise(tokens_BT)
        # The left neighbour of a block's first position is the last committed one; without any, as at position 0.
        first_BV = logits_BLV[:, 0]
        if self._last_BV is not None:
            first_BV = torch.where(on_device(has_neighbour_B[:, None], self._device), self._last_BV, first_BV)
        shifted_BLV = torch.cat([first_BV[:, None], logits_BLV[:, :-1]], dim=1)
        return self._logits_of(places, shifted_BLV)

    def _commit(self, tokens_BT: Tensor, at: Pass) -> None:
        given = (self._tokens_of(at, tokens_BT), at.positions_BL, self._cache)
        last_BV = self._model.commit(*given, key_mask_BL=at.key_mask_BL, blocks_BL=at.blocks_BL)
        self._committed_BT = self._committed_BT | at.chosen_BT
        if self._right_shift:
            if self._last_BV is not None:
                is_given_B1 = on_device(at.window.valid_BL.any(dim=1, keepdim=True), self._device)
                last_BV = torch.where(is_given_B1, last_BV, self._last_BV)
            self._last_BV = last_BV


class Guided:
    """Classifier-free guidance: u + (scale + 1) * (c - u), u from a canvas whose given tokens are masked.

    Nichol and Ho guidance of Nie et al. 2024, "Scaling up masked diffusion models on text". Each branch has a cache of
    its own, and the padding of its row.
    """

    def __init__(self, make: Callable[[], Scorer], hidden_BT: Tensor, mask_token_id: int, scale: float):
        self._conditional, self._unconditional = make(), make()
        self._hidden_BT, self._mask_token_id, self._scale = hidden_BT, mask_token_id, scale

    @property
    def row_parts(self) -> tuple[Any, ...]:
        """See ``joining``."""
        return (self._conditional, self._unconditional)

    @classmethod
    def join_rows(cls, picked: Sequence[Picked], canvas: Canvas) -> "Guided":
        """For rows of several runs; each branch joins its own."""
        joined = copy(picked[0].part)
        joined._conditional = join_attribute(picked, "_conditional", canvas)
        joined._unconditional = join_attribute(picked, "_unconditional", canvas)
        joined._hidden_BT = stack_rows(attribute_of(picked, "_hidden_BT"), canvas.keys_BT.shape[1])
        return joined

    def begin(self, tokens_BT: Tensor, blocks: Sequence[int | None]) -> None:
        """Each branch by itself."""
        for branch, branch_BT in self._branches(tokens_BT):
            branch.begin(branch_BT, blocks)

    def __call__(self, tokens_BT: Tensor, places: Sequence[int]) -> Tensor:
        # Infinity in both, as of a token that the model never gives, has no difference.
        conditional_NV, unconditional_NV = (
            branch(branch_BT, places).float().clamp(-_LARGEST, _LARGEST)
            for branch, branch_BT in self._branches(tokens_BT)
        )
        return unconditional_NV + (self._scale + 1) * (conditional_NV - unconditional_NV)

    def _branches(self, tokens_BT: Tensor) -> tuple[tuple[Scorer, Tensor], ...]:
        hidden_BT = tokens_BT.masked_fill(self._hidden_BT, self._mask_token_id)
        return (self._conditional, tokens_BT), (self._unconditional, hidden_BT)


_SCORERS = {
    None: WholeCanvas,
    "exact": CommittedBlocks,
    "approximate_prefix": partial(ApproximateCache, keep_suffix=False),
    "approximate_dual": partial(ApproximateCache, keep_suffix=True),
}


def build_scorer(
    model: DenoiserFn | CachedDenoiser,
    tokens_BT: Tensor,
    canvas: Canvas,
    mask_token_id: int,
    config: SamplerConfig,
    device: torch.device,
) -> Scorer:
    """The scorer that ``config.cache`` and ``config.cfg_scale`` ask for, of a model on ``device``.

    Raises:
        ValueError: the model cannot do what the cache needs.
    """
    needed = ("new_cache", "score_and_keep") if config.cache == DELAYED else ("new_cache", "denoise", "commit")
    if config.cache is not None and not all(hasattr(model, name) for name in needed):
        raise ValueError(
            f"cache={config.cache!r} needs a model with {', '.join(needed[:-1])} and {needed[-1]} (see CachedDenoiser),"
            f" and this one is a {type(model).__name__}; leave cache None"
        )

    def make() -> Scorer:
        if config.cache == DELAYED:
            return DelayedCache(
                model,
                canvas,
                config.right_shift,
                device,
                mask_token_id=mask_token_id,
                refresh_interval=config.refresh_interval,
            )
        return _SCORERS[config.cache](model, canvas, config.right_shift, device)

    if config.cfg_scale == 0:
        return make()
    keep = torch.tensor(config.cfg_keep_token_ids, dtype=tokens_BT.dtype)
    hidden_BT = canvas.keys_BT & ~canvas.holes_BT & ~torch.isin(tokens_BT, keep)
    return Guided(make, hidden_BT, mask_token_id, config.cfg_scale)
