"""A denoising run whose rows come and go between passes.

``sampling.denoise`` takes one canvas to its end. Nothing in a run ties its rows together, so the rest of one run and
the rest of another are a run as well (``sampling.joining``).

Shape letters: B rows, T canvas positions.
"""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import chain, count, groupby
from operator import itemgetter

import torch
from torch.nn.utils.rnn import pad_sequence

from nemo_dllm.collections.diffusion.sampling import CachedDenoiser, DenoiserFn, DenoiseStep
from nemo_dllm.collections.diffusion.sampling.blocks import Canvas, block_indices
from nemo_dllm.collections.diffusion.sampling.config import DELAYED
from nemo_dllm.collections.diffusion.sampling.device import works_apart
from nemo_dllm.collections.diffusion.sampling.joining import Picked, can_join_rows, join_attribute, keeps_places
from nemo_dllm.collections.diffusion.sampling.noise import RowNoise
from nemo_dllm.collections.diffusion.sampling.progress import Progress
from nemo_dllm.collections.diffusion.sampling.run import DenoisingRun
from nemo_dllm.collections.diffusion.sampling.stopping import Decode, TextEnds
from nemo_dllm.collections.diffusion.serving.rows import Row


@dataclass(frozen=True)
class Denoising:
    """What all batches of an engine share.

    Attributes:
        denoiser: the model.
        mask_token_id: shown to the model at holes.
        device: of the model.
        decode: token ids -> text, for stop strings.
    """

    denoiser: DenoiserFn | CachedDenoiser
    mask_token_id: int
    device: torch.device | str
    decode: Decode


class RollingBatch:
    """Rows of equal settings that are denoised side by side, each in its place.

    A row that is not live any more idles in its place until another one takes it.

    Args:
        of: the model and what belongs to it.
        rows: at least one; every one is at its beginning.
    """

    def __init__(self, of: Denoising, rows: Sequence[Row]):
        self._of, self.rows = of, list(rows)
        config = rows[0].config
        texts = [[*row.prefix, *[of.mask_token_id] * row.hole_count, *row.suffix] for row in rows]
        tensors = [torch.tensor(text, dtype=torch.int64) for text in texts]
        tokens_BT = pad_sequence(tensors, batch_first=True, padding_value=of.mask_token_id)
        device = torch.device(of.device)
        noise = RowNoise([row.seed for row in rows], [row.row_id for row in rows], device)
        fixed = (of.mask_token_id, config, noise, TextEnds(config, of.decode), device)
        self._run = DenoisingRun(of.denoiser, tokens_BT, _canvas(rows), *fixed)
        self._begin_steps()
        for row in rows:
            row.passes = 0

    def step(self) -> DenoiseStep | None:
        """One forward pass, whose rows are ``rows``; None where no row is live any more."""
        for row in self.rows:
            row.passes += row.is_live
        step = next(self._steps, None)
        self._ahead.has_begun &= step is not None
        return step

    @property
    def begins_with_all(self) -> bool:
        """Whether the first step of a row is over all of its text, so that others beside it would be padding."""
        return self._run.config.cache == DELAYED

    @property
    def is_elastic(self) -> bool:
        """Whether rows can join and leave; those in a cache of the model's own kind may not be movable."""
        return can_join_rows(self._run)

    @property
    def is_open(self) -> bool:
        """Whether rows may join and leave before the next pass: with an exact cache when all have finished a block."""
        if self._run.config.cache == "exact":
            return self.is_elastic and self._run.progress.is_between_blocks and not self._ahead.has_begun
        return self.is_elastic

    def with_live_rows_of(self, other: "RollingBatch | None" = None) -> "RollingBatch | None":
        """The batch of the live rows of this one, which is open, and then of another one, each where it was.

        With a cache rows stay in their places, and those of the other one take free places, as long as the cache's
        memory suits; else all rows are moved. None where no row is live.
        """
        live = [(self, place) for place, row in enumerate(self.rows) if row.is_live]
        joining = [] if other is None else [(other, place) for place, row in enumerate(other.rows) if row.is_live]
        places = [*live, *joining]
        if not places:
            return None
        longest = max(batch.rows[place].length for batch, place in places)
        if live and keeps_places(self._run, len(places), longest):
            if not joining:
                return self
            free = [place for place, row in enumerate(self.rows) if not row.is_live]
            places = [(self, place) for place in range(len(self.rows))]
            for place, row in zip(chain(free, count(len(self.rows))), joining, strict=False):
                places[place : place + 1] = [row]
        joined = copy(self)
        joined.rows = [batch.rows[place] for batch, place in places]
        joined._run = DenoisingRun.join_rows(_picked(places))
        joined._begin_steps()
        return joined

    def encode_prompts(self) -> None:
        """Encode what new rows begin with, apart from the rows that run, which would ride along as padding.

        The rows themselves pad each other: see ``CachedDenoiser.full_pass``.
        """
        config = self._run.config
        if config.cache is None or self.begins_with_all or not self.is_elastic:
            return
        new = [row for row in self.rows if row.is_live and not row.passes]
        # Approximate caches encode the holes as well.
        lengths = [len(row.prefix) if config.cache == "exact" else row.length for row in new]
        for group in alike(new, lengths, getattr(self._of.denoiser, "full_pass", None)):
            if len(group) == len(self.rows):
                # The next step does just that.
                return
            self._encode_apart(group)

    def _encode_apart(self, group: Sequence[Row]) -> None:
        """Encode what some rows begin with in a cache of their own, which the next ones may have after them."""
        apart = RollingBatch(self._of, group)
        apart._run.encode()
        found = {row: (apart, place) for place, row in enumerate(group)}
        places = [found.get(row, (self, place)) for place, row in enumerate(self.rows)]
        self._run.score = join_attribute(_picked(places), "score", self._run.canvas)

    def _begin_steps(self) -> None:
        # Of the rows, not of the batch: a batch that its steps held would keep its cache until garbage is collected.
        rows = self.rows
        self._ahead = _Ahead(self._run.progress, self._run.device)
        ahead = self._ahead if self._run.config.cache == "exact" else None
        self._steps: Iterator[DenoiseStep] = self._run.steps(lambda: [not row.is_live for row in rows], ahead)


class _Ahead:
    """Lets a pass begin while the step before is handed out, in the middle of blocks, where rows cannot join."""

    def __init__(self, progress: Progress, device: torch.device):
        self._progress, self._works_apart = progress, works_apart(device)
        # Not to be told later: a row that is given up ends its block.
        self.has_begun = False

    def __call__(self) -> bool:
        self.has_begun = self._works_apart and not self._progress.is_between_blocks
        return self.has_begun


def alike(rows: Sequence[Row], lengths: Sequence[int], full_pass: int | None) -> list[list[Row]]:
    """Rows to encode in a pass each, with others of about their length that find room in it.

    Args:
        rows: those to encode.
        lengths: positions of each.
        full_pass: as of ``CachedDenoiser``; with None they are encoded together.
    """
    groups = []
    # The longest first: what its pass leaves behind, such as memory, serves shorter ones.
    for pair in sorted(zip(lengths, rows, strict=True), key=itemgetter(0), reverse=True):
        if groups and (full_pass is None or groups[-1][0][0] * (len(groups[-1]) + 1) <= full_pass):
            groups[-1].append(pair)
        else:
            groups.append([pair])
    return [[row for _, row in group] for group in groups]


def _picked(places: Sequence[tuple[RollingBatch, int]]) -> list[Picked]:
    """Rows of batches as those of their runs."""
    return [
        Picked(batch._run, [place for _, place in following]) for batch, following in groupby(places, key=itemgetter(0))
    ]


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
