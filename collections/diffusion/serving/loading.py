"""What a server says before its model is there."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from nemo_dllm.collections.diffusion.serving.errors import RequestError
from nemo_dllm.collections.diffusion.serving.middleware import ERROR_HEADERS, error_response


@contextmanager
def answering_while_loading(listening: socket.socket) -> Iterator[None]:
    """Answer every request with 503 from another thread; whoever connects as it ends waits for who listens next.

    Args:
        listening: a bound socket, which stays open.
    """
    listening.listen()
    config = uvicorn.Config(_loading, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening.dup()]}, name="loading", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


async def _loading(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["path"] == "/health":
        answer = JSONResponse({"status": "loading", "waiting": 0, "running": 0}, 503, ERROR_HEADERS[503])
    else:
        answer = error_response(RequestError(503, "the model is being loaded; try again later", code="loading"))
    await answer(scope, receive, send)
