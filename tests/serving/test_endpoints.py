"""The endpoints, through OpenAI's own client where it can say it."""

import httpx
import openai
import pytest

from nemo_dllm.collections.diffusion.sampling import SamplerConfig, generate, infill, span_between


def expected(kit, model, prompt, seed, length, row_id=0, **settings):
    """What the sampler makes of a prompt alone."""
    config = model.sampler_config(max_new_tokens=length, **settings)
    result = generate(
        model.denoiser, [prompt], config, mask_token_id=kit.MASK, seeds=[seed], row_ids=[row_id], decode=model.decode
    )
    return model.decode(result.completions[0].tolist())


def test_a_completion(kit, server):
    given = {"model": "toy", "prompt": "hello", "max_tokens": 12, "temperature": 1.0, "seed": 3}
    answer = server.client().completions.create(**given, extra_body={"block_size": 4, "remasking": "margin"})
    (choice,) = answer.choices
    settings = {"temperature": 1.0, "block_size": 4, "remasking": "margin"}
    assert choice.text == expected(kit, server.model, list(b"hello"), 3, 12, **settings)
    assert (choice.finish_reason, answer.object, answer.model) == ("length", "text_completion", "toy")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 12, 17)


def test_several_prompts_and_samples(kit, server):
    answer = server.client().completions.create(
        model="toy", prompt=["ab", "c"], n=2, max_tokens=6, temperature=1.0, seed=3
    )
    texts = [choice.text for choice in answer.choices]
    prompts = [(list(b"ab"), 0), (list(b"ab"), 1), ([99], 0), ([99], 1)]
    assert texts == [expected(kit, server.model, ids, 3, 6, index, temperature=1.0) for ids, index in prompts]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3] and len(set(texts)) == 4
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 24)
    ids = server.client().completions.create(model="toy", prompt=[[97, 98], [99]], n=2, max_tokens=6, seed=3)
    assert [choice.text for choice in ids.choices] == [expected(kit, server.model, ids, 3, 6) for ids, _ in prompts]


def test_without_a_seed_samples_differ(server):
    create = server.client().completions.create
    texts = {create(model="toy", prompt="a", max_tokens=24, temperature=50.0).choices[0].text for _ in range(3)}
    assert len(texts) == 3


def test_a_suffix_is_filled_in_before(kit, server):
    answer = server.client().completions.create(model="toy", prompt="ab", suffix="yz", max_tokens=5)
    tokens, holes = span_between(list(b"ab"), list(b"yz"), 5)
    filled = infill(server.model.denoiser, [tokens], [holes], SamplerConfig(), mask_token_id=kit.MASK)
    assert answer.choices[0].text == server.model.decode(filled.completions[0].tolist())
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 5)


def test_a_conversation_goes_through_the_template(kit, server):
    turns = [
        {"role": "system", "content": "be"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": [{"type": "text", "text": "and?"}]},
    ]
    prompt = b"system: be\0\nuser: hi\0\nassistant: yes\0\nuser: and?\0\nassistant: "
    ids = [kit.TURN if byte == 0 else byte for byte in prompt]
    answer = server.client().chat.completions.create(model="toy", messages=turns, max_completion_tokens=8)
    message = answer.choices[0].message
    config = {"stop_token_ids": (kit.TURN,)}
    assert (message.role, message.content) == ("assistant", expected(kit, server.model, ids, 0, 8, **config))
    assert (answer.object, answer.usage.prompt_tokens) == ("chat.completion", len(ids))
    with pytest.raises(openai.UnprocessableEntityError, match="a system turn comes first") as error:
        server.client().chat.completions.create(model="toy", messages=[*turns, {"role": "system", "content": "x"}])
    assert error.value.param == "messages"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "said, stop, text, reason, tokens",
    [
        (b"one two", None, "one two", "stop", 8),
        (b"one two", " tw", "one", "stop", 6),
        (b"one two", ["zzz", "e"], "on", "stop", 3),
        (b"one\0two", "<turn>", "one", "stop", 4),
        ("zwölf €".encode(), None, "zwölf €", "stop", 11),
        (b"x" * 40, None, "x" * 16, "length", 16),
    ],
)
def test_where_texts_end(kit, stream, said, stop, text, reason, tokens):
    answer = [kit.TURN if byte == 0 else byte for byte in said]
    with kit.running(kit.ToyModel(answer)) as server:
        given = {"prompt": "say|", "max_tokens": 16, "stop": stop, "block_size": 4}
        if not stream:
            body = server.post("/v1/completions", given).json()
            (choice,) = body["choices"]
            assert (choice["text"], choice["finish_reason"]) == (text, reason)
            assert body["usage"]["completion_tokens"] == tokens
            return
        events = server.events("/v1/completions", given | {"stream_options": {"include_usage": True}})
        assert "".join(event["choices"][0]["text"] for event in events[:-1]) == text
        assert [event["choices"][0]["finish_reason"] for event in events[:-1]][-1] == reason
        assert events[-1]["usage"]["completion_tokens"] == tokens and events[-1]["choices"] == []


