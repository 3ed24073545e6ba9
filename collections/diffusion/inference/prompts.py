"""Prompts from files."""

import json
from pathlib import Path

JSON_LINES = ".jsonl"


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file: of each line the field ``prompt``, in a file of JSON lines; else the whole text is one.

    Raises:
        ValueError: where a line is no JSON object with a text ``prompt``, or there is none; names the line. And
            for an empty file.
    """
    text = read_utf8(path)
    if not is_json_lines(path):
        if not text:
            raise ValueError(
                f"prompt_file={path} is empty; write a prompt into it, or leave it out to start from nothing"
            )
        return [text]
    prompts = [
        _prompt(line, f"{path}, line {number}") for number, line in enumerate(text.split("\n"), start=1) if line.strip()
    ]
    if not prompts:
        raise ValueError(f'{path} holds no line; write {{"prompt": "..."}} on each')
    return prompts


def is_json_lines(path: Path) -> bool:
    """Whether a file's name says that it has a prompt per line."""
    return path.suffix.lower() == JSON_LINES


def read_utf8(path: Path) -> str:
    """The text of a file, without the mark that some editors put before it.

    Raises:
        ValueError: where it is not UTF-8.
    """
    try:
        return path.read_bytes().decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); convert it") from error


def _prompt(line: str, place: str) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: no JSON ({error.msg} at character {error.pos + 1})") from error
    except (ValueError, RecursionError) as error:  # Numbers of more digits, and lists in lists, than Python reads.
        raise ValueError(f"{place}: JSON that cannot be read ({error})") from error
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
        raise ValueError(f'{place}: no text "prompt" in it; write {{"prompt": "..."}}')
    return row["prompt"]
