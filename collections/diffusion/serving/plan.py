"""From the body of a request to the rows that the engine denoises."""

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from nemo_dllm.collections.diffusion.sampling import SamplerConfig
from nemo_dllm.collections.diffusion.serving.errors import RequestError, naming_the_field
from nemo_dllm.collections.diffusion.serving.limits import ServerLimits
from nemo_dllm.collections.diffusion.serving.requests import ChatRequest, CompletionRequest
from nemo_dllm.collections.diffusion.serving.served_model import ServedModel

# Whether white space belongs between prompt and completion depends on the last tokens of the prompt.
CONTEXT_TOKENS = 8

MAX_STOPS = 16

_NO_ENDS = {"stop_at_eos": False, "stop_token_ids": (), "stop_strings": (), "min_new_tokens": 0}


class Choice(NamedTuple):
    """One completion to make.

    Attributes:
        prompt: token ids.
        hole_count: tokens to generate at most.
        row_id: keys the noise, together with the request's seed.
    """

    prompt: list[int]
    hole_count: int
    row_id: int


class Plan(NamedTuple):
    """What a request asks for.

    Attributes:
        choices: in the order of the answer.
        suffix: token ids behind every completion.
        config: how they are sampled.
        seed: of the request, or drawn for it.
        stops: texts that end a completion.
        context_tokens: how many tokens of the prompt decide on white space before the completion.
        prompt_tokens: of all prompts together, each counted once, and the suffix.
    """

    choices: list[Choice]
    suffix: list[int]
    config: SamplerConfig
    seed: int
    stops: tuple[str, ...]
    context_tokens: int
    prompt_tokens: int