@pytest.mark.parametrize("stop, text, tokens", [(" o", "", 2), ("o", " ", 2), ("e t", " on", 6)])
def test_a_stop_may_begin_with_the_white_space_behind_the_prompt(kit, monkeypatch, stop, text, tokens):
    """Which tokenizers such as LLaMA 2's leave out in front of a text of its own."""
    model = kit.ToyModel(b" one two three")
    monkeypatch.setattr(model, "decode", lambda ids: model.tokenizer.decode(ids).removeprefix(" "))
    with kit.running(model) as server:
        body = server.post("/v1/completions", {"prompt": "say|", "max_tokens": 8, "stop": stop}).json()
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text, "stop")
    assert body["usage"]["completion_tokens"] == tokens


def test_a_stream_adds_up_to_the_answer_without_one(server):
    given = {"prompt": "hello", "max_tokens": 40, "temperature": 1.0, "seed": 8, "n": 2, "block_size": 4}
    whole = server.post("/v1/completions", given).json()
    events = server.events("/v1/completions", given)
    for index in (0, 1):
        texts = [e["choices"][0]["text"] for e in events if e["choices"][0]["index"] == index]
        assert "".join(texts) == whole["choices"][index]["text"] and len(texts) > 5
    assert all("canvas" not in event["choices"][0] for event in events)


def test_a_conversation_streams(server):
    given = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 24, "seed": 1}
    whole = server.client().chat.completions.create(**given)
    stream = list(server.client().chat.completions.create(**given, stream=True, stream_options={"include_usage": True}))
    assert stream[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in stream[:-1]) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in stream[:-1]][-1] == "length"
    assert stream[-1].usage == whole.usage
    assert len({chunk.id for chunk in stream}) == 1


def test_the_canvas_is_streamed_to_those_who_ask(server):
    given = {"model": "toy", "prompt": "a", "max_tokens": 6, "seed": 1, "stream": True}
    chunks = list(server.client().completions.create(**given, extra_body={"canvas": True}))
    views = [chunk.choices[0].canvas for chunk in chunks]
    assert [(view["step"], view["masked"]) for view in views] == [(step, 6 - step) for step in range(1, 7)]
    kinds = [piece["kind"] for piece in views[0]["pieces"]]
    assert sorted(set(kinds)) == ["mask", "new"]
    text = "".join(chunk.choices[0].text for chunk in chunks)
    assert "".join(piece["text"] for piece in views[-1]["pieces"]) == text


def test_the_servers_settings_give_way_to_the_requests(kit):
    with kit.running(kit.ToyModel(), preset="llada", settings={"threshold": 0.0, "max_new_tokens": 7}) as server:
        steps = lambda **body: server.events("/v1/completions", {"prompt": "a", "canvas": True, "seed": 1, **body})  # noqa: E731
        assert len(steps()) == 1
        assert len(steps(threshold=None)) == 7
        assert len(steps(preset="dream", max_tokens=5)) == 5
        assert server.post("/v1/completions", {"prompt": "a"}).json()["usage"]["completion_tokens"] == 7


def test_the_servers_seed_and_length_are_defaults(kit):
    settings = {"seed": 5, "max_length": 12, "temperature": 1.0}
    with kit.running(kit.ToyModel(), settings=settings) as server:
        texts = {
            server.post("/v1/completions", {"prompt": "ab", **more}).json()["choices"][0]["text"] for more in ({}, {})
        }
        assert texts == {expected(kit, server.model, list(b"ab"), 5, 10, temperature=1.0)}
        assert server.client().models.retrieve("toy").max_length == 12


def test_a_completion_without_a_length_takes_the_room_that_there_is(kit):
    with kit.running(kit.ToyModel(seq_length=20)) as server:
        assert server.post("/v1/completions", {"prompt": "a" * 15}).json()["usage"]["completion_tokens"] == 5


def test_models_and_settings(server):
    assert [model.id for model in server.client().models.list()] == ["toy"]
    assert server.client().models.retrieve("toy").max_length == 512
    settings = httpx.get(f"{server.url}/v1/settings").json()
    fields = {field["name"]: field for field in settings["fields"]}
    assert fields["threshold"]["type"] == "float | None" and "right_shift" not in fields
    assert "llada" in settings["presets"]


def test_health_and_metrics(kit, server):
    kit.until(lambda: server.health() == {"status": "ok", "waiting": 0, "running": 0})
    tokens, passes = server.metric("completion_tokens_total"), server.metric("forward_passes_total")
    server.post("/v1/completions", {"prompt": "a", "max_tokens": 5})
    assert server.metric("completion_tokens_total") == tokens + 5
    assert server.metric("forward_passes_total") == passes + 5
    httpx.get(f"{server.url}/no/such/path")
    text = httpx.get(f"{server.url}/metrics").text
    assert 'nemo_dllm_requests_total{path="other",status="404"}' in text
    assert 'nemo_dllm_rows_total{finish_reason="length"}' in text


def test_the_description_of_the_api_names_every_setting(server):
    schema = httpx.get(f"{server.url}/openapi.json").json()["components"]["schemas"]["CompletionRequest"]
    assert schema["properties"]["threshold"]["description"].startswith("commit every position")
