"""A denoising run whose rows come and go between passes.

``sampling.denoise`` takes one canvas to its end. Nothing in a run ties its rows together, so the rest of one run and
the rest of another are a run as well (``sampling.joining``).

Shape letters: B rows, T canvas positions.
"""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence

from nemo_dllm.collections.diffusion.sampling import CachedDenoiser, DenoiserFn, DenoiseStep
from nemo_dllm.collections.diffusion.sampling.blocks import Canvas, block_indices
from nemo_dllm.collections.diffusion.sampling.joining import Picked, can_join_rows
from nemo_dllm.collections.diffusion.sampling.noise import RowNoise
from nemo_dllm.collections.diffusion.sampling.run import DenoisingRun
from nemo_dllm.collections.diffusion.sampling.stopping import Decode, TextEnds
from nemo_dllm.collections.diffusion.serving.rows import Row


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
        self.rows = list(rows)
        config = rows[0].config
        texts = [[*row.prefix, *[of.mask_token_id] * row.hole_count, *row.suffix] for row in rows]
        tensors = [torch.tensor(text, dtype=torch.int64, device=of.device) for text in texts]
        tokens_BT = pad_sequence(tensors, batch_first=True, padding_value=of.mask_token_id)
        noise = RowNoise([row.seed for row in rows], [row.row_id for row in rows], tokens_BT.device)
        fixed = (of.mask_token_id, config, noise, TextEnds(config, of.decode))
        self._run = DenoisingRun(of.denoiser, tokens_BT, _canvas(rows), *fixed)
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
        """Whether rows can join and leave; those in a cache of the model's own kind may not be movable."""
        return can_join_rows(self._run)

    @property
    def is_open(self) -> bool:
        """Whether rows may join before the next pass: with an exact cache, only where all have finished a block."""
        return self.is_elastic and (self._run.config.cache != "exact" or self._run.progress.is_between_blocks)

    def with_live_rows_of(self, other: "RollingBatch | None" = None) -> "RollingBatch | None":
        """The batch of the rows that are live, of this one and then of another one, each where it was.

        None where no row is live.
        """
        rows, picked = [], []
        for batch in [self] if other is None else [self, other]:
            places = [place for place, row in enumerate(batch.rows) if row.is_live]
            rows += [batch.rows[place] for place in places]
            if places:
                picked.append(Picked(batch._run, places))
        if not rows:
            return None
        joined = copy(self)
        joined.rows, joined._run = rows, DenoisingRun.join_rows(picked)
        joined._begin_steps()
        return joined

    def _begin_steps(self) -> None:
        # Of the rows, not of the batch: a batch that its steps held would keep its cache until garbage is collected.
        rows = self.rows
        self._steps: Iterator[DenoiseStep] = self._run.steps(lambda: [not row.is_live for row in rows])


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
