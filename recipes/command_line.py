"""``nemo llm pretrain`` and ``nemo llm finetune`` inside another command: nemo_run's own, with less output."""

import difflib
import inspect
import logging
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import UnionType
from typing import Literal, Union, get_args, get_origin

import nemo_run as run
import typer
from nemo.collections import llm
from nemo.utils import AppState as RunState
from nemo.utils.get_rank import is_global_rank_zero
from nemo_run.cli import api
from nemo_run.cli.cli_parser import CLIException, ParseError
from nemo_run.cli.lazy import LazyEntrypoint
from torchx.specs import AppState

from nemo_dllm.collections.diffusion.training.termination import exit_code_of
from nemo_dllm.recipes.builder import RECIPES
from nemo_dllm.recipes.executors import PASSED_ON
from nemo_dllm.recipes.saved import is_saved_recipe

# A configuration of Megatron has two hundred fields.
MAX_LISTED = 40


def run_task(task: Callable, arguments: list[str], *, verbose: bool) -> None:
    """Run a task of ``nemo llm`` as that command does, without asking first.

    Args:
        task: ``nemo.collections.llm.pretrain`` or ``finetune``.
        arguments: of the command, as of ``nemo llm pretrain``.
        verbose: print all that nemo_run prints, the whole configuration to begin with.

    Raises:
        ValueError: for an argument that cannot be read; names the nearest known ones.
        SystemExit: where it is interrupted, with 130.
        Exception: whatever the run raises.
    """
    entrypoint = task.cli_entrypoint
    app = typer.Typer(pretty_exceptions_enable=False)
    # With --verbose nemo_run passes exceptions on.
    arguments = ["--yes", "--verbose", *arguments]
    name = f"nemo-dllm {task.__name__}"
    if verbose:
        entrypoint.cli(app)
        _run(app, arguments, name)
        return
    context_class, entrypoint.run_ctx_cls = entrypoint.run_ctx_cls, QuietRun
    try:
        entrypoint.cli(app)
    finally:
        entrypoint.run_ctx_cls = context_class
    with _without_announcements():
        _run(app, arguments, name)


def read_recipe(factory: str, overrides: Sequence[str] = ()) -> run.Partial:
    """A recipe with overrides, read as ``pretrain`` or ``finetune`` reads them.

    Args:
        factory: as ``--factory`` takes it: a name of ``RECIPES``, or a call of it.
        overrides: as ``trainer.max_steps=100``.

    Raises:
        ValueError: for what cannot be read; names the nearest known ones.
    """
    task = getattr(llm, RECIPES[name_of(factory)]().__fn_or_cls__.__name__)
    with _without_announcements():
        return QuietRun(name=task.__name__, factory=factory).parse_fn(task, list(overrides))


def with_empty_text(argument: str) -> str:
    """FIELD= as FIELD='', which is what a shell has made it of; nemo_run takes it for another field."""
    return f"{argument}''" if argument.endswith("=") else argument


def _run(app: typer.Typer, arguments: list[str], name: str) -> None:
    # What it returns is 130 where it was interrupted, and else None.
    if code := app(args=arguments, prog_name=name, standalone_mode=False):
        sys.exit(code)


class QuietRun(api.RunContext):
    """nemo_run's context without a table of the configuration before a run; after it, a word on where things are."""

    def parse_fn(self, fn: Callable, args: list[str], **defaults: object) -> run.Partial:
        """Read recipe and overrides.

        Raises:
            ValueError: for a missing or unknown recipe, and overrides that do not fit it.
        """
        for argument in args:
            if argument.startswith("-") or "=" not in argument:
                hint = f"; did you mean --factory {argument}?" if name_of(argument) in RECIPES else ""
                raise ValueError(f"{argument} is neither an option of nemo llm {fn.__name__} nor FIELD=VALUE{hint}")
        args = [with_empty_text(argument) for argument in args]
        if self.yaml and not Path(self.yaml).is_file():
            raise ValueError(f"--yaml {self.yaml} is no file that is there; name a file of fields of a recipe")
        if self.yaml and not self.factory and is_saved_recipe(self.yaml):
            self.factory, self.yaml = f"saved(path='{self.yaml}')", None
        if not self.factory and not self.yaml:
            raise ValueError("no recipe is named; add --factory NAME (`nemo-dllm recipes` lists them) or --yaml FILE")
        factory = LazyEntrypoint(fn, factory=self.factory, yaml=self.yaml)._factory_
        try:
            recipe = LazyEntrypoint(fn, factory=factory).resolve(ctx=self)
        except CLIException as error:
            raise ValueError(f"--factory {factory}: {_explain(error, _parameters_of_recipe(factory))}") from error
        except ValueError as error:
            if str(error).startswith("Invalid factory format"):
                message = f"--factory {factory} cannot be read; write NAME or 'NAME(argument=value)', in quotes"
                raise ValueError(message) from error
            if "No matching factory" not in str(error):
                raise
            raise ValueError(_no_such_recipe(factory, fn.__name__)) from error
        try:
            return super().parse_fn(fn, args, **defaults)
        except CLIException as error:
            raise ValueError(_explain(error, recipe)) from error

    def _execute_task(self, fn: Callable, task_args: list[str]) -> None:
        if self.dryrun or self.repl or self.to_yaml or self.to_toml or self.to_json:
            super()._execute_task(fn, task_args)
            return
        task = self.parse_fn(fn, task_args)
        if self.executor is not None and not self.direct:
            self._launch(task)
            return
        run.run(task, direct=True)
        if is_global_rank_zero():
            _print_places()

    def _launch(self, task: run.Partial) -> None:
        """Run a task elsewhere as ``run.run`` does, which does not tell how it ended.

        Raises:
            SystemExit: with 1, where it failed; with 130 or 143, where a signal that this process got ended it.
        """
        with run.Experiment(self.name, executor=self.executor) as experiment:
            experiment.add(task, name=self.name, plugins=self.plugins, tail_logs=True)
            experiment.run(detach=self.detach)
        if not self.detach and any(job.state != AppState.SUCCEEDED for job in experiment.jobs):
            sys.exit(exit_code_of(PASSED_ON[-1]) if PASSED_ON else 1)


