"""The ``nemo-dllm`` command. NeMo's import takes many seconds, so it happens inside the commands that need it."""

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, get_args

import typer

from nemo_dllm.cli import data
from nemo_dllm.cli.errors import USAGE, has_the_word, in_options, is_first_process, is_for_users, one_line
from nemo_dllm.cli.sampling import COMMANDS, REQUIRED, Command, Option, check_alternatives, check_checkpoint

app = typer.Typer(
    help="Diffusion language models on NeMo: train them, sample from them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(data.app, name="data")

Verbose = Annotated[bool, typer.Option("--verbose", help="All output of NeMo, and tracebacks of errors.")]
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
ARGUMENTS = "[ARGUMENTS]"
UsageError = typer.BadParameter.__base__
"""Of arguments that click cannot read; typer has a click of its own or not, as its version is."""
ARGUMENTS_HELP = (
    "ARGUMENTS are those of the same command under `nemo llm`: --factory NAME or --factory 'NAME(argument=value)', "
    "--yaml FILE, and fields of the recipe, such as trainer.max_steps=100. `nemo-dllm recipes` lists the names."
)


def main() -> None:
    """Run the command; what a user can mend is one line on standard error and exit code 2."""
    try:
        # None, or what a command exits with.
        sys.exit(app(prog_name="nemo-dllm", standalone_mode=False) or 0)
    except UsageError as error:
        if message := " ".join(error.format_message().split()):  # Without arguments at all help has been shown instead.
            _show_error(f"{message.rstrip('.')} (`{error.ctx.command_path} --help`)")
        sys.exit(USAGE)
    except Exception as error:
        if "--verbose" in sys.argv or not is_for_users(error):
            raise
        _show_error(in_options(one_line(error), _options_of_command(sys.argv[1:])))
        sys.exit(USAGE)


def _show_error(message: str) -> None:
    # Processes of a training find the same; those of other commands may each have work of their own.
    if sys.argv[1:2] not in (["pretrain"], ["finetune"]) or has_the_word():
        print(f"error: {message}", file=sys.stderr)


@app.command()
def recipes(verbose: Verbose = False) -> None:
    """List the recipes, by the names that --factory takes."""
    _import("recipes.commands", verbose).recipes()


@app.command()
def plan(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="Name of a recipe, or 'NAME(argument=value)'.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="FIELD=VALUE", help="Fields of it, such as data.seq_length=8192.")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(help="How many there are (default: what trainer.devices=N says, or 8).")
    ] = None,
    memory: Annotated[float, typer.Option(help="Of each GPU, GB.")] = 80.0,
    verbose: Verbose = False,
) -> None:
    """Tell what a recipe needs of each GPU, and which layouts fit."""
    for override in overrides or ():
        name, _, value = override.partition("=")
        if name in ("gpus", "memory"):
            raise typer.BadParameter(f"{override} is no field of the recipe; write --{name} {value}")
    _import("recipes.commands", verbose).print_plan(recipe, gpus, memory, overrides or ())


@app.command(context_settings=PASS_ON, options_metavar=ARGUMENTS, epilog=ARGUMENTS_HELP)
def pretrain(context: typer.Context, verbose: Verbose = False) -> None:
    """Pretrain a model as a recipe says."""
    _train("pretrain", context.args, verbose)


@app.command(context_settings=PASS_ON, options_metavar=ARGUMENTS, epilog=ARGUMENTS_HELP)
def finetune(context: typer.Context, verbose: Verbose = False) -> None:
    """Fine-tune a model as a recipe says."""
    _train("finetune", context.args, verbose)


@app.command("import")
def import_hf(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Hugging Face folder, or hf://NAME on the Hub.")],
    output_path: Annotated[Path, typer.Argument(metavar="OUTPUT", help="Folder of the NeMo checkpoint to make.")],
    kind: Annotated[str | None, typer.Option(help="a2d, mdlm or bd3lm (default: what the source is).")] = None,
    mask_token_id: Annotated[int | None, typer.Option(help="Default: the source's, or a new token.")] = None,
    mask_init: Annotated[str, typer.Option(help="Of new rows: mean, random or zero.")] = "mean",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing folder.")] = False,
    verbose: Verbose = False,
) -> None:
    """Write a Hugging Face checkpoint as a NeMo checkpoint that trainings start from."""
    from nemo_dllm.collections.diffusion.model_source import source_path

    source_path(source, with_weights=True)
    options = {"kind": kind, "mask_token_id": mask_token_id, "mask_init": mask_init, "overwrite": overwrite}
    _import("recipes.conversion", verbose).import_hf(source, output_path, **options)


