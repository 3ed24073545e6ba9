"""Answers in the shapes that OpenAI's clients read."""

import json
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from nemo_dllm.collections.diffusion.serving.answer import ChoiceUpdate
from nemo_dllm.collections.diffusion.serving.errors import RequestError

DONE = b"data: [DONE]\n\n"


class FinishedChoice(NamedTuple):
    """A whole completion, or why there is none; ``tokens`` counts what ended it as well."""

    text: str
    finish_reason: str
    tokens: int
    error: RequestError | None = None


def event(data: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """``usage``; tokens behind the end of a text are not counted."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


class AnswerShape(NamedTuple):
    """Where an endpoint's answers have what.

    Attributes:
        id_prefix: of the answer's id.
        whole, chunk: names of the objects, of a whole answer and of an event.
        content: the part of a choice that holds its text.
        delta: the same in an event.
        opening: what the first event of each choice holds; None for no such event.
    """

    id_prefix: str
    whole: str
    chunk: str
    content: Callable[[str], dict[str, Any]]
    delta: Callable[[str], dict[str, Any]]
    opening: dict[str, Any] | None = None


def _text(text: str) -> dict[str, Any]:
    return {"text": text}


def _message(text: str) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": text, "refusal": None}}


def _message_delta(text: str) -> dict[str, Any]:
    return {"delta": {"content": text} if text else {}}


COMPLETION = AnswerShape("cmpl", "text_completion", "text_completion", _text, _text)
CHAT = AnswerShape(
    "chatcmpl",
    "chat.completion",
    "chat.completion.chunk",
    _message,
    _message_delta,
    {"delta": {"role": "assistant", "content": ""}},
)


class AnswerWriter:
    """Writes one answer.

    Args:
        shape: of the endpoint.
        model: its name.
    """

    def __init__(self, shape: AnswerShape, model: str):
        self._shape = shape
        self._head = {"id": f"{shape.id_prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, choices: Sequence[FinishedChoice], prompt_tokens: int) -> dict[str, Any]:
        """The answer of a request that does not stream."""
        bodies = [
            _choice(index, self._shape.content(choice.text), choice.finish_reason, choice.error)
            for index, choice in enumerate(choices)
        ]
        counts = usage(prompt_tokens, sum(choice.tokens for choice in choices))
        return {"object": self._shape.whole, **self._head, "choices": bodies, "usage": counts}

    def opening(self, choices: int) -> bytes:
        """Events before any text."""
        content = self._shape.opening
        return b"" if content is None else b"".join(self._event([_choice(i, content)]) for i in range(choices))

    def update(self, update: ChoiceUpdate) -> bytes:
        """The event of an update; the canvas is a further field of its choice."""
        canvas = {} if update.canvas is None else {"canvas": update.canvas}
        choice = _choice(update.index, self._shape.delta(update.text), update.finish_reason, update.error)
        return self._event([choice | canvas])

    def counts(self, prompt_tokens: int, completion_tokens: int) -> bytes:
        """The event with the counts, for requests that ask."""
        return self._event([], usage=usage(prompt_tokens, completion_tokens))

    def _event(self, choices: list[dict[str, Any]], **further: Any) -> bytes:
        return event({"object": self._shape.chunk, **self._head, "choices": choices, **further})


def _choice(
    index: int, content: dict[str, Any], finish_reason: str | None = None, error: RequestError | None = None
) -> dict[str, Any]:
    told = {} if error is None else error.body()
    return {"index": index, **content, "logprobs": None, "finish_reason": finish_reason, **told}
