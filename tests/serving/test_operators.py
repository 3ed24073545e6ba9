"""What operators, load balancers and slow clients see of a server."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from nemo_dllm.collections.diffusion.serving import answer, serve
from nemo_dllm.collections.diffusion.serving.engine import BatchingEngine
from nemo_dllm.collections.diffusion.serving.limits import ServerLimits
from nemo_dllm.collections.diffusion.serving.metrics import ServerMetrics
from nemo_dllm.collections.diffusion.serving.plan import Planner
from nemo_dllm.collections.diffusion.serving.requests import CompletionRequest
from nemo_dllm.collections.diffusion.serving.served_model import ServedModel

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.mark.parametrize("path", ["/health", "/metrics", "/", "/v1/models", "/v1/models/toy", "/v1/settings"])
def test_head_is_get_without_its_body(server, path):
    asked, got = httpx.head(server.url + path), httpx.get(server.url + path)
    assert (asked.status_code, asked.content) == (200, b"") and got.content
    assert asked.headers["content-type"] == got.headers["content-type"]


@pytest.mark.parametrize(
    "method, path, allowed", [("OPTIONS", COMPLETIONS, "POST"), ("HEAD", CHAT, "POST"), ("PUT", "/health", "GET")]
)
def test_a_method_that_a_path_does_not_have_names_those_that_it_has(server, method, path, allowed):
    response = httpx.request(method, server.url + path)
    assert (response.status_code, response.headers["allow"]) == (405, allowed)
    assert (
        method == "HEAD" or response.json()["error"]["message"] == f"{method} {path} is no endpoint; ask with {allowed}"
    )


def test_a_path_with_a_slash_too_many_is_no_redirect(server):
    response = server.post(COMPLETIONS + "/", {"prompt": "a"}, headers={"Host": "elsewhere"})
    assert response.status_code == 404 and "elsewhere" not in str(response.headers) + response.text


def test_who_has_no_key_is_told_how_to_give_one(kit):
    with kit.running(kit.ToyModel(), api_key="sesame") as server:
        for method in ("GET", "HEAD"):
            response = httpx.request(method, f"{server.url}/v1/models")
            assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")


@pytest.mark.parametrize("scheme", ["Bearer ", "bearer ", "BEARER  "])
def test_the_scheme_before_a_key_may_be_written_in_any_way(kit, scheme):
    with kit.running(kit.ToyModel(), api_key="sesame") as server:
        for key, status in (("sesame", 200), ("SESAME", 401)):
            response = httpx.get(f"{server.url}/v1/models", headers={"Authorization": scheme + key})
            assert response.status_code == status


@pytest.mark.parametrize("key", ["", " ", "open sesame\n", "s\u00e9same", "ses\x01ame"])
def test_a_key_that_no_client_can_send_is_told_at_once(key, monkeypatch):
    with pytest.raises(ValueError, match="^api_key is empty, or holds what no header can") as told:
        serve("no checkpoint", port=-1, api_key=key)
    assert not key.strip() or key.strip() not in str(told.value)
    monkeypatch.setenv("NEMO_DLLM_API_KEY", key)
    # An empty variable is none, and the port is looked at next.
    with pytest.raises(ValueError, match="^NEMO_DLLM_API_KEY is empty" if key else "^port=-1"):
        serve("no checkpoint", port=-1)


def test_a_request_that_no_queue_takes_says_so(kit):
    with kit.running(kit.ToyModel(), ServerLimits(max_waiting_rows=2)) as server:
        response = server.post(COMPLETIONS, {"prompt": "a", "n": 3})
        assert response.status_code == 429
        assert (
            "0 of 2 places in the queue are taken, and the request needs 3; ask for at most 2 at once" in response.text
        )


@pytest.fixture
def answer_of(kit):
    """What an engine of a toy makes of a request: the answer, the engine and the metrics, within an event loop."""
    engines = []

    def make(**body):
        model, limits, metrics = kit.ToyModel(), ServerLimits(), ServerMetrics()
        fixed = {"device": "cpu", "decode": model.decode, "limits": limits, "metrics": metrics}
        engine = BatchingEngine(model.denoiser, mask_token_id=kit.MASK, **fixed)
        plan = Planner(ServedModel(model, "toy"), limits).completion(CompletionRequest(**body))
        given = {"engine": engine, "decode": model.decode, "timeout": 300, "metrics": metrics, "request_id": "req_1"}
        engine.start()
        engines.append(engine)
        return answer.Answer(plan, streams=True, canvas=True, **given), engine, metrics

    yield make
    for engine in engines:
        engine.close()


def test_what_a_client_does_not_read_fills_no_memory(kit, answer_of, monkeypatch):
    monkeypatch.setattr(answer, "MAX_BACKLOG", 8)

    async def read_late():
        begun, engine, metrics = answer_of(prompt="a", max_tokens=100, block_size=10)
        last = "nemo_dllm_forward_passes_total 100.0"
        await asyncio.to_thread(kit.until, lambda: last in metrics.text().decode() and engine.running == 0)
        return [update async for update in begun.updates()]

    updates = asyncio.run(read_late())
    views = [update.canvas for update in updates if update.canvas]
    assert [(view["step"], view["masked"]) for view in views] == [(step, 100 - step) for step in (*range(1, 9), 100)]
    text = "".join(update.text for update in updates)
    assert text == "".join(piece["text"] for piece in views[-1]["pieces"]) and updates[-1].finish_reason == "length"


def test_an_answer_that_is_given_up_before_it_begins_is_counted_once(answer_of):
    async def leave():
        begun, engine, metrics = answer_of(prompt="a", n=2, max_tokens=400)
        begun.give_up()
        with pytest.raises(answer.ClientGoneError):
            await anext(begun.updates())
        return engine, metrics

    engine, metrics = asyncio.run(leave())
    assert (engine.waiting, engine.running) == (0, 0)
    assert 'nemo_dllm_rows_total{finish_reason="cancelled"} 2.0' in metrics.text().decode()


def test_different_settings_and_equal_seeds_side_by_side(kit, server):
    """Each is what it is alone, in whatever batch it rides."""
    requests = [
        {"prompt": prompt, "seed": 7, "temperature": 1.0, "max_tokens": 12, **settings}
        for prompt in ("a", "bc", "a" * 30)
        for settings in (
            {},
            {"block_size": 4},
            {"block_size": 4, "threshold": 0.2},
            {"top_k": 5},
            {"remasking": "random"},
        )
    ]
    texts = lambda response: [choice["text"] for choice in response.json()["choices"]]  # noqa: E731
    alone = [texts(server.post(COMPLETIONS, request)) for request in requests]
    with ThreadPoolExecutor(16) as clients:
        together = clients.map(lambda request: texts(server.post(COMPLETIONS, request | {"n": 2})), requests * 3)
        assert [found[:1] for found in together] == alone * 3
