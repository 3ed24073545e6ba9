"""JSON files of checkpoint folders."""

import json
from pathlib import Path
from typing import Any


def read_json_object(file: Path) -> dict[str, Any]:
    """Content of a JSON file that holds an object.

    Raises:
        FileNotFoundError: where it is absent.
        ValueError: for anything else.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing: the checkpoint is incomplete; fetch it again")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no valid JSON ({error}); fetch it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds no JSON object but {str(content)[:40]!r}; fetch it again")
    return content
