"""Logits of the positions that a step asks for: from the whole canvas, or with keys and values kept from earlier steps.

A scorer is called as (tokens_BT, active_BT, scored_BT) -> logits_NV: the canvas, the block of each row at hand, and the
positions to score (some of the active ones), in row-major order.

Shape letters: B rows, T canvas positions, L positions of one pass, N scored positions, V vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from nemo_dllm.collections.diffusion.sampling.blocks import gather_window
from nemo_dllm.collections.diffusion.sampling.config import SamplerConfig
from nemo_dllm.collections.diffusion.sampling.model_function import CachedDenoiser, DenoiserFn

Scorer = Callable[[Tensor, Tensor, Tensor], Tensor]


class Canvas(NamedTuple):
    """What stays the same during a run.

    Attributes:
        holes_BT: bool, positions to fill.
        blocks_BT: int64, the block of each position.
        keys_BT: bool, False at padding.
        padded: whether ``keys_BT`` is False anywhere.
    """

    holes_BT: Tensor
    blocks_BT: Tensor
    keys_BT: Tensor
    padded: bool

    @property
    def positions_BT(self) -> Tensor:
        """Int64, how many tokens are before each position, padding not counted."""
        return (self.keys_BT.cumsum(dim=1) - 1).clamp_min(0)


class WholeCanvas:
    """Every step sees the whole canvas."""

    def __init__(self, model: DenoiserFn, canvas: Canvas, right_shift: bool):
        self._model, self._right_shift = model, right_shift
        # A mask that hides nothing would only keep attention off its fast path.
        self._key_mask_BT = canvas.keys_BT if canvas.padded else None

    def __call__(self, tokens_BT: Tensor, active_BT: Tensor, scored_BT: Tensor) -> Tensor:
        rows_N, positions_N = scored_BT.nonzero(as_tuple=True)
        if self._right_shift:
            positions_N = (positions_N - 1).clamp_min(0)
        if hasattr(self._model, "score_positions"):
            return self._model.score_positions(tokens_BT, rows_N, positions_N, key_mask_BT=self._key_mask_BT)
        return self._model(tokens_BT, key_mask_BT=self._key_mask_BT)[rows_N, positions_N]


class CommittedBlocks:
    """Finished blocks are encoded once; a step sees them through the cache, and the block at hand. Exact for
    block-causal models, in which nothing later changes what a block is encoded to.
    """

    def __init__(self, model: CachedDenoiser, canvas: Canvas, right_shift: bool):
        self._model, self._canvas, self._right_shift = model, canvas, right_shift
        self._positions_BT = canvas.positions_BT
        self._cache = model.new_cache(*canvas.keys_BT.shape)
        self._committed_BT = torch.zeros_like(canvas.keys_BT)
        self._last_BV = None

    def __call__(self, tokens_BT: Tensor, active_BT: Tensor, scored_BT: Tensor) -> Tensor:
        lowest = torch.iinfo(torch.int64).min
        current_B1 = self._canvas.blocks_BT.masked_fill(~active_BT, lowest).amax(dim=1, keepdim=True)
        earlier_BT = self._canvas.keys_BT & (self._canvas.blocks_BT < current_B1)
        self._commit(tokens_BT, earlier_BT & ~self._committed_BT)
        window = gather_window(active_BT)
        logits_BLV = self._model.denoise(
            tokens_BT.gather(1, window.index_BL),
            self._positions_BT.gather(1, window.index_BL),
            self._cache,
            key_mask_BL=window.valid_BL,
        )
        if self._right_shift:
            # The left neighbour of a block's first position is the last committed one; without any, as at position 0.
            first_BV = logits_BLV[:, 0]
            if self._last_BV is not None:
                first_BV = torch.where(self._committed_BT.any(dim=1, keepdim=True), self._last_BV, first_BV)
            logits_BLV = torch.cat([first_BV[:, None], logits_BLV[:, :-1]], dim=1)
        return logits_BLV[scored_BT.gather(1, window.index_BL) & window.valid_BL]

    def _commit(self, tokens_BT: Tensor, pending_BT: Tensor) -> None:
        if not pending_BT.any():
            return
        window = gather_window(pending_BT)
        last_BV = self._model.commit(
            tokens_BT.gather(1, window.index_BL),
            self._positions_BT.gather(1, window.index_BL),
            self._cache,
            key_mask_BL=window.valid_BL,
            blocks_BL=self._canvas.blocks_BT.gather(1, window.index_BL),
        )
        if self._last_BV is not None:
            last_BV = torch.where(window.valid_BL.any(dim=1, keepdim=True), last_BV, self._last_BV)
        self._last_BV = last_BV
        self._committed_BT = self._committed_BT | pending_BT


class ApproximateCache:
    """Positions outside the block at hand keep the keys and values that they had when the block began.

    Wu et al. 2025, Fast-dLLM: "prefix" keeps what is before the block, "dual" what is after it as well.
    """

    def __init__(self, model: CachedDenoiser, canvas: Canvas, right_shift: bool, *, keep_suffix: bool):
        self._model, self._canvas, self._right_shift = model, canvas, right_shift
        self._keep_suffix = keep_suffix
        self._positions_BT = canvas.positions_BT
        self._cache = model.new_cache(*canvas.keys_BT.shape)
        self._block_B = None

    def __call__(self, tokens_BT: Tensor, active_BT: Tensor, scored_BT: Tensor) -> Tensor:
        blocks_BT, keys_BT = self._canvas.blocks_BT, self._canvas.keys_BT
        none = torch.iinfo(torch.int64).max
        block_B = blocks_BT.masked_fill(~active_BT, none).amin(dim=1)
        began_B = block_B != (torch.full_like(block_B, none) if self._block_B is None else self._block_B)
        self._block_B = block_B
        # Rows begin their blocks on their own, so that what else is in a batch does not refresh their cache.
        self._encode(tokens_BT, keys_BT & (began_B & active_BT.any(dim=1))[:, None])
        window_BT = active_BT if self._keep_suffix else keys_BT & (blocks_BT >= block_B[:, None])
        if self._right_shift:
            window_BT = window_BT | torch.cat([window_BT[:, 1:], torch.zeros_like(window_BT[:, :1])], dim=1)
        window = gather_window(window_BT)
        logits_BLV = self._model.denoise(
            tokens_BT.gather(1, window.index_BL),
            self._positions_BT.gather(1, window.index_BL),
            self._cache,
            key_mask_BL=window.valid_BL,
        )
        rows_N, positions_N = scored_BT.nonzero(as_tuple=True)
        if self._right_shift:
            positions_N = (positions_N - 1).clamp_min(0)
        columns_L = torch.arange(window.index_BL.shape[1], device=tokens_BT.device).expand_as(window.index_BL)
        columns_BT = torch.zeros_like(tokens_BT).scatter_(1, window.index_BL, columns_L)
        return logits_BLV[rows_N, columns_BT[rows_N, positions_N]]

    def _encode(self, tokens_BT: Tensor, chosen_BT: Tensor) -> None:
        if not chosen_BT.any():
            return
        window = gather_window(chosen_BT)
        self._model.commit(
            tokens_BT.gather(1, window.index_BL),
            self._positions_BT.gather(1, window.index_BL),
            self._cache,
            key_mask_BL=window.valid_BL,
            blocks_BL=torch.zeros_like(window.index_BL),
        )


class Guided:
    """Classifier-free guidance: u + (scale + 1) * (c - u), u from a canvas whose given tokens are masked.

    Nichol and Ho guidance of Nie et al. 2024, "Scaling up masked diffusion models on text". Each branch has a cache of
    its own, and the padding of its row.
    """

    def __init__(self, make: Callable[[], Scorer], hidden_BT: Tensor, mask_token_id: int, scale: float):
        self._conditional, self._unconditional = make(), make()
        self._hidden_BT, self._mask_token_id, self._scale = hidden_BT, mask_token_id, scale

    def __call__(self, tokens_BT: Tensor, active_BT: Tensor, scored_BT: Tensor) -> Tensor:
        hidden_BT = tokens_BT.masked_fill(self._hidden_BT, self._mask_token_id)
        conditional_NV = self._conditional(tokens_BT, active_BT, scored_BT).float()
        unconditional_NV = self._unconditional(hidden_BT, active_BT, scored_BT).float()
        return unconditional_NV + (self._scale + 1) * (conditional_NV - unconditional_NV)


def _approximate_prefix(model, canvas, right_shift):
    return ApproximateCache(model, canvas, right_shift, keep_suffix=False)


def _approximate_dual(model, canvas, right_shift):
    return ApproximateCache(model, canvas, right_shift, keep_suffix=True)


_SCORERS = {
    None: WholeCanvas,
    "exact": CommittedBlocks,
    "approximate_prefix": _approximate_prefix,
    "approximate_dual": _approximate_dual,
}


def build_scorer(
    model: DenoiserFn | CachedDenoiser, tokens_BT: Tensor, canvas: Canvas, mask_token_id: int, config: SamplerConfig
) -> Scorer:
    """The scorer that ``config.cache`` and ``config.cfg_scale`` ask for.

    Raises:
        ValueError: the model cannot do what the cache needs.
    """
    is_cached = hasattr(model, "commit")
    if config.cache is not None and not is_cached:
        raise ValueError(
            f"cache={config.cache!r} needs a model with new_cache, denoise and commit (see CachedDenoiser), and this "
            f"one is a {type(model).__name__}; leave cache None"
        )

    def make() -> Scorer:
        return _SCORERS[config.cache](model, canvas, config.right_shift)

    if config.cfg_scale == 0:
        return make()
    keep = torch.tensor(config.cfg_keep_token_ids, dtype=tokens_BT.dtype, device=tokens_BT.device)
    hidden_BT = canvas.keys_BT & ~canvas.holes_BT & ~torch.isin(tokens_BT, keep)
    return Guided(make, hidden_BT, mask_token_id, config.cfg_scale)
