"""One step of a run: its pass, what it changes, and what is seen of it.

Shape letters: B rows, T canvas positions. A place is a position of the canvas counted row after row.
"""

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from nemo_dllm.collections.diffusion.sampling.blocks import Canvas, before_hole, put
from nemo_dllm.collections.diffusion.sampling.device import OnItsWay
from nemo_dllm.collections.diffusion.sampling.selection import Scored


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

    @classmethod
    def of(cls, canvas: Canvas, tokens_BT: Tensor, holes_BT: Tensor, step: int, change: "Change") -> Self:
        """What a step shows of a canvas as it is until the next pass is finished."""
        edits_tokens = change.unsettled_BT is not None
        committed_BT = put(torch.zeros_like(holes_BT), change.committed, True)
        edited_BT = put(torch.zeros_like(holes_BT), change.edited, True) if edits_tokens else None
        settled_BT = settled(canvas, holes_BT, change.unsettled_BT)
        return cls(tokens_BT.clone(), holes_BT.clone(), committed_BT, step, edited_BT, settled_BT)

    @property
    def new_BT(self) -> Tensor:
        """Bool, positions whose token this step has filled in or replaced."""
        return self.committed_BT if self.edited_BT is None else self.committed_BT | self.edited_BT


class Launched(NamedTuple):
    """A pass that the device works on.

    Attributes:
        scored: what is scored.
        rated: what comes of it, see ``rate``.
        quotas: as of ``Progress``.
    """

    scored: Scored
    rated: OnItsWay
    quotas: list[int]


class Change(NamedTuple):
    """What a step has done.

    Attributes:
        committed: places that it has filled.
        edited: places whose token it has replaced.
        unsettled_BT: bool, positions that later steps may still edit; None where nothing is edited.
    """

    committed: list[int]
    edited: list[int]
    unsettled_BT: Tensor | None


def settled(canvas: Canvas, holes_BT: Tensor, unsettled_BT: Tensor | None) -> Tensor:
    """Generated tokens with no hole before them, but for those that may be edited, bool [B, T]."""
    settled_BT = canvas.holes_BT & before_hole(holes_BT)
    return settled_BT if unsettled_BT is None else settled_BT & ~unsettled_BT