class Planner:
    """Reads the bodies of requests; what cannot be met is a ``RequestError`` that names the field.

    Args:
        model: what will do the work.
        limits: of the server.
    """

    def __init__(self, model: ServedModel, limits: ServerLimits):
        self._model, self._limits = model, limits

    def completion(self, request: CompletionRequest) -> Plan:
        """Plan the answer of ``/v1/completions``."""
        prompts = self._prompts(request)
        suffix = self._model.loaded.encode(request.suffix) if request.suffix else []
        self._model.check_token_ids(suffix, "suffix")
        length = _Length(request.max_tokens, "max_tokens")
        config, stops = self._sampling(request, length, ())
        if suffix:
            for field, given in (("stop", request.stop), ("stop_token_ids", request.stop_token_ids)):
                if given:
                    message = f"{field} and suffix exclude each other: the text goes on in any case"
                    raise RequestError(422, message, field, "invalid_value")
            config = replace(config, **_NO_ENDS)
        choices = self._choices(request, prompts, len(suffix), length, config, "prompt")
        return _plan(request, choices, suffix, config, stops, CONTEXT_TOKENS)

    def chat(self, request: ChatRequest) -> Plan:
        """Plan the answer of ``/v1/chat/completions``."""
        length = _Length(request.max_tokens, "max_tokens")
        if request.max_completion_tokens is not None:
            if length.asked not in (None, request.max_completion_tokens):
                message = "max_tokens and max_completion_tokens differ; give one of them"
                raise RequestError(422, message, "max_tokens", "invalid_value")
            length = _Length(request.max_completion_tokens, "max_completion_tokens")
        with naming_the_field("messages"):
            template = self._model.chat_template
        with naming_the_field("chat_template_kwargs"):
            template.check_variables(request.chat_template_kwargs)
        with naming_the_field("messages"):
            prompt = template.prompt([message.turn() for message in request.messages], request.chat_template_kwargs)
        self._model.check_token_ids(prompt, "messages")
        self._check_count(request, 1, "messages")
        config, stops = self._sampling(request, length, template.end_token_ids)
        choices = self._choices(request, [prompt], 0, length, config, "messages")
        return _plan(request, choices, [], config, stops, context_tokens=0)

    def _prompts(self, request: CompletionRequest) -> list[list[int]]:
        prompt = request.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            prompt = [prompt]
        if not prompt:
            message = "prompt is an empty list; give a text, or a list with at least one"
            raise RequestError(422, message, "prompt", "invalid_value")
        # Before so many are encoded.
        self._check_count(request, len(prompt), "prompt")
        rows = [self._model.loaded.encode(text) if isinstance(text, str) else text for text in prompt]
        for row in rows:
            self._model.check_token_ids(row, "prompt")
        return rows

    def _sampling(
        self, request: CompletionRequest | ChatRequest, length: "_Length", end_token_ids: Sequence[int]
    ) -> tuple[SamplerConfig, tuple[str, ...]]:
        """The sampler's settings, and the texts that end a completion."""
        limit = self._limits.max_completion_tokens
        if length.asked is not None and length.asked > limit:
            message = f"{length.field}={length.asked} is more than the {limit} of this server"
            raise RequestError(422, message, length.field, "invalid_value")
        stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
        if len(stops) > MAX_STOPS:
            raise RequestError(422, f"stop has {len(stops)} texts; give at most {MAX_STOPS}", "stop", "invalid_value")
        settings = request.sampler_settings()
        if length.asked is not None:
            settings["max_new_tokens"] = length.asked
        texts = tuple(text for text in stops if text not in self._model.special_tokens)
        if texts:
            settings["stop_strings"] = texts
        config = self._model.sampler_config(request.preset, settings)
        if config.steps_per_block is not None and config.steps_per_block > config.max_new_tokens:
            message = f"steps_per_block={config.steps_per_block} is more than max_tokens, and every step finds a token"
            raise RequestError(422, message, "steps_per_block", "invalid_value")
        named = [self._model.special_tokens[text] for text in stops if text not in texts]
        for field, ids in (("stop", named), ("stop_token_ids", config.stop_token_ids)):
            if self._model.loaded.mask_token_id in ids:
                message = f"{field} names the mask token, which is never generated; leave it out"
                raise RequestError(422, message, field, "invalid_value")
        ends = [*config.stop_token_ids, *named]
        if config.stop_at_eos:
            ends += end_token_ids
        config = replace(config, stop_token_ids=tuple(dict.fromkeys(ends)))
        self._model.check_config(config)
        return config, config.stop_strings

    def _choices(
        self,
        request: CompletionRequest | ChatRequest,
        prompts: list[list[int]],
        suffix_tokens: int,
        length: "_Length",
        config: SamplerConfig,
        source: str,
    ) -> list[Choice]:
        choices = []
        for prompt in prompts:
            start = _start(prompt, config)
            holes = self._hole_count(len(start) + suffix_tokens, length, config, source)
            choices += [Choice(start, holes, index) for index in range(request.n or 1)]
        return choices

    def _check_count(self, request: CompletionRequest | ChatRequest, prompts: int, source: str) -> None:
        samples, limit = request.n or 1, self._limits.max_rows_per_request
        if samples * prompts > limit:
            message = f"{prompts} prompts with n={samples} are more than the {limit} completions of a request"
            raise RequestError(422, message, "n" if samples > 1 else source, "invalid_value")

    def _hole_count(self, given: int, length: "_Length", config: SamplerConfig, source: str) -> int:
        room = self._model.max_length - given
        least = length.asked or 1
        if room >= least:
            return length.asked or min(config.max_new_tokens, room, self._limits.max_completion_tokens)
        fix = f"shorten {source}" + (f" or lower {length.field}" if length.asked else "")
        raise RequestError(
            422,
            f"{given} given tokens and {least} new ones are more than the {self._model.max_length} that fit; {fix}",
            length.field if length.asked and room > 0 else source,
            "context_length_exceeded",
        )


class _Length(NamedTuple):
    """How many tokens a request asks for, and in which field."""

    asked: int | None
    field: str


def _plan(
    request: CompletionRequest | ChatRequest,
    choices: list[Choice],
    suffix: list[int],
    config: SamplerConfig,
    stops: tuple[str, ...],
    context_tokens: int,
) -> Plan:
    if request.canvas and not request.stream:
        message = "canvas=true shows the steps of a stream; set stream=true as well"
        raise RequestError(422, message, "canvas", "invalid_value")
    seeds = (request.seed, config.seed, secrets.randbits(63))
    seed = next(seed for seed in seeds if seed is not None)
    # Samples share their prompt.
    prompt_tokens = sum(len(choice.prompt) + len(suffix) for choice in choices if choice.row_id == 0)
    return Plan(choices, suffix, config, seed, stops, context_tokens, prompt_tokens)


def _start(prompt: list[int], config: SamplerConfig) -> list[int]:
    """The prompt, or the start token where it is empty."""
    if prompt or (config.bos_token_id is None and not config.right_shift):
        return prompt
    if config.bos_token_id is None:
        message = "prompt is empty, and this model needs a token to go on from; start with a token"
        raise RequestError(422, message, "prompt", "invalid_value")
    return [config.bos_token_id]
