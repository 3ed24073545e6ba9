"""Whether a recipe fits its GPUs, and layouts that do."""

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import product

import fiddle as fdl
import nemo_run as run
from nemo.collections.llm import GPTConfig

from nemo_dllm.recipes.activations import EVERY_LAYER, NOTHING, Recomputation
from nemo_dllm.recipes.builder import RECIPES, Layout, layout_of_strategy, nodes_of, strategy_fields
from nemo_dllm.recipes.memory import MemoryEstimate, count_parameters, estimate_training_memory

SHORTEST_SHARD = 4096
"""Tokens of a sample on a GPU below which no context parallelism is proposed."""
RESERVE_GB = 10.0
"""For the CUDA context, NCCL's buffers and fragmentation."""
PARTS = ("weights", "gradients", "optimizer", "activations", "logits")


@dataclass(frozen=True)
class Candidate:
    """A layout, and what of the recipe it changes."""

    layout: Layout
    micro_batch_size: int
    recompute: Recomputation
    memory: MemoryEstimate

    @property
    def settings(self) -> dict[str, object]:
        """Fields of the recipe."""
        names = ("granularity", "method", "num_layers")
        return {
            "trainer.num_nodes": self.layout.num_nodes,
            "trainer.devices": self.layout.gpus_per_node,
            **{f"trainer.strategy.{name}": value for name, value in strategy_fields(self.layout).items()},
            "data.micro_batch_size": self.micro_batch_size,
            **{f"model.config.recompute_{name}": getattr(self.recompute, name) for name in names},
        }

    def arguments(self, own: "Candidate") -> str:
        """Where it differs from a recipe, as the command line takes it; and how many GPUs."""
        before = own.settings
        return " ".join(
            f"{name}={value}"
            for name, value in self.settings.items()
            if value != before[name] or name.startswith(("trainer.num_nodes", "trainer.devices"))
        )

    @property
    def title(self) -> str:
        """What is divided by how much."""
        layout = self.layout
        gpus = layout.num_nodes * layout.gpus_per_node
        virtual = f" ({layout.virtual} chunks each)" if layout.virtual > 1 else ""
        context = f" x context {layout.context}" if layout.context > 1 else ""
        expert = f" x expert {layout.expert}" if layout.expert > 1 else ""
        sharded = ", fully sharded" if layout.fully_sharded else ""
        recompute = {None: "", "full": ", recomputed"}.get(self.recompute.granularity, ", recomputed in part")
        return (
            f"{gpus} GPUs: tensor {layout.tensor} x pipeline {layout.pipeline}{virtual}{context}{expert}{sharded}, "
            f"micro-batch {self.micro_batch_size}{recompute}"
        )


