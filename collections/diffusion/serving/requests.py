"""Bodies of requests: OpenAI's fields, and the sampler's settings beside them."""

import reprlib
import types
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model

from nemo_dllm.collections.diffusion.characters import check_characters
from nemo_dllm.collections.diffusion.sampling import SamplerField, sampler_fields

# Settings that OpenAI has under a name of its own, or that are the checkpoint's and the server's to decide.
NOT_IN_REQUESTS = (
    "max_new_tokens",
    "max_length",
    "stop_strings",
    "seed",
    "temperature",
    "top_p",
    "right_shift",
    "bos_token_id",
    "eos_token_id",
)

_INT64 = 2**63 - 1


def request_sampler_fields() -> dict[str, SamplerField]:
    """The settings that requests take beside OpenAI's, by name."""
    return {name: field for name, field in sampler_fields().items() if name not in NOT_IN_REQUESTS}


def _not_supported(*neutral: Any) -> Any:
    """A field that may only say what is so anyway."""

    def check(value: Any) -> Any:
        # To Python False is 0.
        if not any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral):
            # Of any depth, which repr is not.
            raise ValueError(f"{reprlib.repr(value)} is not supported; leave it out")
        return value

    return Annotated[Any, AfterValidator(check), Field(default=None, description="Not supported.")]


def _characters(text: str) -> str:
    check_characters(text)
    return text


Text = Annotated[str, AfterValidator(_characters)]

Item = TypeVar("Item")
# A long list of nothing but mistakes would keep the event loop busy with their texts.
ListOf = Annotated[list[Item], Field(fail_fast=True)]


def _json_type(annotation: Any) -> Any:
    """The type of a setting as JSON has it: tuples are arrays, integers have 64 bits."""
    if get_origin(annotation) in (Union, types.UnionType):
        members = [_json_type(member) for member in get_args(annotation)]
        return Union[tuple(members)]  # noqa: UP007
    if get_origin(annotation) is tuple:
        return ListOf[_json_type(get_args(annotation)[0])]
    if annotation is int:
        return Annotated[int, Field(ge=-_INT64 - 1, le=_INT64)]
    return annotation


class StreamOptions(BaseModel):
    """``stream_options``."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool = False
    include_obfuscation: bool = False


class _Standard(BaseModel):
    """What both endpoints take."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    model: str | None = None
    max_tokens: Annotated[int | None, Field(ge=1, description="Tokens to generate at most.")] = None
    temperature: Annotated[float | None, Field(ge=0, description="None is the server's default.")] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    n: Annotated[int | None, Field(ge=1, description="Samples per prompt.")] = None
    seed: Annotated[int | None, Field(ge=-_INT64 - 1, le=_INT64)] = None
    stop: Annotated[Text | ListOf[Text] | None, Field(description="Texts that end the completion.")] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str | None, Field(description="Has no effect.")] = None
    preset: Annotated[str | None, Field(description="A preset of the sampler in place of the server's.")] = None
    canvas: Annotated[bool, Field(description="Stream the canvas of every denoising step as well.")] = False

    frequency_penalty: _not_supported(None, 0)
    presence_penalty: _not_supported(None, 0)
    logit_bias: _not_supported(None, {})

    def sampler_settings(self) -> dict[str, Any]:
        """The sampler's settings that the request makes; null keeps a default except where it is a value."""
        settings = {name: getattr(self, name) for name in ("temperature", "top_p")}
        settings = {name: value for name, value in settings.items() if value is not None}
        for name, field in request_sampler_fields().items():
            value = getattr(self, name)
            if name in self.model_fields_set and (value is not None or type(None) in get_args(field.type)):
                settings[name] = tuple(value) if isinstance(value, list) else value
        return settings


_Base = create_model(
    "_Base",
    __base__=_Standard,
    **{
        name: (_json_type(field.type) | None, Field(default=None, description=field.help))
        for name, field in request_sampler_fields().items()
    },
)


class CompletionRequest(_Base):
    """The body of ``/v1/completions``."""

    prompt: Text | ListOf[Text] | ListOf[int] | ListOf[ListOf[int]]
    suffix: Annotated[Text | None, Field(description="Text behind the completion, which fills in what is between.")] = (
        None
    )

    best_of: _not_supported(None, 1)
    echo: _not_supported(None, False)
    logprobs: _not_supported(None)


class TextPart(BaseModel):
    """A part of a message."""

    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["text"]
    text: Text


class Message(BaseModel):
    """A turn of a conversation."""

    model_config = ConfigDict(strict=True, extra="forbid")

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | ListOf[TextPart]
    name: _not_supported(None)
    tool_calls: _not_supported(None, [])
    refusal: _not_supported(None)
    audio: _not_supported(None)
    annotations: _not_supported(None, [])
    function_call: _not_supported(None)

    def turn(self) -> dict[str, str]:
        """As chat templates take it."""
        parts = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": parts}


class ChatRequest(_Base):
    """The body of ``/v1/chat/completions``."""

    messages: Annotated[ListOf[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int | None, Field(ge=1, description="The newer name of max_tokens.")] = None
    chat_template_kwargs: Annotated[
        dict[str, Any], Field(default_factory=dict, description="Further variables of the chat template.")
    ]

    logprobs: _not_supported(None, False)
    top_logprobs: _not_supported(None, 0)
    tools: _not_supported(None, [])
    tool_choice: _not_supported(None, "none")
    parallel_tool_calls: _not_supported(None, True, False)
    functions: _not_supported(None, [])
    function_call: _not_supported(None, "none")
    response_format: _not_supported(None, {"type": "text"})
    store: _not_supported(None, False)
    metadata: _not_supported(None, {})
    service_tier: _not_supported(None, "auto", "default")
    modalities: _not_supported(None, ["text"])
    audio: _not_supported(None)
    prediction: _not_supported(None)
    reasoning_effort: _not_supported(None)
    verbosity: _not_supported(None, "medium")
    web_search_options: _not_supported(None)
    safety_identifier: Annotated[str | None, Field(description="Has no effect.")] = None
    prompt_cache_key: Annotated[str | None, Field(description="Has no effect.")] = None
