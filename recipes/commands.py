"""Our own commands under ``nemo dllm``, and what the ``nemo`` command needs to read our recipes' arguments."""

import collections.abc
import sys
import types
from pathlib import Path
from typing import Any, Union, get_args

import nemo_run as run
from nemo_run.cli.cli_parser import type_parser

from nemo_dllm.collections.diffusion.inference.text import print_generated
from nemo_dllm.recipes.builder import RECIPES


def _parse_union(value: str, annotation: types.UnionType) -> Any:
    """Members that take any text come last: ``["a", "b"]`` is a list for ``str | Sequence[str]``."""
    members = sorted(get_args(annotation), key=lambda member: member in (str, Path))
    return type_parser.parse_union(value, Union[tuple(members)])  # noqa: UP007


# nemo_run reads Optional[str] and List[str], but not str | None and Sequence[str], as fields here are declared.
type_parser.register_parser(types.UnionType)(_parse_union)
type_parser.register_parser(collections.abc.Sequence)(type_parser.parse_list)


@run.cli.entrypoint(namespace="dllm", enable_executor=False, help="Continue a text: path=RUN_OR_CHECKPOINT prompt=TEXT")
def generate(
    path: str,
    prompt: str = "",
    best: bool = False,
    max_new_tokens: int = 64,
    steps: int | None = None,
    block_size: int | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    threshold: float | None = None,
    remasking: str = "confidence",
    seed: int | None = None,
    watch: bool | None = None,
) -> None:
    """Continue a text with a trained model, and print it.

    Args:
        path: folder of a run, of a NeMo checkpoint or of a Hugging Face checkpoint of a diffusion model.
        prompt: the text to go on from.
        best: of a run, the checkpoint with the lowest validation loss instead of the latest one.
        watch: show the text while it is denoised, on standard error; None does so on a terminal.
        max_new_tokens, steps, block_size, temperature, top_k, top_p, threshold, remasking, seed: see
            ``SamplerConfig``; without a seed each call draws another text at temperatures above 0.
    """
    print_generated(
        path,
        prompt,
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


@run.cli.entrypoint(namespace="dllm", enable_executor=False, help="List the names that --factory takes")
def recipes() -> None:
    """Print every recipe's name and what it does."""
    width = max(map(len, RECIPES))
    for name, recipe in RECIPES.items():
        print(f"{name:{width}}  {recipe.__doc__.splitlines()[0]}")
