"""The web application: OpenAI's endpoints over one model."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

from nemo_dllm.collections.diffusion.sampling import PRESETS
from nemo_dllm.collections.diffusion.serving.answer import Answer, ClientGoneError
from nemo_dllm.collections.diffusion.serving.engine import BatchingEngine
from nemo_dllm.collections.diffusion.serving.errors import RequestError, of_http, of_validation
from nemo_dllm.collections.diffusion.serving.formats import (
    CHAT,
    COMPLETION,
    DONE,
    AnswerShape,
    AnswerWriter,
    FinishedChoice,
    event,
)
from nemo_dllm.collections.diffusion.serving.limits import ServerLimits
from nemo_dllm.collections.diffusion.serving.metrics import ServerMetrics
from nemo_dllm.collections.diffusion.serving.middleware import (
    CountRequests,
    HeadAsGet,
    IdentifyRequests,
    LimitBody,
    RequireKey,
    error_response,
)
from nemo_dllm.collections.diffusion.serving.plan import Plan, Planner
from nemo_dllm.collections.diffusion.serving.requests import ChatRequest, CompletionRequest, request_sampler_fields
from nemo_dllm.collections.diffusion.serving.served_model import ServedModel

PAGE = Path(__file__).with_name("page.html")
# The page asks nobody but this server.
PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"

_NO_PROXY_BUFFER = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class Endpoints:
    """Answers requests with a model.

    Args:
        model: what is served.
        limits: of the server.
        engine: denoises rows of ``model``.
        metrics: told about what is done.
    """

    def __init__(self, model: ServedModel, limits: ServerLimits, engine: BatchingEngine, metrics: ServerMetrics):
        self._model, self._limits, self._engine, self._metrics = model, limits, engine, metrics
        self._planner = Planner(model, limits)
        # Tokenizers are not all safe to use from several threads, and long texts would hold up the event loop.
        self._texts = ThreadPoolExecutor(1, "texts")

    async def completion(self, body: CompletionRequest, request: Request) -> Response:
        """Continue texts, or fill in what is between two."""
        return await self._answer(body, request, self._planner.completion, COMPLETION)

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await self._answer(body, request, self._planner.chat, CHAT)

    async def _answer(
        self,
        body: CompletionRequest | ChatRequest,
        request: Request,
        plan_of: Callable[[Any], Plan],
        shape: AnswerShape,
    ) -> Response:
        if body.model not in (None, self._model.name):
            message = f"the model {body.model!r} does not exist; this server has {self._model.name!r}"
            raise RequestError(404, message, "model", "model_not_found")
        plan = await asyncio.get_running_loop().run_in_executor(self._texts, plan_of, body)
        answer = Answer(
            plan,
            streams=bool(body.stream),
            canvas=body.canvas,
            engine=self._engine,
            decode=self._model.loaded.decode,
            timeout=self._limits.timeout_seconds,
            metrics=self._metrics,
            request_id=request.state.request_id,
        )
        watch = asyncio.create_task(_give_up_when_gone(answer, request))
        writer = AnswerWriter(shape, self._model.name)
        if body.stream:
            counts = body.stream_options is not None and body.stream_options.include_usage
            events = _events(answer, writer, plan, counts, watch)
            return StreamingResponse(events, media_type="text/event-stream", headers=_NO_PROXY_BUFFER)
        try:
            return JSONResponse(writer.whole(await _finished(answer, len(plan.choices)), plan.prompt_tokens))
        except ClientGoneError:
            return Response(status_code=499)
        finally:
            watch.cancel()

    def models(self) -> dict[str, Any]:
        """The list of models, with the one that there is."""
        return {"object": "list", "data": [self.model(self._model.name)]}

    def model(self, name: str) -> dict[str, Any]:
        """The model, with what it is sampled with by default.

        Raises:
            RequestError: it has another name.
        """
        if name != self._model.name:
            raise RequestError(404, f"the model {name!r} does not exist", "model", "model_not_found")
        limits = {"max_length": self._model.max_length, "max_completion_tokens": self._limits.max_completion_tokens}
        return {"id": name, "object": "model", "created": 0, "owned_by": "nemo-dllm", **limits}

    def settings(self) -> dict[str, Any]:
        """What requests may say beside OpenAI's fields, for interfaces such as the page."""
        default = self._model.default_config
        fields = [
            {"name": field.name, "type": getattr(field.type, "__name__", str(field.type)), "help": field.help}
            | {"default": getattr(default, field.name)}
            for field in request_sampler_fields().values()
        ]
        return {"model": self._model.name, "presets": sorted(PRESETS), "fields": fields}

    def health(self) -> JSONResponse:
        """Whether somebody works on requests, and on how many."""
        body = {"waiting": self._engine.waiting, "running": self._engine.running}
        if self._engine.is_alive:
            return JSONResponse({"status": "ok", **body})
        return JSONResponse({"status": "down", **body}, 503)


