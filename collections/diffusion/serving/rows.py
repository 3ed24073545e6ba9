"""What the engine works on: rows of a request, and what becomes of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from nemo_dllm.collections.diffusion.sampling import SamplerConfig
from nemo_dllm.collections.diffusion.sampling.stopping import Decode

# The loop does not read how many tokens are new, so that rows of different lengths share a batch.
_ANY_LENGTH = 2**31 - 1


class CanvasRow(NamedTuple):
    """The generated part of a row after a pass, one entry per token.

    Attributes:
        tokens: ids; those under holes are the mask token.
        holes: still to be found.
        new: found or replaced by this pass.
        step: passes so far.
    """

    tokens: list[int]
    holes: list[bool]
    new: list[bool]
    step: int


class RowUpdate(NamedTuple):
    """What has become of a row.

    Attributes:
        tokens: generated ones that stay as they are, with no hole before them; each update repeats the earlier ones.
        finish_reason: "stop" or "length" in the last update, else None.
        canvas: for rows that want it.
        error: why there will be no further update.
    """

    tokens: list[int]
    finish_reason: str | None = None
    canvas: CanvasRow | None = None
    error: Exception | None = None


@dataclass(eq=False)
class Row:
    """A text to fill.

    Attributes:
        prefix, suffix: token ids before and after the holes.
        hole_count: tokens to find, at least 1.
        config: how; rows with equal settings are batched, whatever their seeds and lengths.
        seed, row_id: key the row's noise.
        deliver: gets the updates, on the engine's thread.
        streams: whether to deliver tokens before the last one is found.
        wants_canvas: whether to deliver the canvas of every pass.
        request_id: what the log calls the row's request.
        decode: generated ids -> their text behind the prefix, which stop strings are looked for in; None takes the
            engine's, which knows no prefix.
        abandoned: set by ``BatchingEngine.cancel``.
        done: set by the engine after the last update.
        delivered: tokens that updates have had so far.
        passes: that the row has been in.
    """

    prefix: Sequence[int]
    suffix: Sequence[int]
    hole_count: int
    config: SamplerConfig
    seed: int
    row_id: int
    deliver: Callable[[RowUpdate], None]
    streams: bool = False
    wants_canvas: bool = False
    request_id: str = ""
    decode: Decode | None = None
    abandoned: bool = False
    done: bool = False
    delivered: int = field(default=0, init=False)
    passes: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.config = replace(self.config, seed=None, max_new_tokens=_ANY_LENGTH)

    @property
    def length(self) -> int:
        """Positions of the canvas."""
        return len(self.prefix) + self.hole_count + len(self.suffix)

    @property
    def holes(self) -> slice:
        """Where the generated tokens are."""
        return slice(len(self.prefix), len(self.prefix) + self.hole_count)

    @property
    def is_live(self) -> bool:
        """Whether somebody waits for what is still to come."""
        return not (self.done or self.abandoned)
