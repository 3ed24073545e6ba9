"""Our commands under ``nemo dllm``, whose errors are those of ``nemo-dllm``."""

import difflib
import inspect
import logging
import sys
from collections.abc import Mapping
from functools import partial
from typing import get_args

import nemo_run as run
from nemo_run.cli.api import Entrypoint
from nemo_run.cli.cli_parser import CLIException
from rich.console import Console

from nemo_dllm.cli.errors import USAGE, is_for_users, one_line
from nemo_dllm.console import log_to_standard_error
from nemo_dllm.recipes.command_line import with_empty_text

# Options that no parameter can be called by, as words of Python, and the parameters that they stand for.
_ALIASES = {"for": "engine"}
# The parameter that takes fields of a recipe.
_OVERRIDES = "overrides"


class _Entrypoint(Entrypoint):
    """Prints what a user can mend as one line on standard error, with exit code 2; nemo_run has 1 for the rest."""

    def _execute_simple(self, args: list[str], console: Console) -> None:
        # It logs the errors that it raises as well.
        parser_log = logging.getLogger(CLIException.__module__)
        level = parser_log.level
        parser_log.setLevel(logging.CRITICAL)
        try:
            log_to_standard_error()
            args = self._in_parameters(args)
            self._check_names(args)
            super()._execute_simple(args, console)
        except Exception as error:
            if not is_for_users(error):
                raise
            print(f"error: {_explain(error, args)}", file=sys.stderr)
            sys.exit(USAGE)
        finally:
            parser_log.setLevel(level)

    def _in_parameters(self, args: list[str]) -> list[str]:
        """Arguments as NAME=VALUE, as nemo_run has them, of that and of what ``nemo-dllm`` takes.

        That is --name VALUE, --name=VALUE, --flag and --no-flag, and without names the values of parameters that have
        no default, in their order. A command with ``overrides`` takes fields of a recipe among them.
        """
        parameters = inspect.signature(self.fn).parameters
        found, unnamed, rest = [], [], iter(args)
        for argument in rest:
            name, value = _named(argument, parameters)
            if name is None:
                unnamed.append(argument)
            else:
                value = next(rest, None) if value is None else value
                found.append(argument if value is None else with_empty_text(f"{name}={value}"))
        given = {argument.partition("=")[0] for argument in found}
        required = [name for name, p in parameters.items() if p.default is p.empty and name not in given]
        found = [f"{name}={value}" for name, value in zip(required, unnamed, strict=False)] + found
        found += unnamed[len(required) :]
        if _OVERRIDES not in parameters:
            return found
        fields = [argument for argument in found if "." in argument.partition("=")[0]]
        return [argument for argument in found if argument not in fields] + [f"{_OVERRIDES}={fields}"] * bool(fields)

    def _check_names(self, args: list[str]) -> None:
        """Check that all arguments are NAME=VALUE of known names, and that none is missing."""
        parameters = inspect.signature(self.fn).parameters
        given = set()
        for argument in args:
            name, is_named, _ = argument.partition("=")
            if not parameters:
                raise ValueError(f"{argument} is one argument too many: {self.name} takes none")
            if not is_named and not argument.startswith("--"):
                raise ValueError(
                    f"{argument} is one argument too many; each further one has a name, as {list(parameters)[-1]}=..."
                )
            if not is_named:
                meant = argument.removeprefix("--").replace("-", "_")
                meant = meant if meant in parameters else next(iter(parameters))
                raise ValueError(f"{argument} is not NAME=VALUE, as {meant}=...")
            if name not in parameters:
                near = difflib.get_close_matches(name, parameters, n=3, cutoff=0.6)
                known = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(parameters)}"
                raise ValueError(f"{name} is unknown; {known}")
            given.add(name)
        for name, parameter in parameters.items():
            if parameter.default is parameter.empty and name not in given:
                raise ValueError(f"{name} is missing; add {name}=...")


def _named(argument: str, parameters: Mapping[str, inspect.Parameter]) -> tuple[str | None, str | None]:
    """Name and value of an argument: no value where the next argument is it, and no name where it is a value alone."""
    name, is_named, value = argument.partition("=")
    option = name.removeprefix("--").replace("-", "_") if name.startswith("--") else None
    known = _ALIASES.get(option or name, option or name)
    if option is None:
        # What is before = may be a part of a path, or of a recipe with arguments.
        if is_named and name.replace(".", "_").isidentifier():
            return known if known in parameters else name, value
        return (known, None) if name in _ALIASES and known in parameters else (None, None)
    if is_named:
        return known, value
    flag = known if known in parameters else known.removeprefix("no_")
    annotation = parameters[flag].annotation if flag in parameters else None
    return (flag, str(flag == known)) if bool in (annotation, *get_args(annotation)) else (known, None)


def _explain(error: Exception, args: list[str]) -> str:
    """One line; nemo_run's own errors are several, about a value that has another type."""
    if not isinstance(error, CLIException):
        return one_line(error)
    at_fault = next((argument for argument in args if argument in (error.arg, *error.context.values())), error.arg)
    reason = getattr(error, "reason", None)
    wanted = reason.get("expected_type") if isinstance(reason, dict) else None
    return f"{at_fault} cannot be read" + (f" as {getattr(wanted, '__name__', wanted)}" if wanted else "")


dllm_command = partial(run.cli.entrypoint, namespace="dllm", enable_executor=False, entrypoint_cls=_Entrypoint)
"""``run.cli.entrypoint`` for a command under ``nemo dllm``."""
