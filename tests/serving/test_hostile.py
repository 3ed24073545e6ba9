"""Clients that send nonsense: each gets an error that names what is wrong, and the server goes on."""

import json
import math
import re
import socket
from collections.abc import Sequence

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from nemo_dllm.collections.diffusion.serving import middleware
from nemo_dllm.collections.diffusion.serving.limits import ServerLimits
from nemo_dllm.collections.diffusion.serving.requests import ChatRequest, CompletionRequest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TURNS = [{"role": "user", "content": "a"}]
ENDPOINTS = {COMPLETIONS: ({"prompt": "a"}, CompletionRequest), CHAT: ({"messages": TURNS}, ChatRequest)}

# One value of every type of JSON, by the name that JSON Schema has for it.
OF_TYPE = {
    "boolean": True,
    "integer": 10**30,
    "number": 1.5,
    "string": "no such value",
    "array": [[{}]],
    "object": {"no": "such"},
}
# Of fields that may only say what is so anyway.
NEUTRAL = {"parallel_tool_calls": {"boolean"}}


def types_of(schema):
    """Types that a field of ``/openapi.json`` takes; integers are numbers too."""
    members = schema.get("anyOf", [schema])
    found = {member.get("type") for member in members} | {"object" for member in members if "$ref" in member}
    return found | ({"integer"} if "number" in found else set())


@pytest.mark.parametrize("path", ENDPOINTS)
def test_every_field_of_another_type_is_named(server, path):
    base, request = ENDPOINTS[path]
    schemas = httpx.get(f"{server.url}/openapi.json").json()["components"]["schemas"][request.__name__]["properties"]
    assert schemas.keys() == request.model_fields.keys()
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for field, schema in schemas.items():
            wrong = OF_TYPE.keys() - types_of(schema) - NEUTRAL.get(field, set())
            assert len(wrong) >= 3
            for name in wrong:
                response = client.post(path, json={**base, "max_tokens": 2, field: OF_TYPE[name]})
                error = response.json()["error"]
                assert (response.status_code, error["param"]) == (422, field), (field, name, response.text)
                assert error["type"] == "invalid_request_error" and field in error["message"]
                assert not re.search(r"\[|function-", error["message"].partition(":")[0])


@pytest.mark.parametrize(
    "field, values",
    [
        ("max_tokens", [0, -1, 10**9, 10**30]),
        ("n", [0, -1, 17, 10**9, 10**30]),
        ("temperature", [-0.1, -1]),
        ("top_p", [0, -1, 1.01]),
        ("top_k", [0, -1, -(10**30)]),
        ("steps", [0, -1, 3, 10**12]),
        ("block_size", [0, -1]),
        ("threshold", [-0.5]),
        ("factor", [0, -1]),
        ("editing_threshold", [-0.1, 1.1]),
        ("cfg_scale", [-1]),
        ("seed", [2**63, -(2**63) - 1]),
        ("stop_token_ids", [[-1], [259], [10**30]]),
        ("stop", ["", [""], ["a", ""], ["a"] * 17]),
    ],
)
def test_values_out_of_range_are_named(server, field, values):
    for value in values:
        response = server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 2, field: value})
        assert (response.status_code, response.json()["error"]["param"]) == (422, field), (value, response.text)


@pytest.mark.parametrize(
    "path, fields",
    [
        (COMPLETIONS, {"logprobs": 1, "echo": True, "best_of": 2, "logit_bias": {"5": 1}, "presence_penalty": 1.0}),
        (
            CHAT,
            {
                "logprobs": True,
                "top_logprobs": 2,
                "tools": [{"type": "function", "function": {"name": "f"}}],
                "tool_choice": "required",
                "functions": [{"name": "f"}],
                "response_format": {"type": "json_object"},
                "modalities": ["audio"],
                "reasoning_effort": "high",
                "store": True,
                "frequency_penalty": 0.5,
            },
        ),
    ],
)
def test_what_is_not_supported_says_so_to_openais_client(server, path, fields):
    create = server.client().completions.create if path == COMPLETIONS else server.client().chat.completions.create
    base = ENDPOINTS[path][0]
    for field, value in fields.items():
        with pytest.raises(
            openai.UnprocessableEntityError, match=f"{field}: .* is not supported; leave it out"
        ) as error:
            create(model="toy", **base, extra_body={field: value})
        assert error.value.param == field and error.value.body["type"] == "invalid_request_error"


def test_halves_of_surrogate_pairs_are_errors_of_the_request(server):
    half = b'"\\ud800"'
    bodies = {
        COMPLETIONS: [
            b'{"prompt": %s}',
            b'{"prompt": "a", %s: 1}',
            b'{"prompt": "a", "stop": [%s]}',
            b'{"prompt": [%s]}',
        ],
        CHAT: [b'{"messages": [{"role": "user", "content": %s}]}', b'{"messages": [{%s: 1}]}'],
    }
    headers = {"content-type": "application/json"}
    for path, texts in bodies.items():
        for text in texts:
            response = httpx.post(f"{server.url}{path}", content=text % half, headers=headers, timeout=60)
            assert response.status_code == 422, text
            message = response.json()["error"]["message"]
            about = "has half of a surrogate pair at character 1, which is no text; take it out"
            assert "%s:" in text.decode() or (about in message and message.endswith("; take it out"))


def test_a_variable_that_is_no_text_is_an_error_of_the_request(kit):
    with kit.running(kit.ToyModel(), chat_template="{{ messages[0].content }}{{ more }}") as server:
        body = b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"more": "\\ud800"}}'
        response = httpx.post(
            f"{server.url}{CHAT}", content=body, headers={"content-type": "application/json"}, timeout=60
        )
        assert response.status_code == 422 and "half of a surrogate pair" in response.json()["error"]["message"]


