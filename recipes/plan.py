"""Whether a recipe fits its GPUs, and layouts that do."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import nemo_run as run
from nemo.collections.llm import GPTConfig

from nemo_dllm.recipes.builder import RECIPES, Layout
from nemo_dllm.recipes.memory import MemoryEstimate, count_parameters, estimate_memory

GPUS_PER_NODE = 8
RESERVE_GB = 10.0
"""For the CUDA context, NCCL's buffers and fragmentation."""
PARTS = ("weights", "gradients", "optimizer", "activations", "logits")


@dataclass(frozen=True)
class Candidate:
    """A layout, and what of the recipe it changes."""

    layout: Layout
    micro_batch_size: int
    recompute: bool
    memory: MemoryEstimate

    @property
    def settings(self) -> dict[str, object]:
        """Fields of the recipe."""
        layout = self.layout
        recompute = ("full", "uniform", 1) if self.recompute else (None, None, None)
        names = ("granularity", "method", "num_layers")
        return {
            "trainer.num_nodes": layout.num_nodes,
            "trainer.devices": layout.gpus_per_node,
            "trainer.strategy.tensor_model_parallel_size": layout.tensor,
            "trainer.strategy.sequence_parallel": layout.tensor > 1,
            "trainer.strategy.pipeline_model_parallel_size": layout.pipeline,
            "trainer.strategy.expert_model_parallel_size": layout.expert,
            "trainer.strategy.expert_tensor_parallel_size": layout.expert_tensor,
            "data.micro_batch_size": self.micro_batch_size,
            **{f"model.config.recompute_{name}": value for name, value in zip(names, recompute, strict=True)},
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
        expert = f" x expert {layout.expert}" if layout.expert > 1 else ""
        recompute = ", recomputed" if self.recompute else ""
        return (
            f"{gpus} GPUs: tensor {layout.tensor} x pipeline {layout.pipeline}{expert}, "
            f"micro-batch {self.micro_batch_size}{recompute}"
        )


class Planner:
    """Estimates layouts of one recipe.

    Args:
        recipe: as its factory returns it.
    """

    def __init__(self, recipe: run.Partial):
        import fiddle

        self.recipe = recipe
        self.config: GPTConfig = fiddle.build(recipe.model.config)
        objective = fiddle.build(recipe.model.objective)
        self.positions_per_sample = recipe.data.seq_length * objective.views * (2 if objective.block_size else 1)
        self.vocab_size = getattr(recipe.data, "vocab_size", None)

    @property
    def parameters(self) -> int:
        """Of the model."""
        return count_parameters(self.config, self.vocab_size).total

    def own(self, gpus: int) -> Candidate:
        """The recipe as it stands, on so many GPUs."""
        strategy = self.recipe.trainer.strategy
        layout = Layout(
            *_nodes(gpus),
            tensor=strategy.tensor_model_parallel_size,
            pipeline=strategy.pipeline_model_parallel_size,
            expert=strategy.expert_model_parallel_size,
            expert_tensor=strategy.expert_tensor_parallel_size or strategy.tensor_model_parallel_size,
        )
        recompute = self.config.recompute_granularity == "full"
        return self._candidate(layout, self.recipe.data.micro_batch_size, recompute)

    def problem(self, candidate: Candidate) -> str | None:
        """Why a layout does not divide model and data; None where it does."""
        config, layout = self.config, candidate.layout
        gpus = layout.num_nodes * layout.gpus_per_node
        model_ranks = layout.tensor * layout.pipeline
        expert_ranks = layout.expert * layout.expert_tensor * layout.pipeline
        samples = candidate.micro_batch_size * max(gpus // model_ranks, 1)
        for name, whole, part in (
            ("query groups over tensor", config.num_query_groups, layout.tensor),
            ("MLP width over tensor", config.ffn_hidden_size, layout.tensor),
            ("tokens over tensor", self.recipe.data.seq_length, layout.tensor),
            ("layers over pipeline", config.num_layers, layout.pipeline),
            ("experts over expert", config.num_moe_experts or 1, layout.expert),
            ("GPUs over tensor x pipeline", gpus, model_ranks),
            ("GPUs over expert x pipeline", gpus, expert_ranks),
            ("samples of a step over those at once", self.recipe.data.global_batch_size, samples),
        ):
            if whole % part:
                return f"{name}: {whole} is not divisible by {part}"
        return None

    def fitting(self, gpus: int, memory_gb: float) -> list[Candidate]:
        """Layouts that fit, each with its fastest settings, the fastest first as far as sizes tell."""
        found = [
            candidate
            for candidate in self._candidates(gpus)
            if self.problem(candidate) is None and candidate.memory.total / 1e9 <= memory_gb - RESERVE_GB
        ]

        best: dict[Layout, Candidate] = {}
        for candidate in sorted(found, key=_cost):
            best.setdefault(candidate.layout, candidate)
        return list(best.values())

    def smallest(self, memory_gb: float) -> int | None:
        """The fewest GPUs that any layout fits, in powers of two up to 4,096."""
        return next((gpus for gpus in (2**power for power in range(13)) if self.fitting(gpus, memory_gb)), None)

    def _candidates(self, gpus: int) -> Iterator[Candidate]:
        experts = (1, 2, 4, 8, 16, 32, 64) if self.config.num_moe_experts else (1,)
        sizes = {self.recipe.data.micro_batch_size, 1}
        for tensor, pipeline, expert, size, recompute in product(
            (1, 2, 4, 8), (1, 2, 4, 8, 16), experts, sizes, (False, True)
        ):
            layout = Layout(*_nodes(gpus), tensor=tensor, pipeline=pipeline, expert=expert)
            if tensor <= layout.gpus_per_node:
                yield self._candidate(layout, size, recompute)

    def _candidate(self, layout: Layout, micro_batch_size: int, recompute: bool) -> Candidate:
        memory = estimate_memory(
            self.config,
            layout,
            micro_batch_size * self.positions_per_sample,
            recompute=recompute,
            vocab_size=self.vocab_size,
        )
        return Candidate(layout, micro_batch_size, recompute, memory)


def _cost(candidate: Candidate) -> tuple:
    """The lower, the faster, as far as sizes tell.

    Recomputation costs a third of the work; experts beyond a node wait for the network; stages of a pipeline wait for
    each other; tensor parallelism, and then experts, exchange more the further they spread.
    """
    layout = candidate.layout
    beyond_node = layout.expert > layout.gpus_per_node
    return candidate.recompute, beyond_node, layout.pipeline, layout.tensor, layout.expert, -candidate.micro_batch_size


def _nodes(gpus: int) -> tuple[int, int]:
    """Nodes, and GPUs of each."""
    return (gpus // GPUS_PER_NODE, GPUS_PER_NODE) if gpus % GPUS_PER_NODE == 0 else (1, gpus)


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
        ValueError: for an unknown recipe, and where no layout fits; it names the fewest GPUs that would do.
    """
    if recipe not in RECIPES:
        raise ValueError(f"recipe={recipe!r} is unknown; `nemo-dllm recipes` lists the names")
    if gpus < 1:
        raise ValueError(f"gpus={gpus} must be at least 1")
    planner = Planner(RECIPES[recipe]())
    fitting = planner.fitting(gpus, memory)
    own = planner.own(gpus)
    if not fitting:
        fewest = planner.smallest(memory)
        hint = f"it takes {fewest} of them" if fewest else "no number of them is enough; take GPUs of more memory"
        raise ValueError(
            f"{recipe}, {planner.parameters / 1e9:.2f} billion parameters, does not fit {gpus} GPUs of {memory:g} GB "
            f"in any layout: all weights, gradients and moments are {18 * planner.parameters / 1e9:,.0f} GB; {hint}"
        )
    problem = planner.problem(own)
    if problem is None and own.memory.total / 1e9 > memory - RESERVE_GB:
        problem = f"{RESERVE_GB:g} GB stay free for CUDA and NCCL"
    verdict = f"does not fit {gpus} GPUs of {memory:g} GB as it stands ({problem})" if problem else "fits"
    others = [candidate for candidate in fitting if problem or _cost(candidate) < _cost(own)][:proposals]
    rows = [("as it stands", own.memory), *((candidate.title, candidate.memory) for candidate in others)]
    width = max(len(title) for title, _ in rows)
    lines = [
        f"{recipe}: {planner.parameters / 1e9:.2f} billion parameters, {verdict}",
        "",
        f"{'GB on the fullest GPU':{width}}" + "".join(f"{part:>12}" for part in (*PARTS, "total")),
        *(_row(title, width, memory) for title, memory in rows),
    ]
    for candidate in others:
        lines += ["", candidate.title, f"    {candidate.arguments(own)}"]
    return "\n".join(lines)


def _row(title: str, width: int, memory: MemoryEstimate) -> str:
    values = (*(getattr(memory, part) for part in PARTS), memory.total)
    return f"{title:{width}}" + "".join(f"{value / 1e9:12.1f}" for value in values)