class Planner:
    """Estimates layouts of one recipe.

    Args:
        recipe: as its factory returns it.
    """

    def __init__(self, recipe: run.Partial):
        self.recipe = recipe
        self.config: GPTConfig = fdl.build(recipe.model.config)
        self.objective = fdl.build(recipe.model.objective)
        self.vocab_size = getattr(recipe.data, "vocab_size", None)

    @property
    def parameters(self) -> int:
        """Of the model."""
        return count_parameters(self.config, self.vocab_size).total

    def own(self, gpus: int) -> Candidate:
        """The recipe as it stands, on so many GPUs."""
        return self._candidate(self._own_layout(gpus), self.recipe.data.micro_batch_size, Recomputation.of(self.config))

    def problem(self, candidate: Candidate) -> str | None:
        """Why a layout does not divide model and data; None where it does."""
        config, layout, data = self.config, candidate.layout, self.recipe.data
        gpus = layout.num_nodes * layout.gpus_per_node
        model_ranks = layout.tensor * layout.pipeline * layout.context
        expert_ranks = layout.expert * layout.expert_tensor * layout.pipeline
        samples = candidate.micro_batch_size * max(gpus // model_ranks, 1)
        shards = layout.context * (layout.tensor if layout.sequence else 1)
        block = self.objective.block_size if layout.context > 1 else None
        # Virtual stages take micro-batches in groups.
        groups = layout.pipeline if layout.virtual > 1 else 1
        for name, whole, part in (
            ("query groups over tensor", config.num_query_groups, layout.tensor),
            ("MLP width over tensor", config.ffn_hidden_size, layout.tensor),
            ("tokens over tensor x context", data.seq_length, shards),
            ("tokens of a shard over block size", data.seq_length // layout.context, block or 1),
            ("layers over pipeline", config.num_layers, layout.pipeline * layout.virtual),
            ("experts over expert", config.num_moe_experts or 1, layout.expert),
            ("GPUs over tensor x pipeline x context", gpus, model_ranks),
            ("GPUs over expert x pipeline", gpus, expert_ranks),
            ("samples of a step over those at once", data.global_batch_size, samples),
            ("micro-batches over pipeline", data.global_batch_size // samples, groups),
        ):
            if whole % part:
                return f"{name}: {whole} is not divisible by {part}"
        if (candidate.recompute.num_layers or 0) > self._layers_of_chunk(layout):
            return f"recomputed layers: more than the {self._layers_of_chunk(layout)} of a stage"
        cut_otherwise = config.num_moe_experts and layout.expert_tensor != layout.tensor
        if layout.fully_sharded and (layout.pipeline > 1 or layout.expert > 1 or cut_otherwise):
            return "Megatron-FSDP goes neither with pipeline stages nor with experts dealt out or cut otherwise"
        if config.num_moe_experts and layout.tensor > 1 and not layout.sequence:
            return "experts on tensor-parallel GPUs need sequence parallelism"
        return None

    def fitting(self, gpus: int, memory_gb: float) -> list[Candidate]:
        """Layouts that fit, each with its fastest settings, the fastest first as far as sizes tell."""
        found = [
            candidate
            for candidate in self._candidates(gpus)
            if self.problem(candidate) is None and candidate.memory.total / 1e9 <= memory_gb - RESERVE_GB
        ]

        best: dict[Layout, Candidate] = {}
        for candidate in sorted(found, key=self.cost):
            best.setdefault(candidate.layout, candidate)
        return list(best.values())

    def smallest(self, memory_gb: float) -> int | None:
        """The fewest GPUs that any layout fits, in powers of two up to 4,096."""
        return next((gpus for gpus in (2**power for power in range(13)) if self.fitting(gpus, memory_gb)), None)

    def _layers_of_chunk(self, layout: Layout) -> int:
        return max(self.config.num_layers // (layout.pipeline * layout.virtual), 1)

    def _own_layout(self, gpus: int) -> Layout:
        fields = fdl.ordered_arguments(self.recipe.trainer.strategy, include_defaults=True)
        return layout_of_strategy(fields, gpus)

    def _candidates(self, gpus: int) -> Iterator[Candidate]:
        own = self._own_layout(gpus)
        experts = (1, 2, 4, 8, 16, 32, 64) if self.config.num_moe_experts else (1,)
        longest = max(self.recipe.data.seq_length // SHORTEST_SHARD, own.context)
        contexts = [size for size in (1, 2, 4, 8, 16) if size <= longest]
        for tensor, pipeline, context, expert in product((1, 2, 4, 8), (1, 2, 4, 8, 16), contexts, experts):
            layout = Layout(
                *nodes_of(gpus),
                tensor=tensor,
                pipeline=pipeline,
                context=context,
                expert=expert,
                expert_tensor=tensor if own.fully_sharded and self.config.num_moe_experts else 1,
                fully_sharded=own.fully_sharded,
            )
            if tensor <= layout.gpus_per_node:
                yield from self._settings_of(layout)

    def _settings_of(self, layout: Layout) -> Iterator[Candidate]:
        sizes = {self.recipe.data.micro_batch_size, 1}
        # In an order of their own: what is listed first wins among equals.
        recomputations = dict.fromkeys((NOTHING, Recomputation.of(self.config), EVERY_LAYER))
        for size, recompute in product(sizes, recomputations):
            yield self._candidate(layout, size, recompute)

    def _candidate(self, layout: Layout, micro_batch_size: int, recompute: Recomputation) -> Candidate:
        data = self.recipe.data
        memory = estimate_training_memory(
            self.config,
            self.objective,
            layout,
            seq_length=data.seq_length,
            micro_batch_size=micro_batch_size,
            global_batch_size=data.global_batch_size,
            recompute=recompute,
            vocab_size=self.vocab_size,
        )
        return Candidate(layout, micro_batch_size, recompute, memory)

    def cost(self, candidate: Candidate) -> tuple:
        """The lower, the faster, as far as sizes tell.

        Recomputation costs a third of the work; context-parallel GPUs and experts beyond a node wait for the network;
        stages of a pipeline wait for each other; context and tensor parallelism, and then experts, exchange more the
        further they spread.
        """
        layout = candidate.layout
        share = candidate.recompute.share(self._layers_of_chunk(layout))
        beyond_node = max(layout.expert, layout.tensor * layout.context) > layout.gpus_per_node
        return (
            share,
            candidate.recompute.granularity is not None,
            beyond_node,
            layout.pipeline,
            layout.context,
            layout.tensor,
            layout.expert,
            -candidate.micro_batch_size,
        )


def plan(recipe: str, gpus: int = 8, memory: float = 80.0, proposals: int = 3) -> str:
    """Tell what a recipe needs of each GPU, part by part, and which layouts fit.

    Args:
        recipe: name of a recipe.
        gpus: how many there are.
        memory: of each, GB (10^9 bytes).
        proposals: layouts to name at most.

    Returns:
        A table for people: the recipe as it stands, and layouts that fit where it does not, or that should be faster;
        then the arguments that set each of them.

    Raises:
        ValueError: for an unknown recipe, which names the nearest, and where no layout fits; it names the fewest GPUs
            that would do.
    """
    if recipe not in RECIPES:
        near = " or ".join(get_close_matches(recipe, RECIPES))
        hint = f"did you mean {near}? " if near else ""
        raise ValueError(f"recipe={recipe!r} is unknown; {hint}`nemo-dllm recipes` lists the names")
    if gpus < 1:
        raise ValueError(f"gpus={gpus} must be at least 1")
    if not memory > RESERVE_GB:
        raise ValueError(f"memory={memory:g} GB must be above the {RESERVE_GB:g} GB that are left free")
    planner = Planner(RECIPES[recipe]())
    fitting = planner.fitting(gpus, memory)
    own = planner.own(gpus)
    size = _amount(planner.parameters)
    if not fitting:
        fewest = planner.smallest(memory)
        hint = f"it takes {fewest} of them" if fewest else "no number of them is enough; take GPUs of more memory"
        raise ValueError(
            f"{recipe}, {size} parameters, does not fit {gpus} GPUs of {memory:g} GB "
            f"in any layout: all weights, gradients and moments are {18 * planner.parameters / 1e9:,.0f} GB; {hint}"
        )
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
