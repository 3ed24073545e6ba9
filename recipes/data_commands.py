"""``nemo dllm data``: the functions of the data room as commands, with their own parameters and defaults.

``nemo dllm preprocess`` is ``nemo dllm data preprocess``.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from nemo_dllm.collections.diffusion.data.indexed import check_corpus
from nemo_dllm.collections.diffusion.data.preprocess import preprocess
from nemo_dllm.collections.diffusion.data.show import show_files
from nemo_dllm.recipes.entrypoints import dllm_command

NAMESPACE, PARENT = "dllm.data", "dllm"
# Of parameters that are annotated with more than a command line can give.
TYPES = {
    "inputs": str | Sequence[str],
    "output_prefix": str,
    "prefix": str,
    "path": str,
    "tokenizer": str,
    "columns": dict[str, str] | None,
    "chat_template": str | None,
    "html": str | None,
}
NOT_FROM_A_COMMAND_LINE = ("stream",)


def _parameters(function: Callable) -> list[inspect.Parameter]:
    """What nemo_run may know of a function's parameters."""
    return [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=TYPES.get(name, parameter.annotation))
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in NOT_FROM_A_COMMAND_LINE
    ]


def _register(
    name: str, function: Callable, summary: str, show: Callable[[Any], None], namespace: str = NAMESPACE
) -> None:
    """Offer a function as ``nemo dllm data NAME``, or in another namespace; ``show`` gets what it returns."""

    def command(**given: Any) -> None:
        show(function(**given))

    parameters = _parameters(function)
    required = " ".join(f"{parameter.name}=..." for parameter in parameters if parameter.default is parameter.empty)
    others = ", ".join(parameter.name for parameter in parameters if parameter.default is not parameter.empty)
    usage = f"{summary} {required}" + (f"; further: {others}" if others else "")
    command.__name__ = command.__qualname__ = name
    command.__signature__ = inspect.Signature(parameters)
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    dllm_command(
        command,
        name=name,
        namespace=namespace,
        help=f"{usage} (nemo-dllm data {name} --help explains them)",
    )


def _print_summary(report: Any) -> None:
    print(report.summary())


def _nothing(statistics: Any) -> None:
    """They are printed already."""


for _namespace in (NAMESPACE, PARENT):
    _register("preprocess", preprocess, "Encode texts into .bin and .idx files.", _print_summary, _namespace)
_register("check", check_corpus, "Read a corpus from end to end.", print)
_register("show", show_files, "Print rows as training reads them, and statistics.", _nothing)
