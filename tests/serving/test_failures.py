"""What fails in the server itself: told apart from what is wrong with a request, logged, and gone with the request."""

import random
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
import torch

from nemo_dllm.collections.diffusion.serving.limits import ServerLimits

COMPLETIONS = "/v1/completions"
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
