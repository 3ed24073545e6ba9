"""What fails in the server itself: told apart from what is wrong with a request, logged, and gone with the request."""

import json
import random
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
import torch

from nemo_dllm.collections.diffusion.serving.limits import ServerLimits

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ERRORS = [RuntimeError("the model broke"), ValueError("steps=0 must be from 1 to max_new_tokens=8"), MemoryError()]


def answer_of(server, **body):
    response = server.post(COMPLETIONS, {"max_tokens": 6, "seed": 1, "temperature": 1.0} | body)
    return response.json()["choices"][0]["text"]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_model_that_fails_is_no_fault_of_the_request(kit, error, caplog):
    model = kit.ToyModel()
    model.fail_on, model.error = ord("z"), error
    with kit.running(model) as server:
        before = answer_of(server, prompt="a")
        response = server.post(COMPLETIONS, {"prompt": "z", "max_tokens": 2})
        told, request_id = response.json()["error"], response.headers["x-request-id"]
        assert (response.status_code, told["type"], told["code"]) == (500, "server_error", "model_failed")
        assert told["param"] is None and request_id in told["message"]
        (record,) = [record for record in caplog.records if request_id in record.getMessage()]
        assert record.exc_info[1] is error and record.exc_info[2] is not None
        with pytest.raises(openai.InternalServerError, match="the server's log says how") as raised:
            server.client().completions.create(model="toy", prompt="z")
        assert raised.value.request_id in str(raised.value)
        assert answer_of(server, prompt="a") == before
        assert server.health() == {"status": "ok", "waiting": 0, "running": 0}


def test_a_stream_that_fails_ends_in_an_event(kit):
    model = kit.ToyModel()
    model.fail_on, model.error = ord("z"), ValueError("the weights are no good")
    with kit.running(model) as server:
        response = server.post(COMPLETIONS, {"prompt": "z", "max_tokens": 2, "stream": True})
        assert response.status_code == 200
        assert '"code": "model_failed"' in response.text and response.headers["x-request-id"] in response.text
        assert "weights" not in response.text and "[DONE]" not in response.text


def test_the_other_requests_of_a_batch_go_on(kit):
    model = kit.ToyModel()
    model.error = ValueError("the model broke")
    with kit.running(model) as server, ThreadPoolExecutor(5) as clients:
        alone = {prompt: answer_of(server, prompt=prompt, n=2) for prompt in "abcd"}
        model.batches.clear()
        model.fail_on = ord("z")
        model.open.clear()
        first = clients.submit(answer_of, server, prompt="a", remasking="margin")
        kit.until(lambda: model.batches)
        good = {prompt: clients.submit(answer_of, server, prompt=prompt, n=2) for prompt in "abc"}
        bad = clients.submit(server.post, COMPLETIONS, {"prompt": "z", "max_tokens": 6, "temperature": 1.0})
        kit.until(lambda: server.health()["waiting"] == 7)
        model.open.set()
        first.result(300)
        assert {prompt: answer.result(300) for prompt, answer in good.items()} == {p: alone[p] for p in "abc"}
        assert bad.result(300).status_code == 500
        assert (7, 7) in model.batches
        assert answer_of(server, prompt="d", n=2) == alone["d"]


def test_logits_that_are_no_numbers(kit):
    class Broken(kit.ToyModel):
        def denoiser(self, tokens_BT, *, key_mask_BT):
            logits_BTV = super().denoiser(tokens_BT, key_mask_BT=key_mask_BT)
            return logits_BTV.masked_fill((tokens_BT == ord("z")).any(dim=1)[:, None, None], torch.nan)

    with kit.running(Broken()) as server:
        assert server.post(COMPLETIONS, {"prompt": "z", "max_tokens": 2}).json()["error"]["code"] == "model_failed"
        assert server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize("name", ["encode", "decode"])
def test_a_tokenizer_that_fails(kit, name, caplog):
    model = kit.ToyModel()
    with kit.running(model) as server:
        works, setting = getattr(model, name), "z" if name == "encode" else [ord("z")]

        def breaks(given):
            if given[:1] == setting:
                raise KeyError("no such piece")
            return works(given)

        setattr(model, name, breaks)
        response = server.post(COMPLETIONS, {"prompt": "z", "max_tokens": 2})
        request_id = response.headers["x-request-id"]
        assert response.status_code == 500 and request_id in response.json()["error"]["message"]
        assert any(request_id in record.getMessage() and record.exc_info for record in caplog.records)
        assert server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 2}).status_code == 200


