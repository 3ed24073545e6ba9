"""A server for the model of a checkpoint."""

import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import uvicorn

from nemo_dllm.collections.diffusion.chat_prompts import read_template
from nemo_dllm.collections.diffusion.serving.app import create_app
from nemo_dllm.collections.diffusion.serving.limits import ServerLimits
from nemo_dllm.collections.diffusion.serving.loading import answering_while_loading
from nemo_dllm.collections.diffusion.serving.served_model import ServedModel

LOOPBACK = ("127.0.0.1", "::1", "localhost")
KEY_VARIABLE = "NEMO_DLLM_API_KEY"


def serve(
    path: str | Path,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    best: bool = False,
    name: str | None = None,
    api_key: str | None = None,
    chat_template: str | Path | None = None,
    preset: str | None = None,
    settings: Mapping[str, Any] | None = None,
    max_batch_rows: int = ServerLimits.max_batch_rows,
    max_batch_tokens: int = ServerLimits.max_batch_tokens,
    max_waiting_rows: int = ServerLimits.max_waiting_rows,
    max_rows_per_request: int = ServerLimits.max_rows_per_request,
    max_completion_tokens: int = ServerLimits.max_completion_tokens,
    max_body_bytes: int = ServerLimits.max_body_bytes,
    timeout_seconds: float = ServerLimits.timeout_seconds,
    shutdown_seconds: float = ServerLimits.shutdown_seconds,
) -> None:
    """Serve the model of a checkpoint until the process is told to stop, by SIGTERM or an interrupt.

    What the process holds when the model is there is exempt from garbage collection for good (``gc.freeze``).

    Args:
        path, best: see ``inference.load_checkpoint``.
        host: the address to listen at; the default is for this machine alone.
        port: the port; 0 takes a free one, which is printed.
        name: what clients call the model; None is the name of the folder.
        api_key: what clients have to send; None takes the environment's NEMO_DLLM_API_KEY, and without one lets
            everybody in who reaches the port.
        chat_template: file with a Jinja template in place of the tokenizer's.
        preset: of ``sampling.PRESETS``, for requests that name none; None is the checkpoint's own.
        settings: further fields of ``SamplerConfig``, for requests that name no preset.
        max_batch_rows, max_batch_tokens, max_waiting_rows, max_rows_per_request, max_completion_tokens, max_body_bytes,
            timeout_seconds, shutdown_seconds: see ``ServerLimits``.

    Raises:
        FileNotFoundError, ValueError: there is no checkpoint to sample from, or the settings do not fit it, or
            the port is taken, or no client could send the key.
    """
    of_rows = (max_batch_rows, max_batch_tokens, max_waiting_rows, max_rows_per_request)
    limits = ServerLimits(*of_rows, max_completion_tokens, max_body_bytes, timeout_seconds, shutdown_seconds)
    template, key = read_template(chat_template), _api_key(api_key)
    # Before what takes a while.
    listening = _listen(host, port)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    with answering_while_loading(listening):
        from nemo_dllm.collections.diffusion.inference import load_checkpoint

        loaded = load_checkpoint(path, best=best)
        name = name or Path(path).resolve().name
        model = ServedModel(loaded, name, preset=preset, settings=settings, chat_template=template)
    run_until_stopped(model, limits, key, listening, host)


def run_until_stopped(
    model: ServedModel, limits: ServerLimits, api_key: str | None, listening: socket.socket, host: str
) -> None:
    """Serve until SIGTERM or an interrupt, and then until what runs is finished, or its time for that is over.

    Args:
        model, limits, api_key: see ``create_app``.
        listening: a bound socket.
        host: to show.
    """
    if host not in LOOPBACK and api_key is None:
        print(f"note: {host} is open to others; set an API key ({KEY_VARIABLE})", file=sys.stderr)
    listening.listen()
    shown = f"[{host}]" if ":" in host else host
    config = uvicorn.Config(
        create_app(model, limits, api_key=api_key),
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=limits.shutdown_seconds,
    )
    # What is there now stays. Garbage would be looked for in all of it else, for seconds, while every request waits.
    gc.collect()
    gc.freeze()
    # uvicorn ends open requests, and then passes the signal on.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        # Whoever reads this may stop the process at once.
        print(f"serving {model.name} at http://{shown}:{listening.getsockname()[1]} (API under /v1)", flush=True)
        uvicorn.Server(config).run(sockets=[listening])


def _api_key(given: str | None) -> str | None:
    """The key that clients have to send; an empty one that is given would let everybody in, who was to be kept out."""
    name, key = ("api_key", given) if given is not None else (KEY_VARIABLE, os.environ.get(KEY_VARIABLE) or None)
    if key is not None and (not key or key != key.strip() or not (key.isascii() and key.isprintable())):
        # The key itself is not for logs.
        raise ValueError(
            f"{name} is empty, or holds what no header can: white space at its ends, control characters or letters "
            "beyond ASCII; choose another, or leave it out to let everybody in"
        )
    return key


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except (OSError, OverflowError) as error:
        raise ValueError(f"port={port} of host={host} cannot be used ({error}); choose others") from error
    return listening
