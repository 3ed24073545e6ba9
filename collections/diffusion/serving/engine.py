"""The thread that owns the model: rows wait, join those of equal settings, and leave when they are finished.

Shape letters: B rows, T canvas positions.
"""

import logging
import threading
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from nemo_dllm.collections.diffusion.sampling import CachedDenoiser, DenoiserFn, DenoiseStep
from nemo_dllm.collections.diffusion.sampling.stopping import Decode, text_end
from nemo_dllm.collections.diffusion.serving.limits import ServerLimits
from nemo_dllm.collections.diffusion.serving.rolling import Denoising, RollingBatch
from nemo_dllm.collections.diffusion.serving.rows import CanvasRow, Row, RowUpdate

if TYPE_CHECKING:
    from nemo_dllm.collections.diffusion.serving.metrics import ServerMetrics

logger = logging.getLogger(__name__)


class QueueFullError(Exception):
    """There is no room for a request's rows."""


class EngineClosedError(Exception):
    """The engine finishes no more rows.

    Args:
        message: why.
        code: that, in a word.
    """

    def __init__(self, message: str, code: str):
        super().__init__(message)
        self.code = code


class BatchingEngine:
    """Denoises rows side by side, in the order of their arrival.

    A row that is finished or given up leaves before the next pass, and rows of equal settings take its place: at once,
    or with an exact cache where those that run have finished a block.

    Args:
        denoiser: the model; called by the engine's own thread alone.
        mask_token_id: shown to the model at holes.
        device: where canvases live.
        decode: token ids -> text, for stop strings.
        limits: of batches and queue.
        metrics: told about batches and passes; None counts nothing.
    """

    def __init__(
        self,
        denoiser: DenoiserFn | CachedDenoiser,
        *,
        mask_token_id: int,
        device: torch.device | str,
        decode: Decode,
        limits: ServerLimits,
        metrics: "ServerMetrics | None" = None,
    ):
        self._denoising = Denoising(denoiser, mask_token_id, device, decode)
        self._limits, self._metrics = limits, metrics
        self._changed = threading.Condition()
        self._waiting: deque[Row] = deque()
        self._running: list[Row] = []
        self._joining: list[Row] = []
        self._alone: deque[Row] = deque()
        self._batch: RollingBatch | None = None
        self._overtaking = 0
        self._closed: EngineClosedError | None = None
        self._thread = threading.Thread(target=self._work, name="denoiser", daemon=True)

    def start(self) -> None:
        """Begin to work on what is submitted."""
        self._thread.start()

    def close(self) -> None:
        """Give up all rows, and wait for the pass at hand to end."""
        left = self._stop(EngineClosedError("the server is shutting down", "shutting_down"))
        self._thread.join()
        self._refuse(left)

    def _stop(self, reason: EngineClosedError) -> list[Row]:
        """Take no more rows, and give up those that there are, which are returned."""
        with self._changed:
            self._closed = self._closed or reason
            left = [*self._waiting, *self._alone, *self._running]
            self._changed.notify()
        self.cancel(left)
        return left

    def _refuse(self, rows: Sequence[Row]) -> None:
        for row in rows:
            if not row.done:
                self._end_with(row, self._closed)

    @staticmethod
    def _end_with(row: Row, error: Exception) -> None:
        try:
            row.deliver(RowUpdate([], error=error))
        except Exception:
            logger.exception("request %s cannot be told so", row.request_id)
        row.done = True

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
        return sum(row.is_live for row in [*self._running, *self._alone])

    def submit(self, rows: Sequence[Row]) -> None:
        """Queue the rows of a request, all of them or none.

        Raises:
            QueueFullError: there is no room.
            EngineClosedError: after ``close``, or when the device has failed.
        """
        with self._changed:
            if self._closed:
                # A new one: each time that one is raised, it keeps more of who did so.
                raise EngineClosedError(str(self._closed), self._closed.code)
            if len(self._waiting) + len(rows) > self._limits.max_waiting_rows:
                places = self._limits.max_waiting_rows
                fix = "try again later" if len(rows) <= places else f"ask for at most {places} at once"
                raise QueueFullError(
                    f"{len(self._waiting)} of {places} places in the queue are taken, and the request needs "
                    f"{len(rows)}; {fix}"
                )
            self._waiting.extend(rows)
            self._changed.notify()

    def cancel(self, rows: Sequence[Row]) -> None:
        """Give up rows: those that wait leave the queue, those that run leave after the pass at hand."""
        with self._changed:
            for row in rows:
                row.abandoned = True
            self._waiting = deque(row for row in self._waiting if not row.abandoned)

    def _work(self) -> None:
        while self._gather_rows():
            try:
                self._denoise_once()
            except Exception as error:
                if isinstance(error, torch.AcceleratorError) and not self._device_works():
                    logger.critical("the device has failed: restart the server", exc_info=error)
                    reason = EngineClosedError("the device has failed; restart the server", "device_failed")
                    self._refuse(self._stop(reason))
                else:
                    self._fail(error)

    def _device_works(self) -> bool:
        """Most errors of a GPU stay with the process; a kernel that could not be launched does not."""
        try:
            torch.zeros(1, device=self._denoising.device).item()
        except torch.AcceleratorError:
            return False
        return True

    def _gather_rows(self) -> bool:
        """Decide who is in the next pass; False after ``close``."""
        with self._changed:
            self._running = [row for row in self._running if row.is_live]
            if not self._running:
                self._batch, self._joining = None, []
                self._changed.wait_for(lambda: self._waiting or self._alone or self._closed)
            if self._closed:
                return False
            if not self._running and self._alone:
                self._running = self._joining = [self._alone.popleft()]
            elif not self._running:
                self._overtaking = 0
                self._running = self._joining = self._take([])
            elif not self._alone and self._batch.is_open:
                self._joining = self._take(self._running)
                self._running = [*self._running, *self._joining]
            return True

    def _take(self, running: Sequence[Row]) -> list[Row]:
        """Rows that wait and fit to those that run, in the order of their arrival.

        Those behind one that does not fit may overtake it, when a batch begins, and afterwards as many as a batch has
        rows; then the batch runs to its end.
        """
        taken, left = [], deque()
        longest = max((row.length for row in running), default=0)
        for row in self._waiting:
            rows, longest_with = [*running, *taken], max(longest, row.length)
            fits = not rows or (
                row.config == rows[0].config
                and len(rows) < self._limits.max_batch_rows
                and longest_with * (len(rows) + 1) <= self._limits.max_batch_tokens
                and not (running and left and self._overtaking >= self._limits.max_batch_rows)
            )
            if fits:
                taken.append(row)
                longest = longest_with
                self._overtaking += bool(running and left)
            else:
                left.append(row)
        self._waiting = left
        return taken

    def _denoise_once(self) -> None:
        batch, joining, self._joining = self._batch, self._joining, []
        newcomers = RollingBatch(self._denoising, joining) if joining else None
        if batch is None:
            batch = newcomers
        elif newcomers is not None:
            if newcomers.begins_with_all:
                self._pass(newcomers)
            batch = batch.with_live_rows_of(newcomers)
        elif batch.is_open and len(batch.rows) > len(self._running):
            batch = batch.with_live_rows_of()
        self._batch = batch
        if batch is not None:
            if newcomers is not None:
                # Their cache is gone with them.
                del newcomers
                batch.encode_prompts()
            self._pass(batch)

    def _pass(self, batch: RollingBatch) -> None:
        step = batch.step()
        if step is None:
            return
        if self._metrics is not None:
            self._metrics.batch_rows.observe(sum(row.is_live for row in batch.rows))
            self._metrics.passes.inc()
        self._hand_out(step, batch.rows)

    def _fail(self, error: Exception) -> None:
        # Whoever closes the engine meanwhile must find the rows in one place or the other.
        with self._changed:
            # Those that idle, and that were given up during the pass, may be what it failed by.
            together = len({*self._running, *(self._batch.rows if self._batch else ())})
            left = [row for row in self._running if row.is_live]
            self._running, self._batch = [], None
            if together > 1:
                # One row must not take the others with it, and each repeats alone what it has delivered.
                self._alone.extend(left)
        if together > 1:
            logger.warning("a batch of %d rows failed, %d are tried one by one: %r", together, len(left), error)
            return
        for row in left:
            logger.error("a row failed, of request %s", row.request_id, exc_info=error)
            self._end_with(row, error)

    def _hand_out(self, step: DenoiseStep, rows: Sequence[Row]) -> None:
        counts = step.settled_BT.sum(dim=1).tolist()
        due = [
            (index, row, count)
            for index, (row, count) in enumerate(zip(rows, counts, strict=True))
            if row.is_live and (row.wants_canvas or count == row.hole_count or (row.streams and count > row.delivered))
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
            end = text_end(tokens, row.config, row.decode or self._denoising.decode)
            reason = "length" if end is None else "stop"
            row.deliver(RowUpdate(tokens[:end], reason, views.get(index)))
            row.done = True


def _canvas_views(step: DenoiseStep, rows: list[tuple[int, Row]]) -> dict[int, CanvasRow]:
    if not rows:
        return {}
    tensors = [x_BT.cpu() for x_BT in (step.tokens_BT, step.holes_BT, step.new_BT)]
    return {index: CanvasRow(*(x_BT[index, row.holes].tolist() for x_BT in tensors), row.passes) for index, row in rows}