async def _give_up_when_gone(answer: Answer, request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    answer.give_up()


async def _finished(answer: Answer, choices: int) -> list[FinishedChoice]:
    texts, ends = [""] * choices, [None] * choices
    async for update in answer.updates():
        texts[update.index] += update.text
        ends[update.index] = update
    return [
        FinishedChoice(text, end.finish_reason, end.tokens, end.error) for text, end in zip(texts, ends, strict=True)
    ]


async def _events(
    answer: Answer, writer: AnswerWriter, plan: Plan, counts: bool, watch: asyncio.Task
) -> AsyncIterator[bytes]:
    completion_tokens = 0
    try:
        yield writer.opening(len(plan.choices))
        async for update in answer.updates():
            completion_tokens += update.tokens if update.finish_reason else 0
            yield writer.update(update)
        if counts:
            yield writer.counts(plan.prompt_tokens, completion_tokens)
        yield DONE
    except RequestError as error:
        # The status has gone out already.
        yield event(error.body())
    except ClientGoneError:
        pass
    finally:
        watch.cancel()


def create_app(model: ServedModel, limits: ServerLimits, *, api_key: str | None = None) -> FastAPI:
    """The application; its engine works while it runs.

    Args:
        model: what is served.
        limits: of requests, batches and the queue.
        api_key: what clients have to send; None lets everybody in.
    """
    metrics = ServerMetrics()
    loaded = model.loaded
    fixed = {"mask_token_id": loaded.mask_token_id, "device": loaded.device, "decode": loaded.decode}
    engine = BatchingEngine(loaded.denoiser, **fixed, limits=limits, metrics=metrics)
    metrics.watch("waiting_rows", "Rows in the queue.", lambda: engine.waiting)
    metrics.watch("running_rows", "Rows of the batch at hand.", lambda: engine.running)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        await asyncio.to_thread(engine.close)

    # The documentation pages of FastAPI load scripts from elsewhere.
    app = FastAPI(title="nemo-dllm", lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False)
    _add_routes(app, Endpoints(model, limits, engine, metrics), metrics)
    _add_error_handlers(app)
    app.add_middleware(HeadAsGet)
    app.add_middleware(LimitBody, max_bytes=limits.max_body_bytes)
    if api_key is not None:
        app.add_middleware(RequireKey, api_key=api_key)
    app.add_middleware(IdentifyRequests)
    paths = {route.path for route in app.routes}
    app.add_middleware(CountRequests, metrics=metrics, paths=paths)
    return app


def _add_routes(app: FastAPI, endpoints: Endpoints, metrics: ServerMetrics) -> None:
    app.post("/v1/completions")(endpoints.completion)
    app.post("/v1/chat/completions")(endpoints.chat)
    app.get("/v1/models")(endpoints.models)
    app.get("/v1/models/{name:path}")(endpoints.model)
    app.get("/v1/settings")(endpoints.settings)
    app.get("/health")(endpoints.health)

    @app.get("/metrics")
    def prometheus() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/", include_in_schema=False)
    def page() -> HTMLResponse:
        return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers={"Content-Security-Policy": PAGE_POLICY})


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(RequestError)
    async def refused(_: Request, error: RequestError) -> JSONResponse:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return error_response(of_validation(error.errors(), request.headers.get("content-type", "")))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        headers = error.headers or {}
        about = (str(error.detail), request.method, request.url.path, headers.get("Allow", ""))
        return error_response(of_http(error.status_code, *about), headers)
