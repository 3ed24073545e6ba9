"""The completions of one request as they come, on the event loop."""

import asyncio
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, NamedTuple

from nemo_dllm.collections.diffusion.sampling import canvas_pieces
from nemo_dllm.collections.diffusion.sampling.stopping import Decode
from nemo_dllm.collections.diffusion.serving.engine import BatchingEngine, EngineClosedError, QueueFullError
from nemo_dllm.collections.diffusion.serving.errors import RequestError
from nemo_dllm.collections.diffusion.serving.metrics import ROW_ENDS, ServerMetrics
from nemo_dllm.collections.diffusion.serving.plan import Plan
from nemo_dllm.collections.diffusion.serving.rows import CanvasRow, Row, RowUpdate
from nemo_dllm.collections.diffusion.serving.text_stream import TextStream

# Updates that a client has left unread, after which it gets no canvas, or one that never reads would fill the memory.
MAX_BACKLOG = 256


class ClientGoneError(Exception):
    """Nobody reads the answer any more."""


class ChoiceUpdate(NamedTuple):
    """News of one completion.

    Attributes:
        index: of the choice.
        text: what has become certain since the last update.
        finish_reason: "stop", "length" or "error" in the last update of the choice, else None.
        tokens: generated so far that are certain.
        canvas: what the row looks like after a denoising step, for requests that ask.
        error: why the choice has failed, where it has.
    """

    index: int
    text: str
    finish_reason: str | None
    tokens: int
    canvas: dict[str, Any] | None = None
    error: RequestError | None = None


class Answer:
    """Queues the rows of a request, and yields what becomes of them.

    Args:
        plan: what to make.
        streams, canvas: whether to hand out text, and the canvas, before a choice is finished.
        engine: does the work.
        decode: token ids -> text.
        timeout: seconds until the request fails.
        metrics: told about what is finished.
        request_id: what the log calls the request.

    Raises:
        RequestError: the queue is full (429), or the server shuts down (503).
    """

    def __init__(
        self,
        plan: Plan,
        *,
        streams: bool,
        canvas: bool,
        engine: BatchingEngine,
        decode: Decode,
        timeout: float,
        metrics: ServerMetrics,
        request_id: str,
    ):
        self._loop = asyncio.get_running_loop()
        self._arrival, self._timeout, self._metrics = time.monotonic(), timeout, metrics
        self._deadline = self._loop.time() + timeout
        self._has_text, self._has_finished, self._request_id = False, False, request_id
        self._updates: asyncio.Queue[ChoiceUpdate | ClientGoneError] = asyncio.Queue()
        self._decode, self._engine = decode, engine
        self._is_closed = False
        # Counted on the engine's thread, and on the event loop.
        self._handed_out, self._read = 0, 0
        self._rows = []
        for index, choice in enumerate(plan.choices):
            context = choice.prompt[len(choice.prompt) - min(plan.context_tokens, len(choice.prompt)) :]
            stream = TextStream(decode, context, plan.stops)
            deliver = partial(self._receive, index, stream)
            fixed = (plan.config, plan.seed, choice.row_id, deliver, streams, canvas, request_id, stream.text)
            self._rows.append(Row(choice.prompt, plan.suffix, choice.hole_count, *fixed))
        try:
            engine.submit(self._rows)
        except QueueFullError as error:
            raise RequestError(429, str(error), code="queue_full") from error
        except EngineClosedError as error:
            raise RequestError(503, str(error), code=error.code) from error
        self._unfinished = set(range(len(self._rows)))
        metrics.prompt_tokens.inc(plan.prompt_tokens)

    def give_up(self) -> None:
        """Free what the request holds, because its client is gone."""
        self._close()
        self._updates.put_nowait(ClientGoneError())

    async def updates(self) -> AsyncIterator[ChoiceUpdate]:
        """All news, until every choice is finished or has failed; rows are given up when the iteration ends early.

        Raises:
            RequestError: no choice was finished, because time is up (504), or all have failed.
            ClientGoneError: after ``give_up``.
        """
        try:
            while self._unfinished:
                for update in await self._news():
                    self._count(update)
                    if update.error is not None and not (self._unfinished or self._has_finished):
                        raise update.error
                    yield update
        finally:
            self._close()
        self._metrics.request_seconds.observe(time.monotonic() - self._arrival)

    async def _news(self) -> list[ChoiceUpdate]:
        """The next update, or the failure of all choices that time leaves unfinished."""
        try:
            async with asyncio.timeout_at(self._deadline):
                update = await self._updates.get()
        except TimeoutError:
            self._engine.cancel(self._rows)
            error = RequestError(504, f"no answer within {self._timeout:g} s", code="timeout")
            return [_failed(index, error) for index in sorted(self._unfinished)]
        self._read += 1
        if isinstance(update, ClientGoneError):
            raise update
        return [update]

    def _close(self) -> None:
        """Once: an answer that its client leaves before it begins is given up, and never iterated."""
        if not self._is_closed:
            self._is_closed = True
            self._engine.cancel(self._rows)
            self._metrics.rows.labels("cancelled").inc(len(self._unfinished))

    def _count(self, update: ChoiceUpdate) -> None:
        if update.text and not self._has_text:
            self._has_text = True
            self._metrics.first_text_seconds.observe(time.monotonic() - self._arrival)
        if update.finish_reason is None:
            return
        self._unfinished.remove(update.index)
        self._metrics.completion_tokens.inc(update.tokens)
        if update.error is None:
            self._has_finished = True
            self._metrics.rows.labels(update.finish_reason).inc()
        else:
            self._metrics.rows.labels(update.error.code if update.error.code in ROW_ENDS else "failed").inc()

    def _receive(self, index: int, stream: TextStream, update: RowUpdate) -> None:
        """On the engine's thread."""
        if update.error is not None:
            news = _failed(index, _as_request_error(update.error, self._request_id))
        else:
            text = stream.push(update.tokens, last=update.finish_reason is not None)
            shown = update.canvas is not None and (update.finish_reason or self._handed_out - self._read < MAX_BACKLOG)
            canvas = self._canvas(update.canvas) if shown else None
            if not (text or canvas or update.finish_reason):
                return
            news = ChoiceUpdate(index, text, update.finish_reason, len(update.tokens), canvas)
        self._handed_out += 1
        self._loop.call_soon_threadsafe(self._updates.put_nowait, news)

    def _canvas(self, row: CanvasRow) -> dict[str, Any]:
        pieces = canvas_pieces(row.tokens, row.holes, row.new, self._decode)
        return {
            "step": row.step,
            "masked": sum(row.holes),
            "pieces": [{"text": text, "kind": kind} for text, kind in pieces],
        }


def _failed(index: int, error: RequestError) -> ChoiceUpdate:
    return ChoiceUpdate(index, "", "error", 0, error=error)


def _as_request_error(error: Exception, request_id: str) -> RequestError:
    if isinstance(error, EngineClosedError):
        return RequestError(503, str(error), code=error.code)
    # Settings have been checked before, so that even a ValueError is no fault of the request.
    return RequestError(500, f"the model failed; the server's log says how, under {request_id}", code="model_failed")