@app.command("export")
def export_hf(
    path: Annotated[Path, typer.Argument(metavar="PATH", exists=True, help="Run, or NeMo checkpoint.")],
    output_path: Annotated[Path, typer.Argument(metavar="OUTPUT", help="Hugging Face folder to make.")],
    engine: Annotated[
        str | None,
        typer.Option("--for", metavar="ENGINE", help="sglang or lmdeploy: what it loads (PATH may be a HF folder)."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing folder.")] = False,
    verbose: Verbose = False,
) -> None:
    """Write a NeMo checkpoint, of a run the latest, as a Hugging Face checkpoint."""
    check_checkpoint(path)
    _import("recipes.conversion", verbose).export_hf(path, output_path, overwrite=overwrite, engine=engine)


@app.command()
def verify(
    hf_path: Annotated[Path, typer.Argument(metavar="HF_DIR", exists=True, help="Hugging Face folder.")],
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", exists=True, help="Run, NeMo checkpoint or another such folder.")
    ],
    tolerance: Annotated[float, typer.Option(help="Largest absolute difference of weights and logits.")] = 1e-3,
    verbose: Verbose = False,
) -> None:
    """Compare all weights, and logits on real prompts; exit code 1 where they differ."""
    check_checkpoint(hf_path)
    check_checkpoint(checkpoint)
    _import("recipes.conversion", verbose).verify(hf_path, checkpoint, tolerance=tolerance)


def _sampling_command(command: Command) -> Callable[..., None]:
    """A command of ``cli.sampling`` as a function that typer understands."""

    def run(verbose: bool, **values: Any) -> None:
        try:
            check_alternatives(command, values)
        except ValueError as error:
            raise typer.BadParameter(in_options(str(error), _options_of_command([command.name]))) from error
        given = {name: None if value is NOTHING else value for name, value in values.items() if value is not None}
        if "columns" in given:
            given["columns"] = data.columns(given["columns"])
        if not verbose:
            _hide_warnings()
        command.run(given, lambda module: _import(module.removeprefix("nemo_dllm."), verbose))

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter(option.name, keyword, annotation=_annotated(option), default=_cli_default(option))
        for option in command.options
    ]
    parameters.append(inspect.Parameter("verbose", keyword, annotation=Verbose, default=False))
    run.__signature__ = inspect.Signature(parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _hide_warnings() -> None:
    from nemo_dllm.console import hide_warnings

    hide_warnings()


NOTHING = object()
"""Of sampler settings that the user sets to ``none``, where saying nothing leaves them to the preset."""


def _cli_default(option: Option) -> Any:
    """Settings that nobody gives are left to the preset."""
    return None if option.of_sampler else option.default


def _annotated(option: Option) -> Any:
    """The type of an option with what typer shows of it."""
    if option.default is REQUIRED:
        shown = {"metavar": option.name.upper(), "exists": option.exists, "help": option.help}
        return Annotated[option.type, typer.Argument(**shown)]
    if option.type == dict[str, str] | None:
        names, shown = [f"--{option.name.removesuffix('s')}"], {"metavar": "FIELD=NAME, repeated", "help": option.help}
        return Annotated[list[str] | None, typer.Option(*names, **shown)]
    name = f"--{option.name.replace('_', '-')}"
    names = [name] if option.type is bool and option.default is False else []
    shown: dict[str, Any] = {"help": option.help}
    if option.exists:
        shown |= {"exists": True, "dir_okay": False}
    if not option.of_sampler:
        return Annotated[option.type, typer.Option(*names, **shown)]
    shown |= {"rich_help_panel": "Sampler settings"}
    types = get_args(option.type)
    if Ellipsis in types:
        return Annotated[list[types[0]] | None, typer.Option(**shown, metavar=f"{types[0].__name__.upper()}, repeated")]
    if type(None) in types:
        shown |= {"parser": _or_none(types[0]), "metavar": f"{types[0].__name__.upper()}|none"}
        return Annotated[Any, typer.Option(**shown, show_default=False)]
    names = []
    if option.type is bool:
        # Named after both, since False may be what the preset does not say. A table with two columns of names has no
        # room for long ones, so theirs is one of its own.
        names = [f"{name}/--no-{name[2:]}"]
        shown |= {"rich_help_panel": "Sampler switches", "metavar": ""}
    return Annotated[option.type | None, typer.Option(*names, **shown, show_default=str(option.default))]


def _or_none(convert: type) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        return NOTHING if text.lower() == "none" else convert(text)

    parse.__name__ = convert.__name__
    return parse


def _train(command: str, arguments: list[str], verbose: bool) -> None:
    from nemo_dllm.cli.init_from import check_init_from

    check_init_from(arguments)
    run_task = _import("recipes.command_line", verbose).run_task
    from nemo.collections import llm

    run_task(getattr(llm, command), arguments, verbose=verbose)


def _import(module: str, verbose: bool) -> ModuleType:
    """A module of this package that imports NeMo, in silence unless ``verbose``."""
    from nemo_dllm.console import import_nemo_quietly, swallowed_output

    _announce_import()
    if verbose:
        return importlib.import_module(f"nemo_dllm.{module}")
    import_nemo_quietly()
    with swallowed_output():
        return importlib.import_module(f"nemo_dllm.{module}")


def _announce_import() -> None:
    """Tell who sits at a terminal why nothing happens; logs have only what is worth keeping."""
    if sys.stderr.isatty() and "nemo" not in sys.modules and is_first_process():
        print("loading NeMo, which takes about 15 seconds", file=sys.stderr, flush=True)


def _options_of_command(arguments: list[str]) -> dict[str, str]:
    """How the command that is called calls its parameters."""
    command = typer.main.get_command(app)
    for argument in arguments:
        command = getattr(command, "commands", {}).get(argument, command)
    return {
        parameter.name: next((name for name in parameter.opts if name.startswith("--")), parameter.name.upper())
        for parameter in command.params
    }


for sampling_command in COMMANDS:
    app.command(sampling_command.name, help=sampling_command.summary)(_sampling_command(sampling_command))


if __name__ == "__main__":
    main()