@pytest.fixture
def half_failing(kit):
    """A server of a model that fails at "z": a request, and its answer without the second prompt, which has one."""
    model = kit.ToyModel()
    with kit.running(model) as server:
        body = {"max_tokens": 6, "temperature": 1.0, "seed": 1}
        alone = server.post(COMPLETIONS, body | {"prompt": ["a", "b"]}).json()["choices"][0]
        model.fail_on = ord("z")
        yield server, body | {"prompt": ["a", "z"]}, alone


def test_one_choice_that_fails_leaves_the_others(half_failing):
    server, body, alone = half_failing
    response = server.post(COMPLETIONS, body)
    first, second = response.json()["choices"]
    assert response.status_code == 200 and first == alone
    assert (second["index"], second["text"], second["finish_reason"]) == (1, "", "error")
    assert second["error"]["code"] == "model_failed" and response.headers["x-request-id"] in second["error"]["message"]
    assert response.json()["usage"]["completion_tokens"] == 6
    choices = server.client().completions.create(model="toy", **body).choices
    assert [choice.finish_reason for choice in choices] == [alone["finish_reason"], "error"]
    assert choices[1].error["type"] == "server_error"
    assert server.row_ends() == {"length": 4, "failed": 2}


def test_the_choice_of_a_stream_that_fails_is_told_as_such(half_failing):
    server, body, alone = half_failing
    events = server.events(COMPLETIONS, body | {"stream_options": {"include_usage": True}})
    ends = {
        choice["index"]: choice
        for event in events
        for choice in event["choices"]
        if choice["finish_reason"] is not None
    }
    assert "".join(c["text"] for e in events for c in e["choices"] if c["index"] == 0) == alone["text"]
    assert (ends[0]["finish_reason"], "error" in ends[0]) == ("length", False)
    assert (ends[1]["finish_reason"], ends[1]["error"]["code"]) == ("error", "model_failed")
    assert events[-1]["usage"]["completion_tokens"] == 6
    with server.client().completions.create(model="toy", stream=True, **body) as stream:
        assert {c.finish_reason for chunk in stream for c in chunk.choices if c.index == 1} == {"error"}


def test_one_sample_of_several_that_fails(kit):
    model = kit.ToyModel()
    with kit.running(model) as server:
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 20, "n": 3, "temperature": 1.0, "seed": 1}
        texts = [choice["message"]["content"] for choice in server.post(CHAT, chat).json()["choices"]]
        # A token of the second sample alone, which it fails at once it has found it.
        (model.fail_on, *_) = sorted(set(texts[1].encode()) - set((texts[0] + texts[2] + "user: \nassistant").encode()))
        response = server.post(CHAT, chat)
        choices = response.json()["choices"]
        assert response.status_code == 200
        assert [choice["finish_reason"] for choice in choices] == ["length", "error", "length"]
        assert [choice["message"]["content"] for choice in choices] == [texts[0], "", texts[2]]


