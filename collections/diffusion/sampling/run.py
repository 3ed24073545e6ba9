"""The denoising loop: predict every candidate, commit the best, repeat until no hole is left.

The canvas and all decisions about it are on the CPU. The device gets the tokens of each pass, and gives back a few
numbers per scored position, so that the CPU waits for it once per step. What a step does from then until the next pass
is there makes the device wait: it looks at the blocks at hand, in lists of places, and hardly at the canvas.

Shape letters: B rows, T canvas positions, L positions of one pass, N scored positions of all rows in row-major order,
V vocabulary. A place is a position of the canvas counted row after row.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from nemo_dllm.collections.diffusion.sampling.blocks import Canvas, gather_window, on_device, places_by_row
from nemo_dllm.collections.diffusion.sampling.config import SamplerConfig
from nemo_dllm.collections.diffusion.sampling.joining import Picked, attribute_of, join_attribute, stack_rows
from nemo_dllm.collections.diffusion.sampling.model_function import CachedDenoiser, DenoiserFn
from nemo_dllm.collections.diffusion.sampling.noise import GlobalNoise, RowNoise
from nemo_dllm.collections.diffusion.sampling.prediction import predict
from nemo_dllm.collections.diffusion.sampling.progress import Progress
from nemo_dllm.collections.diffusion.sampling.remasking import Predictions
from nemo_dllm.collections.diffusion.sampling.scoring import build_scorer
from nemo_dllm.collections.diffusion.sampling.selection import Judged, Scored, above, judge, select_commits
from nemo_dllm.collections.diffusion.sampling.stopping import TextEnds
from nemo_dllm.collections.diffusion.sampling.token_choice import check_token_ids, tells_first_tokens_apart


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
        device: of the model; None where ``tokens_BT`` is.

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
        device: torch.device | None = None,
    ):
        self.config, self.mask_token_id = config, mask_token_id
        self.noise, self.ends, self.device = noise, ends, device or tokens_BT.device
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

    def encode(self) -> None:
        """Encode what comes before the blocks at hand; the next step would do it otherwise."""
        self._begin(self.progress.blocks())

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
                self._begin(blocks)
            step += 1
            yield self._step(step)

    def _step(self, step: int) -> DenoiseStep:
        """One pass over the blocks at hand, and what it commits and edits."""
        edits = self.config.editing_threshold is not None
        scored = Scored.of(self._candidates(), self.holes_BT.shape[1], self._generated if edits else None)
        predictions = self._predict(scored)
        # Meanwhile the device works.
        quotas = self.progress.quotas()
        judged = judge(predictions, self.config)
        chosen = select_commits(judged, scored, quotas, self.config)
        edited = self._edits(judged, scored) if edits else []
        # The mask token is chosen with a quirk only, and fills nothing.
        filled = [n for n in chosen if judged.tokens[n] != self.mask_token_id]
        written = filled + edited
        holes_before_BT = self.holes_BT
        self.tokens_BT = _put(self.tokens_BT, scored.at(written), [judged.tokens[n] for n in written])
        self.holes_BT = _put(self.holes_BT, scored.at(filled), [False] * len(filled))
        committed = set(scored.at(filled))
        self._open = [[place for place in row if place not in committed] for row in self._open]
        edited_BT = _put(torch.zeros_like(self.holes_BT), scored.at(edited), [True] * len(edited)) if edits else None
        settled_BT = self._settle(self._advance(edited_BT))
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
    def _begin(self, blocks: list[int | None]) -> None:
        """Let rows move on to these blocks; those with None have nothing to do."""
        nothing = torch.iinfo(torch.int64).min
        current_B1 = torch.tensor([[nothing if block is None else block] for block in blocks])
        self._active_BT = self.canvas.keys_BT & (self.canvas.blocks_BT == current_B1)
        self.score.begin(self.tokens_BT, self._active_BT)
        self._open = places_by_row(self.holes_BT & self._active_BT)
        self._generated = places_by_row(self.canvas.holes_BT & self._active_BT)

    def _candidates(self) -> list[list[int]]:
        """Places that may be filled, by row."""
        if not self.config.quirks.stray_masks_compete:
            return self._open
        lowest = torch.iinfo(torch.int64).min
        current_B1 = self.canvas.blocks_BT.masked_fill(~self._active_BT, lowest).amax(dim=1, keepdim=True)
        masks_BT = self.canvas.keys_BT & (self.tokens_BT == self.mask_token_id)
        return places_by_row(masks_BT & (self.canvas.blocks_BT <= current_B1))

    @torch.no_grad()
    def _predict(self, scored: Scored) -> Predictions:
        logits_NV = self.score(self.tokens_BT, scored.places)
        if logits_NV.shape[-1] != self.known_vocabulary:
            self.known_vocabulary = logits_NV.shape[-1]
            self._check_ids(self.known_vocabulary)
        ordinals_N = None
        if tells_first_tokens_apart(self.config):
            ordinals_N = on_device(self.ordinals_BT.flatten()[scored.places], logits_NV.device)
        return predict(
            logits_NV,
            ordinals_N,
            self.mask_token_id,
            self.config,
            lambda *shape: self.noise.uniform(self._drawn(scored), *shape),
        )

    def _drawn(self, scored: Scored) -> Tensor:
        """Where noise is drawn, bool: at the row's own positions alone, for numbers spent on padding would tie a row to
        its batch."""
        drawn_BT = _put(torch.zeros_like(self.holes_BT), scored.places, True)
        if self.config.cache is None or not self.config.quirks.global_noise:
            return drawn_BT
        window = gather_window(self._active_BT)
        return drawn_BT.gather(1, window.index_BL) & window.valid_BL

    def _edits(self, judged: Judged, scored: Scored) -> list[int]:
        """Scored positions that are no candidates, and get another token than they have."""
        before = self.tokens_BT.flatten()[scored.places].tolist()
        editable = sorted(set(range(len(before))).difference(*scored.candidates))
        sure = above(judged.probabilities, editable, self.config.editing_threshold)
        return [n for n in sure if judged.tokens[n] != before[n]]

    def _advance(self, edited_BT: Tensor | None) -> list[bool]:
        """Count the pass; returns per row whether it has finished its block."""
        edited = [0] * len(self._open) if edited_BT is None else edited_BT.sum(dim=1).tolist()
        finished = self.progress.advance([len(row) for row in self._open], edited)
        if self.config.quirks.stop_after_block:
            ends_B = (self._active_BT & (self.tokens_BT == self.config.eos_token_id)).any(dim=1)
            self.done_B |= torch.tensor(finished) & ends_B
        return finished

    def _settle(self, finished: list[bool]) -> Tensor:
        """Settled tokens; the rows whose text has ended are filled, for nothing behind the end can change it."""
        config = self.config
        settled_BT = self.canvas.holes_BT & _before_holes(self.holes_BT)
        if config.editing_threshold is not None:
            # What may still be edited has not ended anything yet.
            settled_BT = settled_BT & ~(self._active_BT & ~torch.tensor(finished)[:, None])
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


def _before_holes(holes_BT: Tensor) -> Tensor:
    """Positions with no hole up to them, bool."""
    holes_BT = holes_BT.numpy()
    first_B = holes_BT.argmax(axis=1)
    # In a row without holes that is 0 as well.
    first_B[~holes_BT[numpy.arange(len(first_B)), first_B]] = holes_BT.shape[1]
    return torch.from_numpy(numpy.arange(holes_BT.shape[1]) < first_B[:, None])


def _put(canvas_BT: Tensor, places: list[int], values: Any) -> Tensor:
    """The canvas with other values at some places."""
    # At so few places, tensors of them take longer to make than the copy.
    array_BT = canvas_BT.numpy().copy()
    array_BT.reshape(-1)[places] = values
    return torch.from_numpy(array_BT)
