"""Errors of requests, in the form that OpenAI's clients read."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

# Names of the sampler's settings that requests call otherwise.
REQUEST_NAMES = {"max_new_tokens": "max_tokens", "stop_strings": "stop"}

_FIELD = re.compile(r"(\w+)(?==|\[| )")


class RequestError(Exception):
    """A request that gets an error instead of an answer.

    Args:
        status: of HTTP.
        message: for the user; names value and fix.
        param: the field of the request that is at fault.
        code: a short name that programs compare with.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict:
        """What the client gets."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


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
    named = _FIELD.match(message) if default is None else None
    for ours, theirs in REQUEST_NAMES.items():
        message = re.sub(rf"\b{ours}\b", theirs, message)
    param = REQUEST_NAMES.get(named[1], named[1]) if named else default
    return RequestError(422, message, param, "invalid_value")
