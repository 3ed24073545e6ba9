"""Many clients at once: every request is answered, none disturbs another, and those that leave free their places."""

import asyncio
import json
import random
import socket

import httpx
import openai
import pytest

from nemo_dllm.collections.diffusion.sampling import generate
from nemo_dllm.collections.diffusion.serving.limits import ServerLimits

REQUESTS = 200


def given(index):
    """A request of its own prompt, length, seed and, in some, settings."""
    draw = random.Random(index)
    return {
        "prompt": "".join(draw.choices("abcdefgh ", k=draw.randint(0, 40))),
        "max_tokens": draw.randint(1, 24),
        "seed": index,
        "temperature": 1.0,
        "stream": index % 3 == 0,
    } | ({"block_size": 8, "threshold": 0.2} if index % 2 else {})


def alone(kit, model, request):
    """The text that the sampler gives the request by itself."""
    settings = {name: request[name] for name in ("temperature", "block_size", "threshold") if name in request}
    config = model.sampler_config(max_new_tokens=request["max_tokens"], **settings)
    prompts = [model.encode(request["prompt"])]
    result = generate(model.denoiser, prompts, config, mask_token_id=kit.MASK, seeds=[request["seed"]])
    return model.decode(result.completions[0].tolist())


async def ask(client, index):
    request = given(index)
    extra = {name: request.pop(name) for name in ("block_size", "threshold") if name in request}
    answer = await client.completions.create(model="toy", **request, extra_body=extra)
    if not request["stream"]:
        return answer.choices[0].text
    return "".join([chunk.choices[0].text async for chunk in answer])


async def misbehave(client, url, index):
    """Leave in the middle of an answer, or send what is no request; returns the status where there is one."""
    kind = index % 5
    bodies = {1: b"{", 2: b"[" * 50_000, 3: b'{"prompt": "' + b"a" * 200_000 + b'"}'}
    if kind in bodies:
        headers = {"content-type": "application/json"}
        return (await client.post(f"{url}/v1/completions", content=bodies[kind], headers=headers)).status_code
    body = {"prompt": "a", "max_tokens": 400, "stream": kind == 0}
    try:
        if kind == 0:
            async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
                await anext(response.aiter_bytes(), None)
        else:
            await client.post(f"{url}/v1/completions", json=body, timeout=0.3)
    except httpx.TimeoutException:
        pass
    return None


async def everybody(kit, server):
    """Answers of those who behave, and statuses of the others; the model waits until all of the former are there."""

    def taken_on():
        health = server.health()
        return health["waiting"] + health["running"] >= REQUESTS

    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(limits=limits, timeout=300) as rude,
        openai.AsyncOpenAI(
            base_url=f"{server.url}/v1",
            api_key="none",
            max_retries=0,
            http_client=httpx.AsyncClient(limits=limits, timeout=300),
        ) as client,
    ):
        polite = asyncio.gather(*(ask(client, index) for index in range(REQUESTS)))
        statuses = asyncio.gather(*(misbehave(rude, server.url, index) for index in range(25)))
        await asyncio.to_thread(kit.until, taken_on)
        server.model.open.set()
        return await polite, await statuses


def test_two_hundred_requests_between_bad_ones(kit):
    model = kit.ToyModel()
    with kit.running(model, ServerLimits(max_body_bytes=100_000, max_waiting_rows=REQUESTS + 25)) as server:
        model.open.clear()
        texts, statuses = asyncio.run(everybody(kit, server))
        kit.until(lambda: (server.health()["waiting"], server.health()["running"]) == (0, 0))
        largest = max(rows for rows, _ in model.batches)
    assert [status for status in statuses if status] == [400, 400, 413] * 5
    assert len(texts) == REQUESTS
    wrong = [index for index in range(REQUESTS) if texts[index] != alone(kit, model, given(index))]
    assert wrong == []
    assert largest == ServerLimits.max_batch_rows


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_place(kit, stream):
    model = kit.ToyModel()
    with kit.running(model, ServerLimits(max_waiting_rows=1, max_batch_rows=1)) as server:
        body = json.dumps({"prompt": "a", "max_tokens": 400, "stream": stream})
        headers = ("Host: toy", "Content-Type: application/json", f"Content-Length: {len(body)}")
        request = "\r\n".join(["POST /v1/completions HTTP/1.1", *headers, "", body])
        address = server.socket.getsockname()

        def place(name):
            return server.health()[name]

        model.open.clear()
        for name in ("running", "waiting"):
            with socket.create_connection(address) as client:
                client.sendall(request.encode())
                kit.until(lambda name=name: place(name) == 1)
            kit.until(lambda name=name: place(name) == 0)
        assert len(model.batches) == 1
        model.open.set()
        assert server.post("/v1/completions", {"prompt": "b", "max_tokens": 3}).status_code == 200
        assert model.batches == [(1, 401)] + [(1, 4)] * 3
