"""The denoising loop: predict every candidate, commit the best, repeat until no hole is left.

The canvas and all decisions about it are on the CPU. The device gets the tokens of each pass, and gives back a few
numbers per scored position, so that the CPU waits for it once per step. What a step does from then until the next pass
is there makes the device wait: it looks at the blocks at hand, in lists of places, and hardly at the canvas.

Shape letters: B rows, T canvas positions, L positions of one pass, N scored positions of all rows in row-major order,
V vocabulary. A place is a position of the canvas counted row after row.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from math import inf
from typing import Any

import torch
from torch import Tensor

from nemo_dllm.collections.diffusion.sampling.at_hand import AtHand
from nemo_dllm.collections.diffusion.sampling.blocks import (
    Canvas,
    following,
    gather_window,
    places_by_row,
    places_of,
    put,
)
from nemo_dllm.collections.diffusion.sampling.config import SamplerConfig
from nemo_dllm.collections.diffusion.sampling.device import OnItsWay, on_cpu, on_device, works_apart
from nemo_dllm.collections.diffusion.sampling.joining import Picked, attribute_of, join_attribute, stack_rows
from nemo_dllm.collections.diffusion.sampling.model_function import CachedDenoiser, DenoiserFn
from nemo_dllm.collections.diffusion.sampling.noise import GlobalNoise, RowNoise
from nemo_dllm.collections.diffusion.sampling.prediction import predict
from nemo_dllm.collections.diffusion.sampling.progress import Progress
from nemo_dllm.collections.diffusion.sampling.quirks import ReferenceQuirks
from nemo_dllm.collections.diffusion.sampling.remasking import Predictions
from nemo_dllm.collections.diffusion.sampling.scoring import build_scorer
from nemo_dllm.collections.diffusion.sampling.selection import Scored, judge, rate, select_commits, select_edits
from nemo_dllm.collections.diffusion.sampling.step import Change, DenoiseStep, Launched, settled
from nemo_dllm.collections.diffusion.sampling.stopping import TextEnds
from nemo_dllm.collections.diffusion.sampling.token_choice import (
    check_given_tokens,
    check_token_ids,
    tells_first_tokens_apart,
)

REHEARSED = 64
"""Positions of a step at most where its bookkeeping is rehearsed: that of more takes longer than is left of a pass."""


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
        self.config, self.mask_token_id, self._end_ids = config, mask_token_id, frozenset(config.end_token_ids)
        self._edits_tokens = config.editing_threshold is not None
        self._looks_at_whole_texts = (
            bool(config.stop_strings) or self._edits_tokens or config.quirks != ReferenceQuirks()
        )
        self.noise, self.ends, self.device = noise, ends, device or tokens_BT.device
        self.canvas = canvas = canvas.cpu()
        self.tokens_BT = tokens_BT.cpu().contiguous().masked_fill(canvas.holes_BT, mask_token_id)
        self.holes_BT = canvas.holes_BT.clone()
        # A model that knows its vocabulary keeps a GPU from ids that would be the end of its process.
        self.known_vocabulary = getattr(model, "vocabulary_size", None)
        self._check_ids(self.known_vocabulary)
        # Rows that finish their blocks together have them encoded in one pass.
        lockstep = "turn" if config.cache == "exact" else "block" if config.quirks.lockstep else None
        self.progress = Progress(canvas.holes_BT, canvas.blocks_BT, config, lockstep)
        self.score = build_scorer(model, self.tokens_BT, canvas, mask_token_id, config, self.device)
        self.done_B = torch.zeros(len(tokens_BT), dtype=torch.bool, device="cpu")
        self._nearly_done = getattr(model, "nearly_done", None) if works_apart(self.device) else None

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
        joined.done_B = stack_rows(attribute_of(picked, "done_B"))
        for name in ("noise", "ends", "progress"):
            setattr(joined, name, join_attribute(picked, name))
        joined.score = join_attribute(picked, "score", canvas)
        return joined

    @torch.no_grad()
    def encode(self) -> None:
        """Encode what comes before the blocks at hand; the next step would do it otherwise."""
        self._restart()
        self._begin(self.progress.blocks())

    @torch.no_grad()
    def steps(
        self, abandoned: Callable[[], Sequence[bool]] | None = None, ahead: Callable[[], bool] | None = None
    ) -> Iterator[DenoiseStep]:
        """What ``denoise`` returns, from where the run stands; steps count from 1.

        Args:
            abandoned: as of ``denoise``.
            ahead: asked after each pass whether the next one may begin before its step is handed out, so that the
                device works while the caller does; where that fails, the step comes first. Rows must not be joined
                after such a step. None is never.
        """
        self._restart()
        step = 0
        launched = self._launch(abandoned)
        while launched is not None:
            step += 1
            change = self._finish(launched)
            is_ahead = ahead is not None and ahead()
            try:
                launched = self._launch(abandoned) if is_ahead else None
            except Exception:
                # Of another pass: what this one has found comes first.
                yield DenoiseStep.of(self.canvas, self.tokens_BT, self.holes_BT, step, change)
                raise
            yield DenoiseStep.of(self.canvas, self.tokens_BT, self.holes_BT, step, change)
            if not is_ahead:
                launched = self._launch(abandoned)

    def _launch(self, abandoned: Callable[[], Sequence[bool]] | None) -> Launched | None:
        """Let the device begin with the next pass over the blocks at hand; None where nothing is left to do."""
        if abandoned is not None:
            self.progress.end(abandoned())
        blocks = self.progress.blocks()
        if blocks.count(None) == len(blocks) or (self.config.quirks.stop_after_block and self.done_B.all()):
            return None
        if self._at is None or blocks != self._at.blocks:
            self._begin(blocks)
        scored = self._scored()
        rated = OnItsWay(rate(self._predict(scored), self.config))
        launched = Launched(scored, rated, self.progress.quotas())
        # Meanwhile the device works, and nobody writes to these.
        if self._next is None or self._next.blocks != following(blocks):
            self._next = self._look_at(following(blocks))
        return launched

    def _finish(self, launched: Launched) -> Change:
        """Wait for a pass, and commit and edit tokens; until the next pass is launched the device waits."""
        scored, rated, quotas = launched
        if self._nearly_done is not None and len(scored.places) <= REHEARSED:
            self._nearly_done()
            self._rehearse(scored, quotas)
        judged = judge(rated, self.config)
        chosen = select_commits(judged, scored, quotas, self.config)
        edited = select_edits(judged, scored, self._tokens_N, self.config) if self._edits_tokens else []
        # The mask token is chosen with a quirk only, and fills nothing.
        filled = [n for n in chosen if judged.tokens[n] != self.mask_token_id]
        committed = self._fill(scored.at(filled), [judged.tokens[n] for n in filled])
        if edited:
            put(self.tokens_BT, scored.at(edited), [judged.tokens[n] for n in edited])
        finished = self._advance(scored.at(edited))
        # What may still be edited has not ended anything yet.
        unsettled_BT = self._at.active_BT & ~on_cpu(finished)[:, None] if self._edits_tokens else None
        ended = self._ended(unsettled_BT)
        if any(ended):
            committed = committed + self._close(ended)
            if unsettled_BT is not None:
                unsettled_BT = unsettled_BT & ~on_cpu(ended)[:, None]
        return Change(committed, scored.at(edited), unsettled_BT)

    def _rehearse(self, scored: Scored, quotas: list[int]) -> None:
        """Do much of what follows a pass, to no effect, while the device still works: since the last pass, other
        programs have driven it out of the CPU's caches, which makes it take several times as long."""
        judged = judge(torch.zeros(2, len(scored.places), dtype=torch.float64, device="cpu"), self.config)
        scored.at(select_commits(judged, scored, quotas, self.config))
        self._fill([], [])
        self.progress.quotas()
        self.score.rehearse(self.tokens_BT, self._scored().places)

    def _fill(self, places: list[int], tokens: list[int]) -> list[int]:
        """Write tokens to candidates; returns those that were holes, which with a quirk not all of them are."""
        were_holes = [place for place in places if self._holes_N[place]]
        for place, token in zip(places, tokens, strict=True):
            self._tokens_N[place], self._holes_N[place] = token, False
        if not self._end_ids.isdisjoint(tokens):
            for place in (place for place, token in zip(places, tokens, strict=True) if token in self._end_ids):
                row = place // self.tokens_BT.shape[1]
                self._end_of[row] = min(place, self._end_of.get(row, place))
        filled = set(places)
        self._open = [[place for place in row if place not in filled] for row in self._open]
        return were_holes

    def _advance(self, edited: list[int]) -> list[bool]:
        """Count the pass; returns per row whether it has finished its block."""
        edits = [0] * len(self._open)
        for place in edited:
            edits[place // self.tokens_BT.shape[1]] += 1
        finished = self.progress.advance([len(row) for row in self._open], edits)
        if self.config.quirks.stop_after_block:
            ends_B = (self._at.active_BT & (self.tokens_BT == self.config.eos_token_id)).any(dim=1)
            self.done_B |= on_cpu(finished) & ends_B
        return finished

    def _check_ids(self, vocabulary: int | None) -> None:
        if vocabulary is not None:
            check_token_ids(self.config, self.mask_token_id, vocabulary)
        check_given_tokens(self.tokens_BT, vocabulary)

    def _restart(self) -> None:
        """Look at the canvas anew; by place, which takes less than tensors for a few of them."""
        self._at = self._next = None
        self._tokens_N, self._holes_N = (x_BT.numpy().reshape(-1) for x_BT in (self.tokens_BT, self.holes_BT))

    def _begin(self, blocks: list[int | None]) -> None:
        """Let rows move on to these blocks; those with None have nothing to do."""
        self.score.begin(self.tokens_BT, blocks)
        is_next = self._next is not None and self._next.blocks == blocks
        self._at = self._next if is_next else self._look_at(blocks)
        self._open, self._end_of = self._at.open, self._at.ends

    def _look_at(self, blocks: list[int | None]) -> AtHand:
        return AtHand.of(self.canvas, blocks, self._tokens_N, self._holes_N, self._end_ids)

    def _scored(self) -> Scored:
        others = self._at.generated if self._edits_tokens else None
        return Scored.of(self._candidates(), self.holes_BT.shape[1], others)

    def _candidates(self) -> list[list[int]]:
        """Places that may be filled, by row."""
        if not self.config.quirks.stray_masks_compete:
            return self._open
        reached_BT = self.canvas.before(self._at.blocks) | self._at.active_BT
        return places_by_row(reached_BT & (self.tokens_BT == self.mask_token_id))

    def _predict(self, scored: Scored) -> Predictions:
        logits_NV = self.score(self.tokens_BT, scored.places)
        if logits_NV.shape[-1] != self.known_vocabulary:
            self.known_vocabulary = logits_NV.shape[-1]
            self._check_ids(self.known_vocabulary)
        ordinals_N = None
        if tells_first_tokens_apart(self.config):
            ordinals_BT = self.canvas.holes_BT.cumsum(dim=1) - 1
            ordinals_N = on_device(ordinals_BT.flatten()[scored.places], logits_NV.device)
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
        drawn_BT = put(torch.zeros_like(self.holes_BT), scored.places, True)
        if self.config.cache is None or not self.config.quirks.global_noise:
            return drawn_BT
        window = gather_window(self._at.active_BT)
        return drawn_BT.gather(1, window.index_BL) & window.valid_BL

    def _ended(self, unsettled_BT: Tensor | None) -> list[bool]:
        """Rows whose text has ended."""
        if self._end_ids and self._looks_at_whole_texts:
            return self.ends.ended(self.tokens_BT, settled(self.canvas, self.holes_BT, unsettled_BT))
        if not self._end_of:
            return []
        # Blocks before those at hand are full.
        return [
            row in self._end_of and self._end_of[row] < min(open_, default=inf) for row, open_ in enumerate(self._open)
        ]

    def _close(self, ended: list[bool]) -> list[int]:
        """Fill what is left of rows, for nothing behind the end of a text can change it; returns the places."""
        self.progress.end(ended)
        places = places_of(self.holes_BT & on_cpu(ended)[:, None])
        put(self.tokens_BT, places, self.config.end_token_ids[0])
        put(self.holes_BT, places, False)
        return places
