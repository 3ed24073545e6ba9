"""Rows of chat data sets, in the shapes that are in use, as conversations in one shape."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
"""Role names in use, in small letters, with those that chat templates know."""

FIELDS = ("messages", "conversations", "prompt", "completion", "instruction", "input", "output", "system", "tools")


# Of these a row has one.
_SHAPES = (("messages",), ("conversations",), ("prompt", "completion"), ("instruction", "output"))


class Conversation(NamedTuple):
    """Messages for a chat template, ending with an assistant's turn.

    messages: dicts with `role` (a value of `ROLES`), `content` (str) and whatever else the row has for the template
        (`reasoning_content`, `tool_calls`, ...).
    tools: JSON schemas for the template, or None.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None

    def assistant_turns(self) -> list[int]:
        """Positions of the assistant's messages."""
        return [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]


def is_conversation(row: Mapping[str, Any]) -> bool:
    """Whether a row has the fields of one, whatever is in them."""
    return any(all(row.get(name) is not None for name in shape) for shape in _SHAPES)


def read_conversation(row: Mapping[str, Any], columns: Mapping[str, str] | None = None) -> Conversation:
    """Read one row, which has one of: `messages` or `conversations` (lists of role/content or from/value),
    `prompt` and `completion` (texts or lists of messages), or `instruction`, `input` (optional) and `output`.

    Fields that are null count as missing; `tools` may be JSON text. What follows the last assistant's turn is left out:
    no answer depends on it.

    Args:
        row: field names and values.
        columns: for fields of `FIELDS`, how they are called in the row, e.g. {"prompt": "question"}.

    Raises:
        ValueError: the row holds no conversation, or no answer; says why.
    """
    names = check_columns(columns or {})
    fields = {name: row[names.get(name, name)] for name in FIELDS if row.get(names.get(name, name)) is not None}
    messages = [_message(message, turn) for turn, message in enumerate(_turns(fields, row))]
    if isinstance(fields.get("system"), str) and fields["system"] and messages[:1] and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": fields["system"]})
    answered = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not answered:
        raise ValueError("there is no turn of the assistant")
    for turn in answered:
        if not messages[turn]["content"].strip() and not messages[turn].get("tool_calls"):
            raise ValueError(f"turn {turn} of the assistant is empty")
    return Conversation(messages[: answered[-1] + 1], _tools(fields.get("tools")) or None)


def check_columns(columns: Mapping[str, str]) -> Mapping[str, str]:
    """Raise ValueError for names that are not in `FIELDS`; returns the argument."""
    if unknown := sorted(set(columns) - set(FIELDS)):
        raise ValueError(f"columns={dict(columns)} has unknown {', '.join(unknown)}; known: {', '.join(FIELDS)}")
    return columns


def _turns(fields: Mapping[str, Any], row: Mapping[str, Any]) -> Sequence[Any]:
    for name in ("messages", "conversations"):
        if name in fields:
            return _listed(fields[name], name)
    if "prompt" in fields and "completion" in fields:
        return [*_side(fields, "prompt", "user"), *_side(fields, "completion", "assistant")]
    if "instruction" in fields and "output" in fields:
        question = "\n\n".join(text for name in ("instruction", "input") if (text := _text(fields, name)))
        return [{"role": "user", "content": question}, *_side(fields, "output", "assistant")]
    found = [f"{name} (null)" if value is None else str(name) for name, value in list(row.items())[:8]]
    raise ValueError(
        "there are no fields messages, conversations, prompt and completion, or instruction and output, only "
        f"{', '.join(found) or 'none'}; name them with `columns`"
    )


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError as error:
            raise ValueError(f"field tools is text that is not JSON, {error}") from error
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        raise ValueError("field tools is not a list of JSON schemas")
    return tools


def _side(fields: Mapping[str, Any], name: str, role: str) -> Sequence[Any]:
    value = fields[name]
    return [{"role": role, "content": _text(fields, name)}] if isinstance(value, str) else _listed(value, name)


def _listed(value: Any, name: str) -> Sequence[Any]:
    columns = list(value.values()) if isinstance(value, Mapping) else []
    # As datasets give lists of objects that were declared as a sequence.
    if columns and all(isinstance(column, list) and len(column) == len(columns[0]) for column in columns):
        return [dict(zip(value, message, strict=True)) for message in zip(*columns, strict=True)]
    if not isinstance(value, list | tuple):
        raise ValueError(f"field {name} is {type(value).__name__}, not a list of messages")
    return value


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name, "")
    if not isinstance(value, str):
        raise ValueError(f"field {name} is {type(value).__name__}, not text")
    return value


def _message(message: Any, turn: int) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"turn {turn} is {type(message).__name__}, not a message")
    given = {name: value for name, value in message.items() if value is not None}
    role = given.pop("role", None) or given.pop("from", None)
    if not isinstance(role, str) or role.lower() not in ROLES:
        raise ValueError(f"turn {turn} has the role {role!r}; known: {', '.join(ROLES)}")
    content = given.pop("content", None)
    content = given.pop("value", "") if content is None else content
    if isinstance(content, list):
        content = "".join(_text_of_piece(piece, turn) for piece in content)
    if not isinstance(content, str):
        raise ValueError(f"turn {turn} has content of type {type(content).__name__}, not text")
    if not isinstance(given.get("reasoning_content", ""), str):
        raise ValueError(
            f"turn {turn} has reasoning_content of type {type(given['reasoning_content']).__name__}, not text"
        )
    # Templates ask whether there are calls by the name of the field alone.
    given = {name: value for name, value in given.items() if name != "tool_calls" or value}
    return {"role": ROLES[role.lower()], "content": content, **given}


def _text_of_piece(piece: Any, turn: int) -> str:
    if isinstance(piece, Mapping) and isinstance(piece.get("text"), str):
        return piece["text"]
    raise ValueError(f"turn {turn} has content other than text")