@pytest.mark.parametrize("body, what", [(b"", "empty"), (b"[]", "no JSON object"), (b"null", "no JSON object")])
def test_bodies_without_fields(server, body, what):
    headers = {"content-type": "application/json"}
    response = httpx.post(f"{server.url}{COMPLETIONS}", content=body, headers=headers, timeout=60)
    message = response.json()["error"]["message"]
    assert response.status_code == 422 and message == f"the body is {what}; send an object of fields"


def test_json_under_another_name(server):
    for kind in ({}, {"content-type": "text/plain"}):
        response = httpx.post(f"{server.url}{COMPLETIONS}", content=b'{"prompt": "a"}', headers=kind, timeout=60)
        assert response.status_code == 422 and "Content-Type: application/json" in response.json()["error"]["message"]
    digits = b'{"prompt": "a", "seed": ' + b"9" * 5_000 + b"}"
    response = httpx.post(f"{server.url}{COMPLETIONS}", content=digits, headers={"content-type": "application/json"})
    assert response.status_code == 400 and response.json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize("method, path, status", [("GET", COMPLETIONS, 405), ("POST", "/v1/embeddings", 404)])
def test_paths_that_there_are_not(server, method, path, status):
    response = httpx.request(method, server.url + path)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, "not_found") and f"{method} {path}" in error["message"]


def exchange(server, data):
    """What a server answers to bytes."""
    with socket.create_connection(server.socket.getsockname()) as client:
        client.settimeout(60)
        client.sendall(data)
        return client.recv(500)


@pytest.mark.parametrize(
    "data",
    [
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost a\r\n\r\n",
    ],
)
def test_what_is_no_http(server, data):
    assert exchange(server, data).startswith(b"HTTP/1.1 400 ")
    assert server.health()["status"] == "ok"


def test_no_header_is_made_of_what_a_client_sends(server):
    answer = exchange(
        server, b"GET /v1/models/a%0d%0aSet-Cookie:%20b=c HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    )
    head = answer.partition(b"\r\n\r\n")[0].lower()
    assert head.startswith(b"http/1.1 404") and b"set-cookie" not in head


def test_a_body_that_does_not_arrive(kit, monkeypatch):
    with kit.running(kit.ToyModel()) as server:
        begun = b'POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{"prompt'
        with monkeypatch.context() as hasty:
            hasty.setattr(middleware, "BODY_SECONDS", 0.3)
            assert exchange(server, begun).startswith(b"HTTP/1.1 408 ")
        assert server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize("key", ["", "sesam", "sesame2", "Sesame", "s\u00e9same", "sesame\u0000"])
def test_keys_that_do_not_fit(kit, key):
    with kit.running(kit.ToyModel(), api_key="sesame") as server:
        for scheme in ("Bearer ", ""):
            data = f"GET /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: {scheme}{key}\r\n\r\n".encode()
            assert exchange(server, data).split()[1] in (b"401", b"400")


def test_a_stream_that_is_left_is_counted_and_frees_its_slot(kit):
    model = kit.ToyModel()
    with kit.running(model, ServerLimits(max_batch_rows=1)) as server:
        model.open.clear()
        body = {"messages": TURNS, "max_tokens": 400, "stream": True}
        with httpx.stream("POST", server.url + CHAT, json=body, timeout=60) as response:
            parts = response.iter_text()
            assert "assistant" in next(parts)
            kit.until(lambda: server.metric("running_rows") == 1, seconds=60)
        kit.until(lambda: server.metric("running_rows") == 0, seconds=60)
        cancelled = 'nemo_dllm_rows_total{finish_reason="cancelled"} 1.0'
        kit.until(lambda: cancelled in httpx.get(f"{server.url}/metrics", timeout=60).text, seconds=60)
        model.open.set()
        assert server.post(COMPLETIONS, {"prompt": "b", "max_tokens": 2}).status_code == 200
        assert server.metric("forward_passes_total") <= 3


def test_metrics_are_what_prometheus_reads(server):
    server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 2})
    families = list(text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text))
    assert len(families) >= 10
    for family in families:
        assert re.fullmatch(r"nemo_dllm_[a-z_]+", family.name) and family.documentation
        assert all(math.isfinite(sample.value) for sample in family.samples)


async def _async_texts(url, given):
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        whole = await client.chat.completions.create(**given)
        stream = await client.chat.completions.create(**given, stream=True)
        return whole.choices[0].message.content, "".join([c.choices[0].delta.content or "" async for c in stream])


def test_openais_clients_agree(server):
    import asyncio

    given = {"model": "toy", "messages": TURNS, "max_tokens": 20, "seed": 4, "temperature": 1.0}
    given["extra_body"] = {"block_size": 4}
    text = server.client().chat.completions.create(**given).choices[0].message.content
    with server.client().chat.completions.create(**given, stream=True) as stream:
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert {text, streamed, *asyncio.run(_async_texts(server.url, given))} == {text}
    raw = server.client().completions.with_raw_response.create(model="toy", prompt="a", max_tokens=2)
    assert raw.status_code == 200 and isinstance(raw.parse().choices, Sequence)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_characters_of_several_tokens_stream_whole(kit, size):
    said = "a\u20ac\U0001f642\u0301z\u00e9\U0001f1e9\U0001f1ea"
    with kit.running(kit.ToyModel(said.encode())) as server:
        given = {"prompt": "say|", "max_tokens": 40, "block_size": size}
        pieces = [event["choices"][0]["text"] for event in server.events(COMPLETIONS, given)]
    assert "".join(pieces) == said and not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert json.loads(json.dumps(pieces)) == pieces
