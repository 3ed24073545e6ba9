"""Where each row of a run stands: the block at hand, and how many tokens its next step commits.

Shape letters: B rows, T canvas positions.
"""

from collections import Counter, deque
from collections.abc import Sequence
from copy import copy
from math import ceil
from typing import Literal

import numpy
from torch import Tensor

from nemo_dllm.collections.diffusion.sampling.config import SamplerConfig
from nemo_dllm.collections.diffusion.sampling.joining import Picked, attribute_of, by_part, pick_items
from nemo_dllm.collections.diffusion.sampling.transfer import SCHEDULES


def block_plan(holes_T: numpy.ndarray, blocks_T: numpy.ndarray, config: SamplerConfig) -> list[tuple[int, list[int]]]:
    """The blocks of one row that have holes, each with the tokens that its steps commit.

    ``config.steps`` is split evenly over these blocks and rounded up. Without steps the counts are empty, which stands
    for one token per step.
    """
    masked_of = Counter(blocks_T[holes_T].tolist())
    steps = config.steps_per_block
    if config.steps is not None:
        steps = ceil(config.steps / max(1, len(masked_of)))
    if steps is None:
        return [(block, []) for block in sorted(masked_of)]
    # Most blocks have as many holes as the others.
    counts_of = {
        masked: SCHEDULES[config.schedule](masked, steps, config.block_size or masked)
        for masked in set(masked_of.values())
    }
    return [(block, counts_of[masked_of[block]]) for block in sorted(masked_of)]


class Progress:
    """Blocks of every row, in order, with the passes spent on the first of them.

    Args:
        holes_BT: bool, positions to fill.
        blocks_BT: int64, the block of each position, see ``block_indices``.
        config: steps, schedule, editing and quirks are read.
        lockstep: rows ahead of the slowest one wait for it. "turn" compares how many blocks each has finished, "block"
            the blocks' numbers; None lets them go on.
    """

    def __init__(
        self, holes_BT: Tensor, blocks_BT: Tensor, config: SamplerConfig, lockstep: Literal["turn", "block"] | None
    ):
        self._plans = [deque(block_plan(*row, config)) for row in zip(holes_BT.numpy(), blocks_BT.numpy(), strict=True)]
        self._turns = [0] * len(self._plans)
        self._passes = [0] * len(self._plans)
        self._post_passes = [0] * len(self._plans)
        self._max_post = 0 if config.editing_threshold is None else config.max_post_steps
        self._counts_end_blocks = config.quirks.mask_token_allowed or config.quirks.stray_masks_compete
        self._lockstep = lockstep
        # Until a row moves on.
        self._blocks: list[int | None] | None = None

    @classmethod
    def join_rows(cls, picked: Sequence[Picked]) -> "Progress":
        """Rows of several runs, each at its own block and pass.

        Turns count from here on, for each run from the slowest row that goes on: nobody waits for what was done before.
        """
        joined = copy(picked[0].part)
        for name in ("_plans", "_passes", "_post_passes"):
            setattr(joined, name, pick_items(attribute_of(picked, name)))
        joined._turns, joined._blocks = [0] * len(joined._plans), None
        for progress, rows, places in by_part(picked):
            slowest = min((progress._turns[row] for row in rows if progress._plans[row]), default=0)
            for row, place in zip(rows, places, strict=True):
                joined._turns[place] = progress._turns[row] - slowest
        return joined

    @property
    def is_between_blocks(self) -> bool:
        """Whether no row is in the middle of a block."""
        return not any(self._passes)

    def blocks(self) -> list[int | None]:
        """The block that each row works on in the next pass, None where it has nothing to do."""
        if self._blocks is None:
            self._blocks = self._next_blocks()
        return self._blocks

    def _next_blocks(self) -> list[int | None]:
        current = [plan[0][0] if plan else None for plan in self._plans]
        if self._lockstep is None:
            return current
        places = self._turns if self._lockstep == "turn" else current
        slowest = min((place for place, plan in zip(places, self._plans, strict=True) if plan), default=None)
        return [block if place == slowest else None for place, block in zip(places, current, strict=True)]

    def quotas(self) -> list[int]:
        """Tokens that each row commits at least in the next pass; meaningless where it has nothing to do."""
        return [
            plan[0][1][passes] if plan and passes < len(plan[0][1]) else 1
            for plan, passes in zip(self._plans, self._passes, strict=True)
        ]

    def advance(self, holes_left: Sequence[int], edited: Sequence[int]) -> list[bool]:
        """Count one pass, and drop the blocks that it has finished.

        Args:
            holes_left: per row, holes that remain in its block.
            edited: per row, how many tokens that were already there the pass has changed.

        Returns:
            Per row, whether it has finished a block.
        """
        finished = [
            block is not None and self._finishes(row, holes_left[row], edited[row] > 0)
            for row, block in enumerate(self.blocks())
        ]
        for row, done in enumerate(finished):
            if done:
                self._plans[row].popleft()
                self._turns[row] += 1
                self._passes[row] = self._post_passes[row] = 0
                self._blocks = None
        return finished

    def end(self, ended: Sequence[bool]) -> None:
        """Drop what is left to do in rows that have ended."""
        for row, has_ended in enumerate(ended):
            if has_ended:
                self._plans[row].clear()
                self._passes[row] = self._post_passes[row] = 0
                self._blocks = None

    def _finishes(self, row: int, holes_left: int, edited: bool) -> bool:
        was_full = self._post_passes[row] > 0
        self._passes[row] += 1
        if holes_left:
            counts = self._plans[row][0][1]
            return self._counts_end_blocks and self._passes[row] >= len(counts)
        self._post_passes[row] += 1
        return self._post_passes[row] > self._max_post or (was_full and not edited)