def _print_places() -> None:
    folder = RunState().log_dir
    if folder is None:
        return
    folder = Path(os.path.relpath(folder)) if Path(folder).is_relative_to(Path.cwd()) else Path(folder)
    tensorboard = folder / "tensorboard"
    print(f"checkpoints: {folder / 'checkpoints'}")
    shown = f" (tensorboard --logdir {shlex.quote(str(tensorboard))})" if tensorboard.is_dir() else ""
    print(f"logs: {folder}{shown}")
    print(f"sample: nemo-dllm generate {shlex.quote(str(folder))} --prompt TEXT")


@contextmanager
def _without_announcements() -> Iterator[None]:
    """nemo_run prints that it configures its options, and logs errors that it raises as well."""
    parser_log = logging.getLogger(CLIException.__module__)
    level = parser_log.level
    parser_log.setLevel(logging.CRITICAL)
    api.print = lambda *_: None
    try:
        yield
    finally:
        del api.print
        parser_log.setLevel(level)


def name_of(factory: str) -> str:
    """The recipe that ``--factory`` names, alone or in a call."""
    return re.match(r"[\w.]*", factory)[0]


def _no_such_recipe(factory: str, command: str) -> str:
    name = name_of(factory)
    if name in RECIPES:
        other = {"pretrain": "finetune", "finetune": "pretrain"}[command]
        return f"--factory {name} is a recipe of `{other}`, not of `{command}`"
    return f"--factory {name} is unknown; {hint_of_recipes(name)}"


def hint_of_recipes(name: str) -> str:
    """What to name instead of a recipe that there is none of."""
    return " ".join(filter(None, (near_names(name, RECIPES), "`nemo-dllm recipes` lists the names")))


def _explain(error: CLIException, recipe: run.Partial | dict) -> str:
    """One line about what nemo_run says in several, with the whole recipe in them.

    Args:
        error: of reading an override.
        recipe: the recipe without overrides, or the parameters by name where they are at fault.
    """
    if isinstance(error, ParseError) and isinstance(error.reason, dict):
        key, value, expected = (error.reason[name] for name in ("key", "value", "expected_type"))
        return f"{key}={value} cannot be read as {' or '.join(dict.fromkeys(_kinds(expected)))}"
    key = error.context.get("key", error.arg)
    *parents, field = key.split(".")
    owner = recipe
    for parent in parents:
        owner = getattr(owner, parent, None)
    if owner is None:
        return f"{key} is unknown"
    fields = _fields(owner)
    known = ", ".join(fields) if len(fields) <= MAX_LISTED else f"the fields of {owner.__fn_or_cls__.__name__}"
    return f"{key} is unknown; {near_names(field, fields, '.'.join([*parents, ''])) or f'known: {known}'}"


def _kinds(expected: type) -> list[str]:
    """What a field takes: a type, the types of a union, the values of a literal."""
    if get_origin(expected) in (Union, UnionType):
        return [kind for member in get_args(expected) for kind in _kinds(member)]
    if get_origin(expected) is Literal:
        return [str(value) for value in get_args(expected)]
    return ["None" if expected is type(None) else getattr(expected, "__name__", str(expected))]


def near_names(name: str, known: dict | list, prefix: str = "") -> str:
    """A question after known names that begin with a name, or else resemble it; nothing where none does."""
    longer = [other for other in known if name and other.startswith(name)]
    matches = longer[:3] or difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(prefix + match for match in matches)}?" if matches else ""


def _fields(owner: run.Partial | dict) -> list[str]:
    return list(owner) if isinstance(owner, dict) else list(inspect.signature(owner.__fn_or_cls__).parameters)


def _parameters_of_recipe(factory: str) -> dict:
    name = name_of(factory)
    return dict(inspect.signature(RECIPES[name]).parameters) if name in RECIPES else {}
