"""Whether what a training is to start from is there, as far as its arguments tell without the recipe."""

import ast
from collections.abc import Mapping, Sequence

_WITH_VALUE = {"--factory": "factory", "-f": "factory", "--yaml": "yaml"}
_OF_RECIPE = {"dir": "log.log_dir", "name": "log.name"}


def check_init_from(arguments: Sequence[str]) -> None:
    """Check ``init_from`` among the arguments of ``pretrain`` or ``finetune``.

    What a file of the recipe says is left to the training, and so is all that runs elsewhere or may go on from a
    checkpoint of its own.

    Raises:
        FileNotFoundError, NotADirectoryError: see :func:`source_path`.
    """
    from nemo_dllm.collections.diffusion.model_source import keeps_start, source_path

    given = _given(arguments)
    source = given.get("init_from")
    is_told_later = "yaml" in given or any(name.startswith(("run.", "resume.")) for name in given)
    if source in (None, "None", "null") or is_told_later:
        return
    if not keeps_start(given.get("log.log_dir"), given.get("log.name")):
        source_path(source, "init_from", with_weights=True)


def _given(arguments: Sequence[str]) -> dict[str, str]:
    """Options and fields by name, those of a recipe's call among them."""
    given = {}
    rest = iter(arguments)
    for argument in rest:
        name, is_named, value = argument.partition("=")
        if name in _WITH_VALUE and not is_named:
            value = next(rest, "")
        given[_WITH_VALUE.get(name, name)] = _unquoted(value)
    return _of_call(given.get("factory", "")) | given


def _of_call(factory: str) -> Mapping[str, str]:
    """Of ``recipe(name='x')``; the name of a run is by default that of the recipe."""
    try:
        call = ast.parse(factory, mode="eval").body
    except SyntaxError:
        return {}
    if not isinstance(call, ast.Call):
        return {"log.name": factory}
    named = {keyword.arg: _unquoted(ast.unparse(keyword.value)) for keyword in call.keywords}
    return {"log.name": ast.unparse(call.func)} | {_OF_RECIPE.get(name, name): value for name, value in named.items()}


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value
