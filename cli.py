"""The ``nemo-dllm`` command. NeMo's import takes many seconds, so it happens inside the commands that need it."""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

app = typer.Typer(
    help="Diffusion language models on NeMo: train them, sample from them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Verbose = Annotated[bool, typer.Option("--verbose", help="All output of NeMo, and tracebacks of errors.")]
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
ARGUMENTS = "[ARGUMENTS]"
ARGUMENTS_HELP = (
    "ARGUMENTS are those of the same command under `nemo llm`: --factory NAME or --factory 'NAME(argument=value)', "
    "--yaml FILE, and fields of the recipe, such as trainer.max_steps=100. `nemo-dllm recipes` lists the names."
)


def main() -> None:
    """Run the command; what a user can mend is one line on standard error and exit code 2."""
    try:
        app()
    except Exception as error:
        if "--verbose" in sys.argv or not _is_for_users(error):
            raise
        print(f"error: {_one_line(error)}", file=sys.stderr)
        sys.exit(2)


@app.command()
def generate(
    path: Annotated[Path, typer.Argument(metavar="PATH", exists=True, help="Folder of a run or a checkpoint.")],
    prompt: Annotated[str, typer.Option(help="Text to go on from.")] = "",
    prompt_file: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="File with the text to go on from.")
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="Of a run, the checkpoint of the best validation.")] = False,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 64,
    steps: Annotated[int | None, typer.Option(help="Denoising steps (default: one per token).")] = None,
    block_size: Annotated[int | None, typer.Option(help="Fill blocks of so many tokens from left to right.")] = None,
    temperature: Annotated[float, typer.Option(help="0 takes the most probable tokens.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k most probable tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from the tokens that share this probability.")] = None,
    threshold: Annotated[
        float | None, typer.Option(help="Fill all positions with a probability above this at once.")
    ] = None,
    remasking: Annotated[str, typer.Option(help="Which positions are filled first.")] = "confidence",
    seed: Annotated[int | None, typer.Option(help="For the same text again at a temperature above 0.")] = None,
    watch: Annotated[
        bool | None, typer.Option("--watch/--no-watch", help="Show the text as it forms (default: on a terminal).")
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Continue a text with a trained model, and print it."""
    if prompt and prompt_file:
        raise typer.BadParameter("give --prompt or --prompt-file, not both")
    text = _import("collections.diffusion.inference.text", verbose)
    text.print_generated(
        path,
        prompt_file.read_text() if prompt_file else prompt,
        best=best,
        watch=sys.stderr.isatty() if watch is None else watch,
        max_new_tokens=max_new_tokens,
        steps=steps,
        block_size=block_size,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        threshold=threshold,
        remasking=remasking,
        seed=seed,
    )


@app.command()
def recipes(verbose: Verbose = False) -> None:
    """List the recipes, by the names that --factory takes."""
    _import("recipes.commands", verbose).recipes()


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
    options = {"kind": kind, "mask_token_id": mask_token_id, "mask_init": mask_init, "overwrite": overwrite}
    _import("recipes.conversion", verbose).import_hf(source, output_path, **options)


@app.command("export")
def export_hf(
    path: Annotated[Path, typer.Argument(metavar="PATH", exists=True, help="NeMo checkpoint.")],
    output_path: Annotated[Path, typer.Argument(metavar="OUTPUT", help="Hugging Face folder to make.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing folder.")] = False,
    verbose: Verbose = False,
) -> None:
    """Write a NeMo checkpoint as a Hugging Face checkpoint."""
    _import("recipes.conversion", verbose).export_hf(path, output_path, overwrite=overwrite)


@app.command()
def verify(
    hf_path: Annotated[Path, typer.Argument(metavar="HF_DIR", exists=True, help="Hugging Face folder.")],
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", exists=True, help="What was made of it.")],
    tolerance: Annotated[float, typer.Option(help="Largest absolute difference of weights and logits.")] = 1e-3,
    verbose: Verbose = False,
) -> None:
    """Compare all weights, and logits on real prompts; exit code 1 where they differ."""
    _import("recipes.conversion", verbose).verify(hf_path, checkpoint, tolerance=tolerance)


def _train(command: str, arguments: list[str], verbose: bool) -> None:
    run_task = _import("recipes.command_line", verbose).run_task
    from nemo.collections import llm

    run_task(getattr(llm, command), arguments, verbose=verbose)


def _import(module: str, verbose: bool) -> ModuleType:
    """A module of this package that imports NeMo, in silence unless ``verbose``."""
    from nemo_dllm.console import import_nemo_quietly, swallowed_output

    if verbose:
        return importlib.import_module(f"nemo_dllm.{module}")
    import_nemo_quietly()
    with swallowed_output():
        return importlib.import_module(f"nemo_dllm.{module}")


def _is_for_users(error: Exception) -> bool:
    """Whether one of our checks raised it; any other error is shown with its traceback."""
    if not isinstance(error, ValueError | FileNotFoundError | FileExistsError):
        return False
    traceback = error.__traceback__
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    module = traceback.tb_frame.f_globals.get("__name__", "")
    return module.partition(".")[0] in ("nemo_dllm", "nemo_run")


def _one_line(error: Exception) -> str:
    """The message, with the place in the recipe where fiddle, which builds recipes, appends a paragraph on it."""
    message, _, fiddle_context = str(error).partition("\n\nFiddle context:")
    place = fiddle_context.partition(" at <root>.")[2].partition(" ")[0]
    return f"{place}: {message}" if place else message


if __name__ == "__main__":
    main()
