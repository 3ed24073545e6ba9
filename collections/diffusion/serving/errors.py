"""Errors of requests, in the form that OpenAI's clients read."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from nemo_dllm.collections.diffusion.sampling import sampler_fields

# Names of the sampler's settings that requests call otherwise.
REQUEST_NAMES = {"max_new_tokens": "max_tokens", "stop_strings": "stop"}

_NAME = re.compile(r"\w+")
_TYPES = ("str", "int", "float", "bool", "TextPart")


class RequestError(Exception):
    """A request that gets an error instead of an answer.

    Args:
        status: of HTTP.
        message: for the user; names value and fix.
        param: the field of the request that is at fault.
        code: a short name that programs compare with.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        message = _shortened(message)
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict:
        """What the client gets."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def _shortened(message: str) -> str:
    """Values that fill pages are no help, and clients choose them."""
    return message if len(message) <= 1_000 else f"{message[:600]} ... {message[-300:]}"


@contextmanager
def naming_the_field(default: str | None = None) -> Iterator[None]:
    """Turn a ValueError about a setting ("steps=0 must be ...") into an error of the request that names its field.

    Args:
        default: the field at fault where the message starts with no other one's name.
    """
    try:
        yield
    except ValueError as error:
        raise setting_error(str(error), default) from error


def setting_error(message: str, default: str | None = None) -> RequestError:
    """The error about a setting, under the name that it has in requests."""
    word = _NAME.match(message)
    for ours, theirs in REQUEST_NAMES.items():
        message = re.sub(rf"\b{ours}\b", theirs, message)
    param = default
    if default is None and word and word[0] in sampler_fields():
        param = REQUEST_NAMES.get(word[0], word[0])
    return RequestError(422, message, param, "invalid_value")


def of_validation(errors: Sequence[Mapping[str, Any]], content_type: str) -> RequestError:
    """Name the first field that is wrong, and all that is wrong with it.

    Args:
        errors: pydantic's, of a body.
        content_type: that the client has named.
    """
    first = errors[0]
    if first["type"] == "json_invalid":
        return RequestError(400, f"the body is no JSON: {first['ctx']['error']}", code="invalid_json")
    if len(first["loc"]) < 2:
        fix = "" if "json" in content_type else "; send JSON with Content-Type: application/json"
        what = "empty" if first["type"] == "missing" else "no JSON object"
        return RequestError(422, f"the body is {what}{fix or '; send an object of fields'}", code="invalid_value")
    field = str(first["loc"][1])
    if first["type"] == "extra_forbidden" and len(first["loc"]) == 2:
        message = f"{field} is no field of this endpoint; /openapi.json lists them"
        return RequestError(422, message, field, "unknown_field")
    about = [error for error in errors if error["loc"][1:2] == first["loc"][1:2]]
    # A check of ours has read the value as the type that was meant; other members of its union say nothing then.
    about = [error for error in about if error["type"] == "value_error"] or about
    texts = {f"{_place(error['loc'][1:])}: {error['msg'].removeprefix('Value error, ')}": None for error in about}
    return RequestError(422, "; ".join(list(texts)[:4]), field, "invalid_value")


def _place(path: Sequence[str | int]) -> str:
    """Fields and places in lists; pydantic names the members of unions as well, which no body has."""
    names = [str(part) for part in path[1:] if isinstance(part, int) or _NAME.fullmatch(part)]
    return ".".join([str(path[0]), *(name for name in names if name not in _TYPES)])


def of_http(status: int, detail: str, method: str, path: str, allowed: str) -> RequestError:
    """The error of a request that no endpoint has seen.

    Args:
        status, detail: of the framework.
        method, path: of the request.
        allowed: methods that the path has, for status 405.
    """
    if status == 400:
        return RequestError(400, "the body is no JSON that can be read", code="invalid_json")
    if status == 405:
        message = f"{method} {path} is no endpoint; ask with {allowed}"
        return RequestError(405, message, code="not_found")
    if status == 404:
        return RequestError(404, f"{method} {path} is no endpoint; /openapi.json lists them", code="not_found")
    return RequestError(status, detail)
