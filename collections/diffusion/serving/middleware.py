"""What happens to a request before an endpoint sees it: counted, named, let in by its key, and read up to a size."""

import asyncio
import hmac
import logging
import uuid
from collections.abc import Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nemo_dllm.collections.diffusion.serving.errors import RequestError
from nemo_dllm.collections.diffusion.serving.metrics import ServerMetrics

logger = logging.getLogger(__name__)

# Seconds for the body of a request to arrive.
BODY_SECONDS = 30.0
# What goes with a status; a client may try again after so many seconds.
ERROR_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}, 503: {"Retry-After": "5"}}


class CountRequests:
    """Counts requests by path and status; unknown paths are one, or anybody could fill the memory with them."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, paths: set[str]):
        self._app, self._metrics, self._paths = app, metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        path = scope["path"] if scope["path"] in self._paths else "other"

        async def count(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.requests.labels(path, message["status"]).inc()
            await send(message)

        await self._app(scope, receive, count)


class HeadAsGet:
    """Answers HEAD, which load balancers ask with, wherever GET is answered; the server leaves the body out."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)


class IdentifyRequests:
    """Gives every request an id, which its answer and the log have in common, and logs what fails unforeseen.

    The id is ``request.state.request_id`` and the header ``X-Request-Id``, where OpenAI's clients look for it.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req_{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id
        begun = False

        async def send_with_id(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            logger.error("request %s failed", request_id, exc_info=error)
            if begun:
                # Half an answer must not look like a whole one.
                raise
            message = f"the server failed; its log says how, under {request_id}"
            await error_response(RequestError(500, message, code="server_failed"))(scope, receive, send_with_id)


class RequireKey:
    """Lets requests to paths under /v1/ in by their key, as OpenAI's clients send it."""

    def __init__(self, app: ASGIApp, api_key: str):
        self._app, self._expected = app, api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/v1/"):
            scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
            if not hmac.compare_digest(given.strip(" ").encode(), self._expected) or scheme.lower() != "bearer":
                error = RequestError(401, "the API key is missing or wrong", code="invalid_api_key")
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class LimitBody:
    """Reads bodies before anything else does, up to a size and within a time."""

    def __init__(self, app: ASGIApp, max_bytes: int):
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await self._read(Headers(scope=scope), receive)
        except TimeoutError:
            await error_response(RequestError(408, "the body did not arrive", code="timeout"))(scope, receive, send)
            return
        except RequestError as error:
            await error_response(error)(scope, receive, send)
            return
        if body is None:
            return
        first = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return first.pop() if first else await receive()

        await self._app(scope, replay, send)

    async def _read(self, headers: Headers, receive: Receive) -> bytes | None:
        """The body; None when the client has gone."""
        announced = headers.get("content-length", "0")
        size = int(announced) if announced.isdecimal() else 0
        parts, more = [], True
        while size <= self._max_bytes:
            if not more:
                return b"".join(parts)
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size, more = max(size, sum(map(len, parts))), message.get("more_body", False)
        message = f"the body is larger than the {self._max_bytes} bytes of this server"
        raise RequestError(413, message, code="body_too_large")


def error_response(error: RequestError, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """The answer to a request that cannot be met, with further headers."""
    return JSONResponse(error.body(), error.status, {**ERROR_HEADERS.get(error.status, {}), **(headers or {})})
