"""Caches for models that attend in both directions: keys and values grow stale while the canvas around them fills up.

Scorers as of ``scoring``. Shape letters: B rows, T canvas positions, L positions of one pass, N scored positions, M
given ones, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from nemo_dllm.collections.diffusion.sampling.blocks import Canvas, put, rows_and_columns, take, window_entries
from nemo_dllm.collections.diffusion.sampling.cached_scorer import CachedScorer
from nemo_dllm.collections.diffusion.sampling.device import on_device
from nemo_dllm.collections.diffusion.sampling.joining import Picked, attribute_of, stack_rows
from nemo_dllm.collections.diffusion.sampling.model_function import CachedDenoiser


class ApproximateCache(CachedScorer):
    """Positions outside the block at hand keep the keys and values that they had when the block began.

    Wu et al. 2025, Fast-dLLM: "prefix" keeps what is before the block, "dual" what is after it as well.
    """

    def __init__(
        self, model: CachedDenoiser, canvas: Canvas, right_shift: bool, device: torch.device, *, keep_suffix: bool
    ):
        super().__init__(model, canvas, right_shift, device)
        self._keep_suffix = keep_suffix
        # No block yet.
        self._block_B = torch.full((len(canvas.blocks_BT),), torch.iinfo(torch.int64).max, device="cpu")

    @classmethod
    def join_rows(cls, picked: Sequence[Picked], canvas: Canvas) -> "ApproximateCache":
        """For rows of several runs; those that stay in their block do not encode it anew."""
        joined = cls._with_rows(picked, canvas)
        joined._block_B = stack_rows(attribute_of(picked, "_block_B"))
        return joined

    def begin(self, tokens_BT: Tensor, blocks: Sequence[int | None]) -> None:
        """Encode the text of rows that begin a block."""
        blocks_BT, keys_BT, active_BT = self._canvas.blocks_BT, self._canvas.keys_BT, self._canvas.at(blocks)
        none = torch.iinfo(torch.int64).max
        block_B = blocks_BT.masked_fill(~active_BT, none).amin(dim=1)
        began_B = block_B != self._block_B
        self._block_B = block_B
        # Rows begin their blocks on their own, so that what else is in a batch does not refresh their cache.
        self._encode(tokens_BT, keys_BT & (began_B & active_BT.any(dim=1))[:, None])
        window_BT = active_BT if self._keep_suffix else keys_BT & (blocks_BT >= block_B[:, None])
        if self._right_shift:
            window_BT = window_BT | _left_neighbours(window_BT)
        self._take(window_BT, self._right_shift)

    def __call__(self, tokens_BT: Tensor, places: Sequence[int]) -> Tensor:
        return self._logits_of(places, self._denoise(tokens_BT))

    def _encode(self, tokens_BT: Tensor, chosen_BT: Tensor) -> None:
        if not chosen_BT.any():
            return
        at = self._pass_over(chosen_BT)
        given = (self._tokens_of(at, tokens_BT), at.positions_BL, self._cache)
        self._model.commit(*given, key_mask_BL=at.key_mask_BL, blocks_BL=torch.zeros_like(at.blocks_BL))


class DelayedCache(CachedScorer):
    """A token's keys and values are kept from the pass after the one that chose it, in which it was still a hole.

    Ma et al. 2025, dKV-Cache, its variant Decode. A pass encodes the holes of the whole canvas and the tokens that are
    new since the last one; every ``refresh_interval``-th pass of a row, the first to begin with, encodes all of it.
    With a shift, the left neighbours of what is scored are encoded too, and kept as they are then.
    """

    def __init__(
        self,
        model: CachedDenoiser,
        canvas: Canvas,
        right_shift: bool,
        device: torch.device,
        *,
        mask_token_id: int,
        refresh_interval: int,
    ):
        super().__init__(model, canvas, right_shift, device)
        self._mask_token_id, self._refresh_interval = mask_token_id, refresh_interval
        self._encoded_BT = torch.full_like(canvas.blocks_BT, -1)
        self._passes_B = torch.zeros(len(canvas.blocks_BT), dtype=torch.int64, device="cpu")

    @classmethod
    def join_rows(cls, picked: Sequence[Picked], canvas: Canvas) -> "DelayedCache":
        """For rows of several runs, each with the passes that it has had since its last refresh."""
        joined = cls._with_rows(picked, canvas)
        joined._encoded_BT = stack_rows(attribute_of(picked, "_encoded_BT"), canvas.keys_BT.shape[1])
        joined._passes_B = stack_rows(attribute_of(picked, "_passes_B"))
        return joined

    def begin(self, tokens_BT: Tensor, blocks: Sequence[int | None]) -> None:
        """Blocks make no difference."""

    def rehearse(self, tokens_BT: Tensor, places: Sequence[int]) -> None:
        """Nothing: a step begins with much more than that of other caches."""

    def __call__(self, tokens_BT: Tensor, places: Sequence[int]) -> Tensor:
        scored_BT = put(torch.zeros_like(self._canvas.keys_BT), places, True)
        # A row that waits or is full has no pass: its refreshes do not depend on what it is batched with.
        live_B = scored_BT.any(dim=1)
        holes_BT = self._canvas.holes_BT & (tokens_BT == self._mask_token_id)
        due_BT = holes_BT | scored_BT | (tokens_BT != self._encoded_BT)
        due_BT = due_BT | (self._passes_B % self._refresh_interval == 0)[:, None]
        window_BT = due_BT & self._canvas.keys_BT & live_B[:, None]
        if self._right_shift:
            window_BT = window_BT | _left_neighbours(scored_BT)
        at = self._pass_over(window_BT)
        kept_BL = ~holes_BT.gather(1, at.window.index_BL) & at.window.valid_BL
        length = kept_BL.shape[1]
        entries_N = take(window_entries(window_BT, length, self._right_shift), places)
        self._encoded_BT = torch.where(window_BT, tokens_BT, self._encoded_BT)
        self._passes_B = self._passes_B + live_B
        given = (self._tokens_of(at, tokens_BT), at.positions_BL, self._cache)
        entries = rows_and_columns(entries_N, length, self._device)
        kept_BL = on_device(kept_BL, self._device)
        return self._model.score_and_keep(*given, *entries, key_mask_BL=at.key_mask_BL, kept_BL=kept_BL)


def _left_neighbours(chosen_BT: Tensor) -> Tensor:
    """Positions whose right neighbour is chosen, bool [B, T]."""
    return torch.cat([chosen_BT[:, 1:], torch.zeros_like(chosen_BT[:, :1])], dim=1)
