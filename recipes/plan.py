"""Whether a recipe fits its GPUs, and layouts that do."""

from collections.abc import Sequence

import nemo_run as run

from nemo_dllm.recipes.builder import GPUS_PER_NODE, RECIPES
from nemo_dllm.recipes.command_line import hint_of_recipes, name_of, read_recipe
from nemo_dllm.recipes.executors import number_of_devices
from nemo_dllm.recipes.memory import MemoryEstimate
from nemo_dllm.recipes.planner import RESERVE_GB, Planner

PARTS = ("weights", "gradients", "optimizer", "activations", "logits")


def plan(
    recipe: str,
    gpus: int | None = None,
    memory: float = 80.0,
    proposals: int = 3,
    overrides: Sequence[str] = (),
) -> str:
    """Tell what a recipe needs of each GPU, part by part, and which layouts fit.

    Args:
        recipe: name of a recipe, or a call of it, as ``--factory`` takes it.
        gpus: how many there are; None is what ``overrides`` say of the trainer, or those of a node.
        memory: of each, GB (10^9 bytes).
        proposals: layouts to name at most.
        overrides: fields of the recipe, as ``data.seq_length=8192``.

    Returns:
        A table for people: the recipe as it stands, and layouts that fit where it does not, or that should be faster;
        then the arguments that set each of them.

    Raises:
        ValueError: for an unknown recipe or field, which names the nearest, for two numbers of GPUs, and where no
            layout fits; it names the fewest GPUs that would do.
    """
    name = name_of(recipe)
    if name not in RECIPES:
        raise ValueError(f"recipe={recipe!r} is unknown; {hint_of_recipes(name)}")
    edited = read_recipe(recipe, overrides)
    gpus, largest_node = _gpus(gpus, edited, overrides)
    if gpus < 1:
        raise ValueError(f"gpus={gpus} must be at least 1")
    _check_rows(edited.data)
    if not memory > RESERVE_GB:
        raise ValueError(f"memory={memory:g} GB must be above the {RESERVE_GB:g} GB that are left free")
    planner = Planner(edited, largest_node)
    fitting = planner.fitting(gpus, memory)
    own = planner.own(gpus)
    size = _amount(planner.parameters)
    if not fitting:
        raise ValueError(f"{recipe}, {size} parameters, {_why_nothing_fits(planner, gpus, memory)}")
    problem = planner.problem(own)
    if problem is None and own.memory.total / 1e9 > memory - RESERVE_GB:
        problem = f"{RESERVE_GB:g} GB stay free for CUDA and NCCL"
    verdict = f"does not fit {gpus} GPUs of {memory:g} GB as it stands ({problem})" if problem else "fits"
    faster = [candidate for candidate in fitting if problem or planner.cost(candidate) < planner.cost(own)]
    others = faster[:proposals]
    rows = [("as it stands", own.memory), *((candidate.title, candidate.memory) for candidate in others)]
    lines = [f"{recipe}: {size} parameters, {verdict}", "", *_table(rows)]
    for candidate in others:
        lines += ["", candidate.title, f"    {candidate.arguments(own)}"]
    return "\n".join(lines)


def _gpus(gpus: int | None, recipe: run.Partial, overrides: Sequence[str]) -> tuple[int, int]:
    """How many there are, and in a node at most."""
    fields = ("trainer.devices", "trainer.num_nodes")
    if not any(override.startswith(fields) for override in overrides):
        return GPUS_PER_NODE if gpus is None else gpus, GPUS_PER_NODE
    devices, nodes = number_of_devices(recipe.trainer), recipe.trainer.num_nodes
    if gpus not in (None, devices * nodes):
        raise ValueError(
            f"gpus={gpus} is another number than trainer.devices={devices} x trainer.num_nodes={nodes}; leave one out"
        )
    return devices * nodes, devices


def _check_rows(data: run.Config) -> None:
    """Check what a data module refuses, and no layout could mend; whether batches divide depends on the layout."""
    for field in ("seq_length", "micro_batch_size", "global_batch_size"):
        if (size := getattr(data, field)) < 1:
            raise ValueError(f"data.{field}={size} must be at least 1")


def _why_nothing_fits(planner: Planner, gpus: int, memory: float) -> str:
    fewer = planner.fewer(gpus, memory)
    if fewer:
        return (
            f"has no layout on {gpus} GPUs of {memory:g} GB: what would fit does not divide them, layers, heads and a "
            f"global batch near {planner.recipe.data.global_batch_size} evenly; take {fewer} of them"
        )
    fewest = planner.smallest(memory)
    hint = f"it takes {fewest} of them" if fewest else "no number of them is enough; take GPUs of more memory"
    return (
        f"does not fit {gpus} GPUs of {memory:g} GB in any layout: all weights, gradients and moments are "
        f"{planner.state_bytes / 1e9:,.0f} GB; {hint}"
    )


def _amount(number: int) -> str:
    """In billions, millions or thousands."""
    for name, unit in (("billion", 10**9), ("million", 10**6), ("thousand", 10**3)):
        if number >= unit / 10:
            return f"{number / unit:.2f} {name}"
    return str(number)


def _table(rows: list[tuple[str, MemoryEstimate]]) -> list[str]:
    """Lines: parts and total of each row, in MB where all are below a GB."""
    name, unit = ("GB", 1e9) if max(memory.total for _, memory in rows) >= 1e9 else ("MB", 1e6)
    head = f"{name} on the fullest GPU"
    width = max(len(title) for title in (head, *(title for title, _ in rows)))
    lines = [f"{head:{width}}" + "".join(f"{part:>12}" for part in (*PARTS, "total"))]
    for title, memory in rows:
        values = (*(getattr(memory, part) for part in PARTS), memory.total)
        lines.append(f"{title:{width}}" + "".join(f"{value / unit:12.1f}" for value in values))
    return lines