def test_a_request_of_which_no_choice_is_finished_fails_as_a_whole(half_failing):
    server, body, _ = half_failing
    response = server.post(COMPLETIONS, body | {"prompt": ["z", "zz"]})
    assert (response.status_code, response.json()["error"]["code"]) == (500, "model_failed")
    response = server.post(COMPLETIONS, body | {"prompt": ["z", "zz"], "stream": True})
    first, second = (json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n") if line)
    assert first["choices"][0]["finish_reason"] == "error" and second["error"]["code"] == "model_failed"


def test_what_is_finished_when_time_is_up_is_delivered(kit):
    class Stalling(kit.ToyModel):
        def denoiser(self, tokens_BT, *, key_mask_BT):
            if (tokens_BT == ord("z")).any():
                self.open.clear()
            return super().denoiser(tokens_BT, key_mask_BT=key_mask_BT)

    with kit.running(Stalling(), ServerLimits(timeout_seconds=2, max_batch_rows=1)) as server:
        first, second = server.post(COMPLETIONS, {"prompt": ["a", "z"], "max_tokens": 2}).json()["choices"]
        assert (first["finish_reason"], second["finish_reason"]) == ("length", "error")
        assert second["error"]["code"] == "timeout"
        assert server.row_ends() == {"length": 1, "timeout": 1}


def test_rows_are_counted_once_by_how_they_ended(kit):
    model = kit.ToyModel(b"yes")
    model.fail_on = ord("z")
    with kit.running(model, ServerLimits(timeout_seconds=2)) as server:
        assert server.row_ends() == {}
        server.post(COMPLETIONS, {"prompt": "say|", "max_tokens": 2, "n": 3})
        server.post(COMPLETIONS, {"prompt": "say|", "max_tokens": 9})
        counted = {"length": 3, "stop": 1}
        assert server.row_ends() == counted
        server.post(COMPLETIONS, {"prompt": "z", "max_tokens": 2, "n": 2})
        counted["failed"] = 2
        assert server.row_ends() == counted
        server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 0})
        assert server.row_ends() == counted
        model.open.clear()
        assert server.post(COMPLETIONS, {"prompt": "a"}).status_code == 504
        counted["timeout"] = 1
        assert server.row_ends() == counted
        with httpx.stream("POST", server.url + COMPLETIONS, json={"prompt": "a", "stream": True}, timeout=300):
            pass
        kit.until(lambda: server.row_ends() == counted | {"cancelled": 1})


def test_every_request_has_an_id_of_its_own(server):
    answers = [server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}) for _ in range(2)]
    answers += [server.post(COMPLETIONS, {}), httpx.get(f"{server.url}/health"), httpx.get(f"{server.url}/no/such")]
    assert len({answer.headers["x-request-id"] for answer in answers}) == 5


FIELDS = {
    "block_size": (None, 1, 3, 4, 40),
    "steps": (None, 1, 2, 200),
    "steps_per_block": (None, 1, 2, 4),
    "threshold": (None, 0, 0.3, 1e9),
    "factor": (None, 0.5),
    "temperature": (0, 1e-300, 1.0, 1e300),
    "top_p": (1e-300, 0.5, 1),
    "top_k": (None, 1, 10**12),
    "remasking": ("confidence", "margin", "entropy", "random"),
    "cfg_scale": (0, 1.0, 1e308),
    "editing_threshold": (None, 0, 0.3),
    "max_post_steps": (0, 3),
    "min_new_tokens": (0, 1, 500),
    "stop": (None, "a", ["<eos>", "<turn>"], "<mask>"),
    "stop_token_ids": (None, [], [256], [5, 258]),
    "suppress_token_ids": (None, [1, 2], list(range(259)), list(range(256))),
    "begin_suppress_token_ids": (None, list(range(256))),
    "cache": (None, "exact", "approximate_dual", "approximate_delayed"),
    "suffix": (None, "", "yz", "<mask>"),
    "prompt": ("", "abc", [256, 257], [[]], ["a", ""], "<mask><eos>"),
    "max_tokens": (None, 1, 7),
    "preset": (None, "llada", "dream"),
}


@pytest.mark.parametrize("caches", [False, True])
def test_a_request_that_is_let_in_gets_an_answer(kit, tiny_attention, caches, caplog):
    rng, statuses = random.Random(3), []
    model = kit.ToyModel(seq_length=100)
    if caches:
        model.denoiser = tiny_attention(kit.VOCABULARY)
    with kit.running(model) as server, httpx.Client(base_url=server.url, timeout=300) as client:
        for _ in range(200):
            changed = rng.sample(sorted(FIELDS), rng.randint(1, 4))
            body = {"prompt": "a", "max_tokens": 5} | {name: rng.choice(FIELDS[name]) for name in changed}
            response = client.post(COMPLETIONS, json=body)
            assert response.status_code in (200, 422), (body, response.text, caplog.text[-2000:])
            assert response.status_code == 200 or response.json()["error"]["param"] in body, (body, response.text)
            statuses.append(response.status_code)
    assert statuses.count(200) > 70 and statuses.count(422) > 30
