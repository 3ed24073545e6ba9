"""``nemo-dllm data``: encode a corpus, check it, look at it. None of it imports NeMo."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Encode corpora, check them, look at data.", no_args_is_help=True)


@app.callback()
def _quiet() -> None:
    from nemo_dllm.console import hide_warnings

    hide_warnings()


Tokenizer = Annotated[str, typer.Option(help="Hugging Face tokenizer: folder, or name on the Hub.")]


@app.command()
def preprocess(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUTS", help="Files (.jsonl, .parquet, .txt, .md; also .gz, .zst), folders, hf://NAME."
        ),
    ],
    output_prefix: Annotated[Path, typer.Argument(metavar="PREFIX", help="PREFIX.bin and PREFIX.idx are written.")],
    tokenizer: Tokenizer,
    format: Annotated[
        str | None, typer.Option(help="jsonl, parquet, text, lines or dataset (default: by the names).")
    ] = None,
    text_field: Annotated[str, typer.Option(help="Field or column with the text.")] = "text",
    split: Annotated[str | None, typer.Option(help="Of datasets with several splits.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes (default: one per core).")] = None,
    append_eos: Annotated[bool, typer.Option(help="Put the end token after each document.")] = True,
    prepend_bos: Annotated[bool, typer.Option(help="Put the begin token before each document.")] = False,
    max_bad_rows: Annotated[int, typer.Option(help="Rows that cannot be used before it gives up.")] = 100,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing output.")] = False,
    progress: Annotated[bool | None, typer.Option(help="Show a progress bar (default: on a terminal).")] = None,
) -> None:
    """Encode texts into files that pretraining and Megatron-LM read; a run that was stopped goes on where it was."""
    _import_megatron_quietly()
    from nemo_dllm.collections.diffusion.data.preprocess import preprocess

    report = preprocess(
        inputs,
        output_prefix,
        tokenizer,
        format=format,
        text_field=text_field,
        split=split,
        workers=workers,
        append_eos=append_eos,
        prepend_bos=prepend_bos,
        max_bad_rows=max_bad_rows,
        overwrite=overwrite,
        progress=progress,
    )
    print(report.summary())


@app.command()
def check(
    prefix: Annotated[Path, typer.Argument(metavar="PREFIX", help="Of PREFIX.bin and PREFIX.idx.")],
    tokenizer: Tokenizer,
) -> None:
    """Read a corpus from end to end; files that are damaged, and ids that the tokenizer lacks, are errors."""
    _import_megatron_quietly()
    from nemo_dllm.collections.diffusion.data.indexed import check_corpus

    print(check_corpus(prefix, tokenizer))


@app.command()
def show(
    path: Annotated[
        str,
        typer.Argument(metavar="PATH", help="Prefix of a corpus, file or folder of chats, or hf://NAME on the Hub."),
    ],
    tokenizer: Tokenizer,
    seq_length: Annotated[int, typer.Option(help="Tokens per row.")] = 2048,
    column: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD=NAME", help="What a field is called in the data, as prompt=question; repeated."),
    ] = None,
    split: Annotated[str | None, typer.Option(help="Of datasets with several splits.")] = None,
    chat_template: Annotated[
        str | None, typer.Option(help="Jinja text, or file with it; '' joins prompt and answer (default: tokenizer's).")
    ] = None,
    loss_turns: Annotated[str, typer.Option(help="Turns that are trained: all, or the last.")] = "all",
    block_size: Annotated[int | None, typer.Option(help="Of block diffusion; fills samples up to it.")] = None,
    packing: Annotated[bool, typer.Option("--packing", help="Several samples per row.")] = False,
    max_bad_rows: Annotated[int, typer.Option(help="Rows that cannot be used before it gives up.")] = 100,
    num_samples: Annotated[int, typer.Option(help="Rows to print.")] = 3,
    num_rows: Annotated[int, typer.Option(help="Rows to count at most.")] = 1000,
    time: Annotated[float | None, typer.Option(help="Hide tokens as at this diffusion time, 0 to 1.")] = None,
    seed: Annotated[int, typer.Option(help="Of the order and of the hidden tokens.")] = 0,
    html: Annotated[Path | None, typer.Option(help="Page to write the same to.")] = None,
) -> None:
    """Print rows as training reads them, coloured by prompt, answer and padding, and statistics of many."""
    from nemo_dllm.collections.diffusion.data.show import is_corpus, show_files

    if is_corpus(path):
        _import_megatron_quietly()

    show_files(
        path,
        tokenizer,
        seq_length=seq_length,
        columns=columns(column or []),
        split=split,
        chat_template=chat_template,
        loss_turns=loss_turns,
        block_size=block_size,
        packing=packing,
        max_bad_rows=max_bad_rows,
        num_samples=num_samples,
        num_rows=num_rows,
        time=time,
        seed=seed,
        html=html,
    )


def columns(pairs: list[str]) -> dict[str, str]:
    """FIELD=NAME of several options as a mapping."""
    if unequal := [pair for pair in pairs if "=" not in pair]:
        raise typer.BadParameter(f"{unequal[0]} is not FIELD=NAME, as prompt=question")
    return dict(pair.split("=", 1) for pair in pairs)


def _import_megatron_quietly() -> None:
    """Megatron prints at import which accelerators are missing."""
    from nemo_dllm.console import swallowed_output

    with swallowed_output():
        import megatron.core.datasets.indexed_dataset  # noqa: F401
