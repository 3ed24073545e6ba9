"""A denoising run whose rows come and go between passes.

``sampling.denoise`` takes one canvas to its end. Nothing in a run ties its rows together, so the rest of one run and
the rest of another are a run as well: here they are put side by side, each row with its tokens, noise, block and keys.

Shape letters: B rows, T canvas positions, S cache slots, V vocabulary.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nemo_dllm.collections.diffusion.sampling import CachedDenoiser, DenoiserFn, DenoiseStep, KVCache
from nemo_dllm.collections.diffusion.sampling.approximate_caches import ApproximateCache, DelayedCache
from nemo_dllm.collections.diffusion.sampling.blocks import block_indices
from nemo_dllm.collections.diffusion.sampling.denoise import _Run
from nemo_dllm.collections.diffusion.sampling.noise import RowNoise
from nemo_dllm.collections.diffusion.sampling.progress import Progress
from nemo_dllm.collections.diffusion.sampling.scoring import (
    Canvas,
    CommittedBlocks,
    Guided,
    Scorer,
    WholeCanvas,
    build_scorer,
)
from nemo_dllm.collections.diffusion.sampling.stopping import Decode, TextEnds
from nemo_dllm.collections.diffusion.serving.rows import Row

_WITH_CACHE = (CommittedBlocks, ApproximateCache, DelayedCache)


@dataclass(frozen=True)
class Denoising:
    """What all batches of an engine share.

    Attributes:
        denoiser: the model.
        mask_token_id: shown to the model at holes.
        device: where canvases live.
        decode: token ids -> text, for stop strings.
    """

    denoiser: DenoiserFn | CachedDenoiser
    mask_token_id: int
    device: torch.device | str
    decode: Decode


class RollingBatch:
    """Rows of equal settings that are denoised side by side.

    Args:
        of: the model and what belongs to it.
        rows: at least one; every one is at its beginning.
    """

    def __init__(self, of: Denoising, rows: Sequence[Row]):
        self._of, self.rows = of, list(rows)
        config = rows[0].config
        texts = [[*row.prefix, *[of.mask_token_id] * row.hole_count, *row.suffix] for row in rows]
        tensors = [torch.tensor(text, dtype=torch.int64, device=of.device) for text in texts]
        tokens_BT = pad_sequence(tensors, batch_first=True, padding_value=of.mask_token_id)
        noise = RowNoise([row.seed for row in rows], [row.row_id for row in rows], tokens_BT.device)
        fixed = (of.mask_token_id, config, noise, TextEnds(config, of.decode))
        self._run = _Run(of.denoiser, tokens_BT, _canvas(rows), *fixed)
        self._begin_steps()
        for row in rows:
            row.passes = 0

    def step(self) -> DenoiseStep | None:
        """One forward pass, whose rows are ``rows``; None where no row is live any more."""
        for row in self.rows:
            row.passes += 1
        return next(self._steps, None)

    @property
    def keeps_keys(self) -> bool:
        """Whether the run keeps keys and values, so that its first pass encodes the prompts."""
        return self._run.config.cache is not None

    @property
    def is_elastic(self) -> bool:
        """Whether rows can join and leave; those in a cache of the model's own kind cannot be moved."""
        return all(
            type(scorer) is WholeCanvas or (type(scorer) in _WITH_CACHE and isinstance(scorer._cache, KVCache))
            for scorer in _branches(self._run.score)
        )

    @property
    def is_open(self) -> bool:
        """Whether rows may join before the next pass: with an exact cache, only where all have finished a block."""
        return self.is_elastic and (self._run.config.cache != "exact" or not any(self._run.progress._passes))

    def with_live_rows_of(self, other: "RollingBatch | None" = None) -> "RollingBatch | None":
        """The batch of the rows that are live, of this one and then of another one, each where it was.

        Both have done a pass at least where they keep keys. None where no row is live.
        """
        batches = [self] if other is None else [self, other]
        kept = [_Kept(batch._run, [i for i, row in enumerate(batch.rows) if row.is_live]) for batch in batches]
        rows = [batch.rows[i] for batch, (_, places) in zip(batches, kept, strict=True) for i in places]
        if not rows:
            return None
        joined = copy.copy(self)
        joined.rows = rows
        joined._run = _side_by_side(self._of, rows, [part for part in kept if part.places])
        joined._begin_steps()
        return joined

    def _begin_steps(self) -> None:
        self._steps: Iterator[DenoiseStep] = self._run.steps(lambda: [not row.is_live for row in self.rows])


class _Kept(NamedTuple):
    """Rows of a run, or of a part of it, that go on."""

    of: Any
    places: list[int]

    def part(self, read: Callable[[Any], Any]) -> "_Kept":
        return _Kept(read(self.of), self.places)


