"""Recipes from files that ``--to-yaml`` wrote.

nemo_run reads these as arguments of the command, which fails: the command is NeMo's and the recipe's task is ours, null
is no number, and the file says what its root is. What the file holds is the recipe, whole; it is read as that.
"""

import importlib
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import nemo_run as run
import yaml
from nemo.collections import llm

TARGET, PARTIAL, CALL = "_target_", "_partial_", "_call_"
COMMANDS = {"pretrain": llm.pretrain, "finetune": llm.finetune}


def is_saved_recipe(path: str | Path) -> bool:
    """Whether a YAML file holds a whole recipe, not fields of one; errors as :func:`read_fields`."""
    return TARGET in read_fields(path)


def read_fields(path: str | Path) -> dict[str, Any]:
    """What a YAML file sets.

    Raises:
        ValueError: it is no YAML, or sets nothing.
    """
    try:
        content = yaml.safe_load(Path(path).read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} sets no field; write FIELD: VALUE, and run: {{factory: NAME}} for the recipe")
    return content


def read_recipe(path: str | Path, command: str) -> run.Partial:
    """The recipe of a file.

    Args:
        path: file that ``--to-yaml`` wrote.
        command: ``pretrain`` or ``finetune``.

    Raises:
        ValueError: the file holds no recipe, or one of another command.
        FileNotFoundError: it does not exist.
    """
    if not is_saved_recipe(path):
        raise ValueError(f"{path} holds no whole recipe; write it with --to-yaml")
    recipe = _build(read_fields(path))
    if recipe.__fn_or_cls__.__name__ != command:
        raise ValueError(f"{path} holds a recipe of `{recipe.__fn_or_cls__.__name__}`, not of `{command}`")
    return recipe


def _build(value: Any) -> Any:
    if isinstance(value, list):
        return [_build(item) for item in value]
    if not isinstance(value, dict):
        return value
    if TARGET not in value:
        return {name: _build(item) for name, item in value.items()}
    target = _named(value[TARGET])
    if value.get(CALL) is False:
        return target
    fields = {name: _build(item) for name, item in value.items() if name not in (TARGET, PARTIAL)}
    return (run.Partial if value.get(PARTIAL) else run.Config)(target, **fields)


def _named(path: str) -> Any:
    """What a dotted name stands for: ``package.module.Class`` or ``package.module.Class.member``.

    Raises:
        ValueError: there is nothing of that name.
    """
    parts = path.split(".")
    for end in range(len(parts) - 1, 0, -1):
        try:
            return reduce(getattr, parts[end:], importlib.import_module(".".join(parts[:end])))
        except (ModuleNotFoundError, AttributeError):
            continue
    raise ValueError(f"{TARGET}={path} does not exist here; was the file written with another version?")


def _factory(command: str) -> Callable[[str], run.Partial]:
    def saved(path: str) -> run.Partial:
        return read_recipe(path, command)

    saved.__doc__ = f"""The recipe that ``--to-yaml`` of ``{command}`` wrote.

    Args:
        path: the file.
    """
    return saved


for _command, _target in COMMANDS.items():
    run.cli.factory(target=_target, name="saved")(_factory(_command))
