"""Our own commands under ``nemo dllm``, and what the ``nemo`` command needs to read our recipes' arguments."""

import collections.abc
import inspect
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Union, get_args

from nemo_run.cli.cli_parser import type_parser

from nemo_dllm.cli.sampling import COMMANDS, REQUIRED, Command, Option
from nemo_dllm.recipes.builder import RECIPES
from nemo_dllm.recipes.entrypoints import dllm_command
from nemo_dllm.recipes.plan import plan


def _parse_union(value: str, annotation: types.UnionType) -> Any:
    """Members that take any text come last: ``["a", "b"]`` is a list for ``str | Sequence[str]``."""
    members = sorted(get_args(annotation), key=lambda member: member in (str, Path))
    return type_parser.parse_union(value, Union[tuple(members)])  # noqa: UP007


# nemo_run reads Optional[str] and List[str], but not str | None and Sequence[str], as fields here are declared.
type_parser.register_parser(types.UnionType)(_parse_union)
type_parser.register_parser(collections.abc.Sequence)(type_parser.parse_list)


@dllm_command(
    name="plan",
    help="Tell whether a recipe fits: recipe=NAME gpus=8 memory=80, and fields of the recipe, as data.seq_length=8192",
)
def print_plan(recipe: str, gpus: int | None = None, memory: float = 80.0, overrides: Sequence[str] = ()) -> None:
    """Print what a recipe needs of each GPU, and layouts that fit.

    Args:
        recipe, gpus, memory, overrides: see ``recipes.plan.plan``.
    """
    print(plan(recipe, gpus, memory, overrides=overrides))


@dllm_command(help="List the names that --factory takes")
def recipes() -> None:
    """Print every recipe's name and what it does."""
    width = max(map(len, RECIPES))
    for name, recipe in RECIPES.items():
        print(f"{name:{width}}  {recipe.__doc__.splitlines()[0]}")


def _sampling_command(command: Command) -> Callable[..., None]:
    """A command of ``cli.sampling`` as a function that nemo_run reads arguments for."""

    def run_command(**given: Any) -> None:
        command.run(given)

    parameters = [
        inspect.Parameter(
            option.name, inspect.Parameter.KEYWORD_ONLY, annotation=_annotation(option), default=option.default
        )
        for option in command.options
    ]
    run_command.__name__ = run_command.__qualname__ = command.name
    run_command.__signature__ = inspect.Signature(parameters)
    run_command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run_command


def _annotation(option: Option) -> Any:
    """nemo_run reads sequences, and no tuples of any length."""
    return Sequence[get_args(option.type)[0]] if Ellipsis in get_args(option.type) else option.type


def _usage(command: Command) -> str:
    """nemo_run shows nothing of the arguments of a command without an executor but this text."""
    required = " ".join(f"{option.name}=..." for option in command.options if option.default is REQUIRED)
    others = ", ".join(option.name for option in command.options if option.default is not REQUIRED)
    return f"{command.summary} {required}; further: {others} (nemo-dllm {command.name} --help explains them)"


for sampling_command in COMMANDS:
    dllm_command(
        _sampling_command(sampling_command),
        name=sampling_command.name,
        help=_usage(sampling_command),
    )