def _canvas(rows: Sequence[Row]) -> Canvas:
    """Rows aligned on the left, on the CPU as of the sampler."""
    positions_T = torch.arange(max(row.length for row in rows))
    bounds_B3 = torch.tensor([[row.holes.start, row.holes.stop, row.length] for row in rows])
    starts_B1, ends_B1, lengths_B1 = bounds_B3.T[..., None]
    holes_BT = (positions_T >= starts_B1) & (positions_T < ends_B1)
    config = rows[0].config
    blocks_BT = block_indices(holes_BT, config.block_size, config.counts_blocks_from)
    # A mask that hides nothing would only keep attention off its fast path.
    padded = len({row.length for row in rows}) > 1
    return Canvas(holes_BT, blocks_BT, positions_T < lengths_B1, padded)


def _side_by_side(of: Denoising, rows: Sequence[Row], kept: Sequence[_Kept]) -> _Run:
    config = rows[0].config
    run = copy.copy(kept[0].of)
    run.canvas = _canvas(rows)
    positions = run.canvas.holes_BT.shape[1]
    run.tokens_BT = _stack(((r.tokens_BT, places) for r, places in kept), positions)
    run.holes_BT = _stack(((r.holes_BT, places) for r, places in kept), positions)
    run.ordinals_BT = run.canvas.holes_BT.cumsum(dim=1) - 1
    run.noise = copy.copy(run.noise)
    run.noise._generators = [r.noise._generators[i] for r, places in kept for i in places]
    run.ends = TextEnds(config, of.decode)
    run.progress = _progress([part.part(lambda r: r.progress) for part in kept])
    run.score = build_scorer(of.denoiser, run.tokens_BT, run.canvas, of.mask_token_id, config)
    _fill_scorer(run.score, [part.part(lambda r: r.score) for part in kept], positions)
    run.done_B = torch.zeros(len(rows), dtype=torch.bool)
    return run


def _progress(kept: Sequence[_Kept]) -> Progress:
    progress = copy.copy(kept[0].of)
    for name in ("_plans", "_passes", "_post_passes"):
        setattr(progress, name, [getattr(part, name)[i] for part, places in kept for i in places])
    # Blocks count from here on: rows wait for those that have finished fewer of them.
    first, *others = kept
    base = min(first.of._turns[i] for i in first.places)
    progress._turns = [first.of._turns[i] - base for i in first.places]
    progress._turns += [part._turns[i] for part, places in others for i in places]
    return progress


def _fill_scorer(scorer: Scorer, kept: Sequence[_Kept], positions: int) -> None:
    """Give a new scorer what others have kept for their rows."""
    branches = [[_Kept(branch, places) for branch in _branches(s)] for s, places in kept]
    for branch, parts in zip(_branches(scorer), zip(*branches, strict=True), strict=True):
        if isinstance(branch, CommittedBlocks):
            branch._committed_BT = _stack(((s._committed_BT, places) for s, places in parts), positions)
            branch._last_BV = _last_logits(parts)
        elif isinstance(branch, ApproximateCache):
            branch._block_B = torch.cat([s._block_B[places] for s, places in parts])
        elif isinstance(branch, DelayedCache):
            branch._encoded_BT = _stack(((s._encoded_BT, places) for s, places in parts), positions)
            branch._passes_B = torch.cat([s._passes_B[places] for s, places in parts])
        if not isinstance(branch, WholeCanvas):
            _fill_cache(branch._cache, [part.part(lambda s: s._cache) for part in parts], positions + 1)


def _last_logits(kept: Sequence[_Kept]) -> Tensor | None:
    """Logits of the last committed token of each row; what stands for rows without one is not read."""
    known = next((s._last_BV for s, _ in kept if s._last_BV is not None), None)
    if known is None:
        return None
    nothing = [known.new_zeros(len(s._committed_BT), known.shape[1]) for s, _ in kept]
    parts = [zeros_BV if s._last_BV is None else s._last_BV for (s, _), zeros_BV in zip(kept, nothing, strict=True)]
    return torch.cat([last_BV[places] for last_BV, (_, places) in zip(parts, kept, strict=True)])


def _fill_cache(cache: KVCache, kept: Sequence[_Kept], slots: int) -> None:
    cache._held_BS = _stack(((c._held_BS, places) for c, places in kept), slots)
    for layer in kept[0].of._layers:
        cache._layers[layer] = tuple(
            _stack(((c._layers[layer][i], places) for c, places in kept), slots) for i in range(2)
        )


def _stack(parts: Iterable[tuple[Tensor, list[int]]], columns: int) -> Tensor:
    """The named rows of several tensors under each other, cut or filled with zeros to a number of columns."""
    parts = [(x_BC[:, :columns], places) for x_BC, places in parts]
    first_BC = parts[0][0]
    whole_BC = first_BC.new_zeros(sum(len(places) for _, places in parts), columns, *first_BC.shape[2:])
    start = 0
    for x_BC, places in parts:
        whole_BC[start : start + len(places), : x_BC.shape[1]] = x_BC[places]
        start += len(places)
    return whole_BC


def _branches(scorer: Scorer) -> list[Scorer]:
    """Guidance has two scorers with a state of their own."""
    return [scorer._conditional, scorer._unconditional] if isinstance(scorer, Guided) else [scorer]
