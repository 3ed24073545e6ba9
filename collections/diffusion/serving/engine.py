"""The thread that owns the model: rows wait, are put together by their settings, and are denoised side by side.

Shape letters: B rows, T canvas positions.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nemo_dllm.collections.diffusion.sampling import CachedDenoiser, DenoiserFn, DenoiseStep, SamplerConfig, denoise
from nemo_dllm.collections.diffusion.sampling.stopping import Decode, text_end
from nemo_dllm.collections.diffusion.serving.limits import ServerLimits
from nemo_dllm.collections.diffusion.serving.metrics import ServerMetrics

logger = logging.getLogger(__name__)

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
        abandoned: set by ``BatchingEngine.cancel``.
        done: set by the engine after the last update.
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
    abandoned: bool = False
    done: bool = False
    delivered: int = field(default=0, init=False)

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


class QueueFullError(Exception):
    """There is no room for a request's rows."""


class EngineClosedError(Exception):
    """The server is shutting down."""


class BatchingEngine:
    """Denoises rows in batches, in the order of their arrival. What arrives while a batch runs is batched next.

    Args:
        denoiser: the model; called by the engine's own thread alone.
        mask_token_id: shown to the model at holes.
        device: where canvases live.
        decode: token ids -> text, for stop strings.
        limits: of batches and queue.
        metrics: told about batches and passes.
    """

    def __init__(
        self,
        denoiser: DenoiserFn | CachedDenoiser,
        *,
        mask_token_id: int,
        device: torch.device | str,
        decode: Decode,
        limits: ServerLimits,
        metrics: ServerMetrics,
    ):
        self._denoiser, self._mask_token_id, self._device = denoiser, mask_token_id, device
        self._decode, self._limits, self._metrics = decode, limits, metrics
        self._changed = threading.Condition()
        self._waiting: deque[Row] = deque()
        self._running: list[Row] = []
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="denoiser", daemon=True)

    def start(self) -> None:
        """Begin to work on what is submitted."""
        self._thread.start()

    def close(self) -> None:
        """Give up all rows, and wait for the pass at hand to end."""
        with self._changed:
            self._closed = True
            left = [*self._waiting, *self._running]
            self._changed.notify()
        self.cancel(left)
        self._thread.join()
        for row in left:
            if not row.done:
                row.deliver(RowUpdate([], error=EngineClosedError("the server is shutting down")))

    @property
    def is_alive(self) -> bool:
        """Whether anybody works on the rows."""
        return self._thread.is_alive()

    @property
    def waiting(self) -> int:
        """Rows in the queue."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Rows of the batch at hand that somebody waits for."""
        return sum(not (row.done or row.abandoned) for row in self._running)

    def submit(self, rows: Sequence[Row]) -> None:
        """Queue the rows of a request, all of them or none.

        Raises:
            QueueFullError: there is no room.
            EngineClosedError: after ``close``.
        """
        with self._changed:
            if self._closed:
                raise EngineClosedError("the server is shutting down")
            if len(self._waiting) + len(rows) > self._limits.max_waiting_rows:
                raise QueueFullError(
                    f"{len(self._waiting)} of {self._limits.max_waiting_rows} places in the queue are taken, and the "
                    f"request needs {len(rows)}; try again later"
                )
            self._waiting.extend(rows)
            self._changed.notify()

    def cancel(self, rows: Sequence[Row]) -> None:
        """Give up rows: those that wait leave the queue, those that run are left as they are after the pass at hand."""
        with self._changed:
            for row in rows:
                row.abandoned = True
            self._waiting = deque(row for row in self._waiting if not row.abandoned)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._running = []
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                self._running = self._take_batch()
            self._run(self._running)

    def _take_batch(self) -> list[Row]:
        """The first row that waits, and those behind it that fit."""
        first = self._waiting[0]
        batch, left, longest = [], deque(), 0
        for row in self._waiting:
            longest_with = max(longest, row.length)
            fits = not batch or (
                row.config == first.config
                and len(batch) < self._limits.max_batch_rows
                and longest_with * (len(batch) + 1) <= self._limits.max_batch_tokens
            )
            (batch if fits else left).append(row)
            longest = longest_with if fits else longest
        self._waiting = left
        return batch

    def _run(self, rows: list[Row]) -> None:
        try:
            self._denoise(rows)
        except Exception as error:
            left = [row for row in rows if not (row.done or row.abandoned)]
            if len(rows) > 1:
                logger.warning("a batch of %d rows failed, which are tried one by one: %r", len(rows), error)
                # One row must not take the others with it, and each repeats alone what it has delivered.
                for row in left:
                    self._run([row])
                return
            logger.exception("a row failed")
            for row in left:
                self._finish(row, RowUpdate([], error=error))

    def _denoise(self, rows: list[Row]) -> None:
        self._metrics.batch_rows.observe(len(rows))
        steps = denoise(
            self._denoiser,
            *self._canvas(rows),
            row_ids=[row.row_id for row in rows],
            seeds=[row.seed for row in rows],
            decode=self._decode,
            abandoned=lambda: [row.abandoned or row.done for row in rows],
        )
        for step in steps:
            self._metrics.passes.inc()
            self._hand_out(step, rows)

    def _canvas(self, rows: list[Row]) -> tuple[Tensor, Tensor, int, SamplerConfig, Tensor | None]:
        """Rows aligned on the left; what ``denoise`` takes from its canvas to its key mask."""
        texts = [[*row.prefix, *[self._mask_token_id] * row.hole_count, *row.suffix] for row in rows]
        tensors = [torch.tensor(text, dtype=torch.int64, device=self._device) for text in texts]
        canvas_BT = pad_sequence(tensors, batch_first=True, padding_value=self._mask_token_id)
        holes_BT = torch.zeros_like(canvas_BT, dtype=torch.bool)
        for row, holes_T in zip(rows, holes_BT, strict=True):
            holes_T[row.holes] = True
        lengths_B1 = torch.tensor([[row.length] for row in rows], device=self._device)
        keys_BT = torch.arange(canvas_BT.shape[1], device=self._device) < lengths_B1
        # A mask that hides nothing would only keep attention off its fast path.
        return canvas_BT, holes_BT, self._mask_token_id, rows[0].config, None if keys_BT.all() else keys_BT

    def _hand_out(self, step: DenoiseStep, rows: list[Row]) -> None:
        counts = step.settled_BT.sum(dim=1).tolist()
        due = [
            (index, row, count)
            for index, (row, count) in enumerate(zip(rows, counts, strict=True))
            if not (row.done or row.abandoned)
            and (row.wants_canvas or count == row.hole_count or (row.streams and count > row.delivered))
        ]
        if not due:
            return
        tokens_BT = step.tokens_BT.cpu()
        views = _canvas_views(step, [(index, row) for index, row, _ in due if row.wants_canvas])
        for index, row, count in due:
            tokens = tokens_BT[index, row.holes].tolist()[:count]
            row.delivered = count
            if count < row.hole_count:
                row.deliver(RowUpdate(tokens, canvas=views.get(index)))
                continue
            end = text_end(tokens, row.config, self._decode)
            reason = "length" if end is None else "stop"
            self._finish(row, RowUpdate(tokens[:end], reason, views.get(index)))

    def _finish(self, row: Row, update: RowUpdate) -> None:
        row.deliver(update)
        row.done = True


def _canvas_views(step: DenoiseStep, rows: list[tuple[int, Row]]) -> dict[int, CanvasRow]:
    if not rows:
        return {}
    tensors = [x_BT.cpu() for x_BT in (step.tokens_BT, step.holes_BT, step.new_BT)]
    return {index: CanvasRow(*(x_BT[index, row.holes].tolist() for x_BT in tensors), step.step) for index, row in rows}
