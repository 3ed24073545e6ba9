"""The exact cache: blocks that are finished are encoded once.

A scorer as of ``scoring``. Shape letters: B rows, T canvas positions, L positions of one pass, N scored positions,
V vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nemo_dllm.collections.diffusion.sampling.blocks import (
    Canvas,
    following,
    places_of,
    rows_and_columns,
    take,
    window_entries,
)
from nemo_dllm.collections.diffusion.sampling.cached_scorer import CachedScorer, Pass
from nemo_dllm.collections.diffusion.sampling.device import on_device
from nemo_dllm.collections.diffusion.sampling.joining import Picked, attribute_of, stack_rows
from nemo_dllm.collections.diffusion.sampling.model_function import CachedDenoiser


class JointPass(NamedTuple):
    """A pass over blocks that are finished and those behind them, see ``JointDenoiser``.

    Attributes:
        over: the pass.
        finished_BT: bool, the positions that the cache keeps, on the CPU.
        kept_BL: the same among the pass's, on the model's device.
        entries_BT: see ``window_entries``.
        places: what is scored where no block behind has a token yet.
        entries: rows and columns of these, int64 [N] each, on the model's device.
    """

    over: Pass
    finished_BT: Tensor
    kept_BL: Tensor
    entries_BT: Tensor
    places: list[int]
    entries: tuple[Tensor, Tensor]


class CommittedBlocks(CachedScorer):
    """Finished blocks are encoded once; a step sees them through the cache, and the block at hand. Exact for
    block-causal models, in which nothing later changes what a block is encoded to.

    A model that can do it encodes a block in the pass that scores the next one for the first time.
    """

    def __init__(self, model: CachedDenoiser, canvas: Canvas, right_shift: bool, device: torch.device):
        super().__init__(model, canvas, right_shift, device)
        self._committed_BT = torch.zeros_like(canvas.keys_BT)
        self._last_BV = None
        # With a shift, what is scored first is scored by what is committed.
        self._can_join_passes = hasattr(model, "commit_and_score") and not right_shift
        self._joint = self._prepared = None

    @classmethod
    def join_rows(cls, picked: Sequence[Picked], canvas: Canvas) -> "CommittedBlocks":
        """For rows of several runs, with the blocks that they have committed."""
        joined = cls._with_rows(picked, canvas)
        joined._committed_BT = stack_rows(attribute_of(picked, "_committed_BT"), canvas.keys_BT.shape[1])
        joined._last_BV = stack_rows(attribute_of(picked, "_last_BV"))
        joined._joint = joined._prepared = None
        return joined

    def begin(self, tokens_BT: Tensor, blocks: Sequence[int | None]) -> None:
        """Encode the blocks before those at hand, or leave it to the pass that scores these."""
        (expected, joint), self._blocks = self._prepared or (None, None), blocks
        self._joint = self._prepared = None
        if blocks == expected:
            self._joint = joint
            return
        active_BT, pending_BT = self._canvas.at(blocks), self._pending(blocks)
        if pending_BT.numpy().any():
            # Prompts, which are longer, would have blocks of other rows ride along as padding.
            longest_pending, longest = (chosen_BT.numpy().sum(axis=1).max() for chosen_BT in (pending_BT, active_BT))
            if self._can_join_passes and longest_pending <= longest:
                self._joint = self._join_passes(pending_BT, active_BT)
                return
            self._commit(tokens_BT, self._pass_over(pending_BT))
        self._take_block()

    def __call__(self, tokens_BT: Tensor, places: Sequence[int]) -> Tensor:
        if self._joint is not None:
            return self._commit_and_score(tokens_BT, places)
        if not self._right_shift:
            return self._logits_of(places, self._denoise(tokens_BT))
        rows_N, columns_N = divmod(take(self._entries_BT, places), self._pass.positions_BL.shape[1])
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

    def _pending(self, blocks: Sequence[int | None]) -> Tensor:
        """What is before these blocks and not encoded yet, bool [B, T]."""
        return self._canvas.before(blocks) & ~self._committed_BT

    def _commit(self, tokens_BT: Tensor, at: Pass) -> None:
        given = (self._tokens_of(at, tokens_BT), at.positions_BL, self._cache)
        last_BV = self._model.commit(*given, key_mask_BL=at.key_mask_BL, blocks_BL=at.blocks_BL)
        self._committed_BT = self._committed_BT | at.chosen_BT
        if self._right_shift:
            if self._last_BV is not None:
                is_given_B1 = on_device(at.window.valid_BL.any(dim=1, keepdim=True), self._device)
                last_BV = torch.where(is_given_B1, last_BV, self._last_BV)
            self._last_BV = last_BV

    def _commit_and_score(self, tokens_BT: Tensor, places: Sequence[int]) -> Tensor:
        joint, self._joint = self._joint, None
        over, entries = joint.over, joint.entries
        if places != joint.places:
            entries = self._entries(places, joint.entries_BT, over)
        given = (self._tokens_of(over, tokens_BT), over.positions_BL, self._cache, *entries)
        masks = {"key_mask_BL": over.key_mask_BL, "blocks_BL": over.blocks_BL, "kept_BL": joint.kept_BL}
        logits_NV = self._model.commit_and_score(*given, **masks)
        self._committed_BT = self._committed_BT | joint.finished_BT
        # Meanwhile the device works.
        self._take_block()
        return logits_NV

    def _take_block(self) -> None:
        """Let passes be over the blocks at hand, and prepare the one that each row's next block begins with."""
        # What a shift needs besides the block at hand is put in front of its logits.
        self._take(self._canvas.at(self._blocks), shifted=False)
        if self._can_join_passes:
            blocks = following(self._blocks)
            self._prepared = blocks, self._join_passes(self._pass.chosen_BT, self._canvas.at(blocks))

    def _join_passes(self, finished_BT: Tensor, active_BT: Tensor) -> JointPass:
        over = self._pass_over(finished_BT | active_BT)
        index_BL, valid_BL = over.window
        kept_BL = on_device(finished_BT.gather(1, index_BL) & valid_BL, self._device)
        entries_BT = window_entries(over.chosen_BT, index_BL.shape[1], right_shift=False)
        places = places_of(active_BT & self._canvas.holes_BT)
        return JointPass(over, finished_BT, kept_BL, entries_BT, places, self._entries(places, entries_BT, over))

    def _entries(self, places: Sequence[int], entries_BT: Tensor, over: Pass) -> tuple[Tensor, Tensor]:
        """Rows and columns of a pass, int64 [N] each, on the model's device."""
        return rows_and_columns(take(entries_BT, places), over.positions_BL.shape[1], self._device)
