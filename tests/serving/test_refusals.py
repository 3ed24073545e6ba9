"""Requests that get an error: what it says, and that the server goes on."""

import time

import httpx
import openai
import pytest

from nemo_dllm.collections.diffusion.serving.limits import ServerLimits

COMPLETIONS = "/v1/completions"


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("steps", 0, "steps=0 must be from 1 to max_tokens=8"),
        ("steps", 9, "steps=9 must be from 1 to max_tokens=8"),
        ("steps_per_block", 9, "steps_per_block=9 must be from 1 to the positions of a block"),
        ("remasking", "best", "remasking='best' is unknown; known: confidence, entropy"),
        ("preset", "best", "preset='best' is unknown; known: dream"),
        ("preset", "dllm_mdlm", "preset='dllm_mdlm' is unknown"),
        ("prompt", [1, 999], "prompt holds 999, which is no id of a vocabulary of 259"),
        ("prompt", [[-1]], "prompt holds -1"),
        ("prompt", [], "prompt is an empty list"),
        ("suppress_token_ids", [259], "suppress_token_ids holds 259"),
        ("stop_token_ids", [259], "stop_token_ids holds 259"),
        ("stop", "<mask>", "stop names the mask token"),
        ("stop_token_ids", [5, 256], "stop_token_ids names the mask token"),
        ("stop", "", "hold an empty text"),
        ("stop", ["a"] * 17, "stop has 17 texts; give at most 16"),
        ("max_tokens", 2_000, "max_tokens=2000 is more than the 1024 of this server"),
        ("max_tokens", 512, "1 given tokens and 512 new ones are more than the 512 that fit"),
        ("prompt", "a" * 512, "shorten prompt"),
        ("n", 17, "1 prompts with n=17 are more than the 16 completions of a request"),
        ("prompt", ["a"] * 17, "17 prompts with n=1"),
        ("canvas", True, "set stream=true as well"),
        ("cache", "exact", "cache='exact' works block by block; set block_size"),
        ("logprobs", 5, "logprobs: 5 is not supported; leave it out"),
        ("temperature", "warm", "temperature: Input should be a valid number"),
        ("max_new_tokens", 5, "max_new_tokens is no field of this endpoint"),
    ],
)
def test_an_error_names_the_field(server, field, value, message):
    response = server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 8, field: value})
    error = response.json()["error"]
    assert response.status_code == 422 and error["type"] == "invalid_request_error"
    assert error["param"] == field and message in error["message"]
    assert error["code"] in ("invalid_value", "unknown_field", "context_length_exceeded")


def test_more_prompts_than_are_answered_are_not_even_encoded(kit, monkeypatch):
    model = kit.ToyModel()
    with kit.running(model) as server:
        monkeypatch.setattr(model, "encode", lambda text: pytest.fail("encoded"))
        response = server.post(COMPLETIONS, {"prompt": ["a"] * 17})
        assert (response.status_code, response.json()["error"]["param"]) == (422, "prompt")


def test_no_error_is_as_long_as_what_it_is_about(server):
    long = "a" * 100_000
    for body in ({"prompt": "a", long: 1}, {"prompt": "a", "model": long}, {"prompt": "a", "remasking": long}):
        response = server.post(COMPLETIONS, body)
        assert response.status_code in (404, 422) and len(response.json()["error"]["message"]) <= 1_000
    assert len(httpx.get(f"{server.url}/{long[:5_000]}").json()["error"]["message"]) <= 1_000


def test_the_client_raises_its_own_errors(server):
    with pytest.raises(openai.UnprocessableEntityError) as error:
        server.client().chat.completions.create(model="toy", messages=[])
    assert error.value.param == "messages"
    with pytest.raises(openai.NotFoundError, match="the model 'gpt' does not exist; this server has 'toy'"):
        server.client().completions.create(model="gpt", prompt="a")
    with pytest.raises(openai.NotFoundError):
        server.client().models.retrieve("gpt")
    with pytest.raises(openai.UnprocessableEntityError, match="stop and suffix exclude each other"):
        server.client().completions.create(model="toy", prompt="a", suffix="b", stop="c")
    with pytest.raises(openai.UnprocessableEntityError, match="max_completion_tokens differ"):
        turns = [{"role": "user", "content": "a"}]
        server.client().chat.completions.create(model="toy", messages=turns, max_tokens=1, max_completion_tokens=2)


def test_a_cache_needs_a_model_that_has_one(server):
    response = server.post(COMPLETIONS, {"prompt": "a", "cache": "exact", "block_size": 4})
    assert (response.status_code, response.json()["error"]["param"]) == (422, "cache")


@pytest.mark.parametrize(
    "content, status",
    [(b"{", 400), (b"", 422), (b"[1]", 422), (b'"a"', 422), (b"\xff\xfe", 400), (b"[" * 200_000, 400), (b"{}", 422)],
)
def test_malformed_bodies(server, content, status):
    response = httpx.post(f"{server.url}{COMPLETIONS}", content=content, headers={"content-type": "application/json"})
    assert response.status_code == status and response.json()["error"]["message"]
    assert server.health()["status"] == "ok"


@pytest.mark.parametrize("announced", [True, False])
def test_large_bodies_are_not_read(kit, announced):
    with kit.running(kit.ToyModel(), ServerLimits(max_body_bytes=10_000)) as server:
        body = b'{"prompt": "' + b"a" * 20_000 + b'"}'
        content = body if announced else iter([body[:9_000], body[9_000:]])
        headers = {"content-type": "application/json"}
        response = httpx.post(f"{server.url}{COMPLETIONS}", content=content, headers=headers)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "body_too_large"
        assert server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 2}).status_code == 200


def test_the_key_opens_the_api(kit):
    with kit.running(kit.ToyModel(), api_key="sesame") as server:
        assert server.client("sesame").completions.create(model="toy", prompt="a", max_tokens=2).choices
        with pytest.raises(openai.AuthenticationError, match="the API key is missing or wrong"):
            server.client("wrong").models.list()
        assert httpx.get(f"{server.url}/v1/settings").status_code == 401
        assert server.health()["status"] == "ok"


def test_a_full_queue_and_a_slow_model(kit):
    model = kit.ToyModel()
    limits = ServerLimits(max_waiting_rows=2, max_batch_rows=1, timeout_seconds=1)
    with kit.running(model, limits) as server:
        model.open.clear()
        given = {"prompt": "a", "max_tokens": 300, "stream": True}
        with httpx.stream("POST", server.url + COMPLETIONS, json=given) as first:
            kit.until(lambda: model.batches)
            response = server.post(COMPLETIONS, {"prompt": "a", "n": 3})
            assert response.status_code == 429 and response.headers["retry-after"] == "1"
            assert response.json()["error"]["code"] == "queue_full"
            with pytest.raises(openai.RateLimitError):
                server.client().completions.create(model="toy", prompt="a", n=3)
            start = time.monotonic()
            late = server.post(COMPLETIONS, {"prompt": "a", "n": 2})
            assert late.status_code == 504 and time.monotonic() - start < 200
            # The stream's status has gone out, so that its error is an event.
            assert '"code": "timeout"' in first.read().decode()
        assert server.health()["waiting"] == 0
        model.open.set()
        kit.until(lambda: server.health()["running"] == 0)
        assert server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 2}).status_code == 200
