"""One step of a run: its pass, what it changes, and what is seen of it.

Shape letters: B rows, T canvas positions. A place is a position of the canvas counted row after row.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

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
    rated: Tensor
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
