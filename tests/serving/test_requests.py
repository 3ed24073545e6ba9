"""Bodies of requests, and the errors about them."""

import pytest
from pydantic import ValidationError

from nemo_dllm.collections.diffusion.sampling import sampler_fields
from nemo_dllm.collections.diffusion.serving.errors import setting_error
from nemo_dllm.collections.diffusion.serving.requests import (
    NOT_IN_REQUESTS,
    ChatRequest,
    CompletionRequest,
    Message,
    request_sampler_fields,
)


def completion(**fields):
    return CompletionRequest.model_validate({"prompt": "a", **fields})


def test_every_setting_of_the_sampler_is_a_field_or_named_otherwise():
    assert set(NOT_IN_REQUESTS) < set(sampler_fields())
    for request in (CompletionRequest, ChatRequest):
        assert set(request_sampler_fields()) <= set(request.model_fields)
        for name, field in request_sampler_fields().items():
            assert request.model_fields[name].description == field.help


def test_settings_are_what_the_request_says():
    assert completion().sampler_settings() == {}
    given = {"steps": 4, "threshold": 0.5, "remasking": "margin", "stop_token_ids": [3], "top_p": 1, "temperature": 0}
    assert completion(**given).sampler_settings() == given | {"stop_token_ids": (3,)}


def test_null_is_a_value_only_where_the_setting_has_it():
    assert completion(threshold=None, temperature=None, top_p=None, remasking=None).sampler_settings() == {
        "threshold": None
    }


@pytest.mark.parametrize(
    "field, value",
    [
        ("steps", "4"),
        ("steps", True),
        ("steps", 2**63),
        ("threshold", float("nan")),
        ("temperature", float("inf")),
        ("temperature", -1),
        ("top_p", 0),
        ("n", 0),
        ("max_tokens", 0),
        ("stop", ["a", 1]),
        ("stop_token_ids", [1.5]),
        ("prompt", [["a"]]),
        ("prompt", "\ud800"),
        ("right_shift", True),
        ("logprobs", 1),
        ("echo", True),
        ("best_of", 2),
        ("presence_penalty", 0.5),
        ("logit_bias", {"5": 1}),
        ("stream_options", {"include": True}),
    ],
)
def test_wrong_values_and_what_is_not_supported(field, value):
    with pytest.raises(ValidationError) as error:
        completion(**{field: value})
    assert {entry["loc"][0] for entry in error.value.errors()} == {field}


def test_one_mistake_of_a_list_is_enough():
    for field, item in (("prompt", ["a"]), ("stop", 1), ("stop_token_ids", "a")):
        with pytest.raises(ValidationError) as error:
            completion(**{field: [item] * 100_000})
        assert error.value.error_count() <= 4
    with pytest.raises(ValidationError) as error:
        ChatRequest.model_validate({"messages": [{}] * 100_000})
    assert error.value.error_count() == 2


def test_values_of_any_depth_are_told_in_short():
    nested = []
    for _ in range(5_000):
        nested = [nested]
    with pytest.raises(ValidationError) as error:
        CompletionRequest(prompt="a", logit_bias=nested)
    assert error.value.errors()[0]["msg"].endswith("is not supported; leave it out")


def test_what_says_that_nothing_is_wanted_is_let_through():
    completion(logprobs=None, echo=False, best_of=1, presence_penalty=0.0, logit_bias={}, user="me")
    turn = {"role": "user", "content": "a"}
    neutral = {"logprobs": False, "tools": [], "tool_choice": "none", "response_format": {"type": "text"}}
    ChatRequest.model_validate({"messages": [turn], **neutral})
    with pytest.raises(ValidationError, match="tools\n.*is not supported; leave it out"):
        ChatRequest.model_validate({"messages": [turn], "tools": [{"type": "function"}]})


def test_turns_as_templates_take_them():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert Message.model_validate({"role": "developer", "content": parts}).turn() == {"role": "system", "content": "ab"}
    with pytest.raises(ValidationError):
        Message.model_validate({"role": "user", "content": [{"type": "image_url", "image_url": {}}]})


def test_errors_of_settings_go_by_the_names_of_requests():
    error = setting_error("max_new_tokens=0 must be at least 1")
    assert (error.status, error.param, error.message) == (422, "max_tokens", "max_tokens=0 must be at least 1")
    assert setting_error("stop_strings=('',) hold an empty text").param == "stop"
    assert setting_error("steps=9 must be from 1 to max_new_tokens=8").message.endswith("max_tokens=8")
    assert setting_error("the template refuses", "messages").param == "messages"
