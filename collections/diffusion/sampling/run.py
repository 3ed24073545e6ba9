"""The denoising loop: predict every candidate, commit the best, repeat until no hole is left.

The canvas and all decisions about it are on the CPU. The device gets the tokens of each pass, and gives back a few
numbers per scored position, so that the CPU waits for it once per step.

Shape letters: B rows, T canvas positions, L positions of one pass, N scored positions of all rows in row-major order,
V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nemo_dllm.collections.diffusion.sampling.blocks import Canvas, gather_window, on_device
from nemo_dllm.collections.diffusion.sampling.config import SamplerConfig
from nemo_dllm.collections.diffusion.sampling.joining import Picked, attribute_of, join_attribute, stack_rows
from nemo_dllm.collections.diffusion.sampling.model_function import CachedDenoiser, DenoiserFn
from nemo_dllm.collections.diffusion.sampling.noise import GlobalNoise, RowNoise
from nemo_dllm.collections.diffusion.sampling.progress import Progress
from nemo_dllm.collections.diffusion.sampling.remasking import Predictions
from nemo_dllm.collections.diffusion.sampling.scoring import build_scorer
from nemo_dllm.collections.diffusion.sampling.selection import Judged, Scored, above, judge, select_commits
from nemo_dllm.collections.diffusion.sampling.stopping import TextEnds
from nemo_dllm.collections.diffusion.sampling.token_choice import (
    check_token_ids,
    choose_tokens,
    restrict_logits,
    tells_first_tokens_apart,
    temper,
    token_columns,
)


@dataclass(frozen=True, eq=False)
class DenoiseStep:
    """The canvas after one forward pass, on the CPU; later steps leave these tensors alone.

    Attributes:
        tokens_BT: int64, holes hold the mask token.
        holes_BT: bool, positions still to fill.
        committed_BT: bool, positions filled by this step, those closed by an end token included.
        step: forward passes so far, from 1 (with guidance: pairs of them).
        edited_BT: bool, generated tokens that this step has replaced; None where nothing is edited.
        settled_BT: bool, generated tokens with no hole before them that no later step replaces: what may be shown to a
            reader. A row is finished when all its generated tokens are.
    """

    tokens_BT: Tensor
    holes_BT: Tensor
    committed_BT: Tensor
    step: int
    edited_BT: Tensor | None = None
    settled_BT: Tensor | None = None

    @property
    def new_BT(self) -> Tensor:
        """Bool, positions whose token this step has filled in or replaced."""
        return self.committed_BT if self.edited_BT is None else self.committed_BT | self.edited_BT


class DenoisingRun:
    """The state of one run. Nothing in it ties rows together: those of several runs are a run as well.

    Args:
        model, mask_token_id, config: as of ``denoise``.
        tokens_BT: int64, as ``canvas_BT`` of ``denoise``.
        canvas: what is to be filled, on any device.
        noise: drawn where the model is.
        ends: finds rows whose text has ended.

    Raises:
        ValueError: an id is outside the vocabulary, or the model does not fit the cache.
    """

    def __init__(
        self,
        model: DenoiserFn | CachedDenoiser,
        tokens_BT: Tensor,
        canvas: Canvas,
        mask_token_id: int,
        config: SamplerConfig,
        noise: RowNoise | GlobalNoise,
        ends: TextEnds,
    ):
        self.config, self.mask_token_id = config, mask_token_id
        self.noise, self.ends, self.device = noise, ends, tokens_BT.device
        self.canvas = canvas = canvas.cpu()
        self.tokens_BT = tokens_BT.cpu().masked_fill(canvas.holes_BT, mask_token_id)
        self.holes_BT = canvas.holes_BT
        # A model that knows its vocabulary keeps a GPU from ids that would be the end of its process.
        self.known_vocabulary = getattr(model, "vocabulary_size", None)
        self._check_ids(self.known_vocabulary)
        self.ordinals_BT = canvas.holes_BT.cumsum(dim=1) - 1
        # Rows that finish their blocks together have them encoded in one pass.
        lockstep = "turn" if config.cache == "exact" else "block" if config.quirks.lockstep else None
        self.progress = Progress(canvas.holes_BT, canvas.blocks_BT, config, lockstep)
        self.score = build_scorer(model, self.tokens_BT, canvas, mask_token_id, config, self.device)
        self.done_B = torch.zeros(len(tokens_BT), dtype=torch.bool)

    @property
    def row_parts(self) -> tuple[Any, ...]:
        """See ``joining``."""
        return (self.noise, self.progress, self.score, self.ends)

    @classmethod
    def join_rows(cls, picked: Sequence[Picked]) -> "DenoisingRun":
        """Rows of runs with equal models and settings, side by side; for runs that ``can_join_rows``."""
        joined = copy(picked[0].part)
        joined.canvas = canvas = join_attribute(picked, "canvas")
        width = canvas.holes_BT.shape[1]
        joined.tokens_BT = stack_rows(attribute_of(picked, "tokens_BT"), width)
        joined.holes_BT = stack_rows(attribute_of(picked, "holes_BT"), width)
        joined.ordinals_BT = stack_rows(attribute_of(picked, "ordinals_BT"), width)
        joined.done_B = stack_rows(attribute_of(picked, "done_B"))
        for name in ("noise", "ends", "progress"):
            setattr(joined, name, join_attribute(picked, name))
        joined.score = join_attribute(picked, "score", canvas)
        return joined

    def steps(self, abandoned: Callable[[], Sequence[bool]] | None = None) -> Iterator[DenoiseStep]:
        """What ``denoise`` returns, from where the run stands; steps count from 1."""
        step, blocks = 0, None
        while True:
            if abandoned is not None:
                self.progress.end(abandoned())
            blocks_before, blocks = blocks, self.progress.blocks()
            if all(block is None for block in blocks) or (self.config.quirks.stop_after_block and self.done_B.all()):
                return
            if blocks != blocks_before:
                active_BT = self._begin(blocks)
            step += 1
            yield self._step(step, active_BT)

    def _step(self, step: int, active_BT: Tensor) -> DenoiseStep:
        """One pass over the blocks at hand, and what it commits and edits."""
        edits = self.config.editing_threshold is not None
        candidates_BT = self._candidates(active_BT)
        scored_BT = candidates_BT | (active_BT & self.canvas.holes_BT & ~self.holes_BT) if edits else candidates_BT
        predictions = self._predict(active_BT, scored_BT)
        # Meanwhile the device works.
        scored, quotas = Scored.of(scored_BT, candidates_BT if edits else None), self.progress.quotas()
        judged = judge(predictions, self.config)
        chosen = select_commits(judged, scored, quotas, self.config)
        edited = self._edits(judged, scored_BT, scored) if edits else []
        # The mask token is chosen with a quirk only, and fills nothing.
        filled = [n for n in chosen if judged.tokens[n] != self.mask_token_id]
        written = filled + edited
        holes_before_BT = self.holes_BT
        self.tokens_BT = _put(self.tokens_BT, scored.at(written), [judged.tokens[n] for n in written])
        self.holes_BT = _put(self.holes_BT, scored.at(filled), [False] * len(filled))
        edited_BT = _put(torch.zeros_like(scored_BT), scored.at(edited), [True] * len(edited)) if edits else None
        settled_BT = self._settle(active_BT, self._advance(active_BT, edited_BT))
        # Holes are only ever filled.
        return DenoiseStep(self.tokens_BT, self.holes_BT, holes_before_BT ^ self.holes_BT, step, edited_BT, settled_BT)

    def _check_ids(self, vocabulary: int | None) -> None:
        if vocabulary is not None:
            check_token_ids(self.config, self.mask_token_id, vocabulary)
        outside_N = self.tokens_BT[(self.tokens_BT < 0) | (self.tokens_BT >= (vocabulary or 2**63 - 1))]
        if len(outside_N) > 0:
            of = "" if vocabulary is None else f" of {vocabulary}"
            raise ValueError(
                f"{outside_N[0]} among the given tokens is outside the model's vocabulary{of}; encode the text with "
                "the model's tokenizer, and see to mask_token_id and pad_token_id"
            )

    @torch.no_grad()
    def _begin(self, blocks: list[int | None]) -> Tensor:
        """Positions of the blocks that rows move on to, none in rows that have nothing to do; bool [B, T]."""
        nothing = torch.iinfo(torch.int64).min
        current_B1 = torch.tensor([[nothing if block is None else block] for block in blocks])
        active_BT = self.canvas.keys_BT & (self.canvas.blocks_BT == current_B1)
        self.score.begin(self.tokens_BT, active_BT)
        return active_BT

    def _candidates(self, active_BT: Tensor) -> Tensor:
        if not self.config.quirks.stray_masks_compete:
            return self.holes_BT & active_BT
        lowest = torch.iinfo(torch.int64).min
        current_B1 = self.canvas.blocks_BT.masked_fill(~active_BT, lowest).amax(dim=1, keepdim=True)
        masks_BT = self.canvas.keys_BT & (self.tokens_BT == self.mask_token_id)
        return masks_BT & (self.canvas.blocks_BT <= current_B1)

    @torch.no_grad()
    def _predict(self, active_BT: Tensor, scored_BT: Tensor) -> Predictions:
        config = self.config
        logits_NV = self.score(self.tokens_BT, scored_BT)
        if logits_NV.shape[-1] != self.known_vocabulary:
            self.known_vocabulary = logits_NV.shape[-1]
            self._check_ids(self.known_vocabulary)
        ordinals_N = None
        if tells_first_tokens_apart(config):
            ordinals_N = on_device(self.ordinals_BT[scored_BT], logits_NV.device)
        logits_NV = restrict_logits(logits_NV, ordinals_N, self.mask_token_id, config)
        # Noise is drawn for the row's own positions alone: numbers spent on padding would tie a row to its batch.
        drawn_BL = scored_BT
        if config.cache is not None and config.quirks.global_noise:
            window = gather_window(active_BT)
            drawn_BL = scored_BT.gather(1, window.index_BL) & window.valid_BL
        tokens_N = choose_tokens(logits_NV, config, lambda vocabulary: self.noise.uniform(drawn_BL, vocabulary))
        confidence_NV = temper(logits_NV, config).float() if config.tempered_confidence else logits_NV
        if config.quirks.begin_suppress_by_confidence and config.begin_suppress_token_ids:
            suppressed_V = token_columns(config.begin_suppress_token_ids, logits_NV.shape[-1], logits_NV.device)
            confidence_NV = confidence_NV.masked_fill(suppressed_V, -torch.inf)
        probabilities_NV = confidence_NV.softmax(dim=-1)
        return Predictions(tokens_N, probabilities_NV, lambda: self.noise.uniform(drawn_BL))

    def _edits(self, judged: Judged, scored_BT: Tensor, scored: Scored) -> list[int]:
        """Scored positions that are no candidates, and get another token than they have."""
        before = self.tokens_BT[scored_BT].tolist()
        editable = sorted(set(range(len(before))).difference(*scored.candidates))
        sure = above(judged.probabilities, editable, self.config.editing_threshold)
        return [n for n in sure if judged.tokens[n] != before[n]]

    def _advance(self, active_BT: Tensor, edited_BT: Tensor | None) -> list[bool]:
        """Count the pass; returns per row whether it has finished its block."""
        holes_left = (self.holes_BT & active_BT).sum(dim=1).tolist()
        edited = [0] * len(holes_left) if edited_BT is None else edited_BT.sum(dim=1).tolist()
        finished = self.progress.advance(holes_left, edited)
        if self.config.quirks.stop_after_block:
            ends_B = (active_BT & (self.tokens_BT == self.config.eos_token_id)).any(dim=1)
            self.done_B |= torch.tensor(finished) & ends_B
        return finished

    def _settle(self, active_BT: Tensor, finished: list[bool]) -> Tensor:
        """Settled tokens; the rows whose text has ended are filled, for nothing behind the end can change it."""
        config = self.config
        settled_BT = self.canvas.holes_BT & (self.holes_BT.cumsum(dim=1) == 0)
        if config.editing_threshold is not None:
            # What may still be edited has not ended anything yet.
            settled_BT = settled_BT & ~(active_BT & ~torch.tensor(finished)[:, None])
        if not config.end_token_ids:
            return settled_BT
        ended = self.ends.ended(self.tokens_BT, settled_BT)
        if not any(ended):
            return settled_BT
        self.progress.end(ended)
        ended_B1 = torch.tensor(ended)[:, None]
        closed_BT = self.holes_BT & ended_B1
        self.tokens_BT = self.tokens_BT.masked_fill(closed_BT, config.end_token_ids[0])
        self.holes_BT = self.holes_BT & ~closed_BT
        return settled_BT | (self.canvas.holes_BT & ended_B1)


def _put(canvas_BT: Tensor, places: list[int], values: list[Any]) -> Tensor:
    """The canvas with other values at some places, counted row after row."""
    # At so few places, tensors of them take longer to make than the copy.
    array_BT = canvas_BT.numpy().copy()
    array_BT.reshape(-1)[places] = values
    return torch.from_numpy(array_BT)
