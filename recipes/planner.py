"""Layouts of a recipe, each with what it needs of a GPU."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import fiddle as fdl
import nemo_run as run
from nemo.collections.llm import GPTConfig

from nemo_dllm.collections.diffusion.data.batch_sizes import check_batch_sizes
from nemo_dllm.collections.diffusion.models.degrees import Degrees
from nemo_dllm.collections.diffusion.models.layout import Arrangement, check_arrangement
from nemo_dllm.collections.diffusion.models.layout_options import check_recomputed_layers, check_sharded_degrees
from nemo_dllm.collections.diffusion.models.layout_stages import check_even_stages
from nemo_dllm.recipes.activations import EVERY_LAYER, NOTHING, Recomputation
from nemo_dllm.recipes.builder import (
    GPUS_PER_NODE,
    Layout,
    layout_of_strategy,
    nodes_of,
    strategy_fields,
)
from nemo_dllm.recipes.memory import MemoryEstimate, count_adapters, count_parameters, estimate_training_memory

SHORTEST_SHARD = 4096
"""Tokens of a sample on a GPU below which no context parallelism is proposed."""
OTHER_BATCH = 1 / 8
"""By how much of it the global batch may differ from the recipe's where the GPUs do not divide that."""
NEARBY = 64
"""How many fewer GPUs are looked at where no layout divides all of them."""
RESERVE_GB = 10.0
"""For the CUDA context, NCCL's buffers and fragmentation."""


@dataclass(frozen=True)
class Candidate:
    """A layout, and what of the recipe it changes."""

    layout: Layout
    micro_batch_size: int
    global_batch_size: int
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
            "data.global_batch_size": self.global_batch_size,
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
        virtual = f" ({layout.virtual} chunks each)" if layout.virtual > 1 else ""
        context = f" x context {layout.context}" if layout.context > 1 else ""
        expert = f" x expert {layout.expert}" if layout.expert > 1 else ""
        sharded = ", fully sharded" if layout.fully_sharded else ""
        recompute = {None: "", "full": ", recomputed"}.get(self.recompute.granularity, ", recomputed in part")
        return (
            f"{layout.gpus} GPUs: tensor {layout.tensor} x pipeline {layout.pipeline}{virtual}{context}{expert}"
            f"{sharded}, micro-batch {self.micro_batch_size}{recompute}"
        )


class Planner:
    """Estimates layouts of one recipe.

    Args:
        recipe: as its factory returns it.
        largest_node: GPUs of a node at most.
    """

    def __init__(self, recipe: run.Partial, largest_node: int = GPUS_PER_NODE):
        self.recipe, self.largest_node = recipe, largest_node
        self.config: GPTConfig = fdl.build(recipe.model.config)
        self.objective = fdl.build(recipe.model.objective)
        self.vocab_size = getattr(recipe.data, "vocab_size", None)
        peft = getattr(recipe, "peft", None)
        peft = peft and fdl.build(peft)
        self.adapters = peft and count_adapters(self.config, peft.dim, peft.target_modules)

    @property
    def parameters(self) -> int:
        """Of the model."""
        return count_parameters(self.config, self.vocab_size).total

    @property
    def state_bytes(self) -> int:
        """Of all weights, gradients, fp32 copies and moments."""
        if self.adapters is None:
            return 18 * self.parameters
        return 2 * self.parameters + 18 * self.adapters

    def own(self, gpus: int) -> Candidate:
        """The recipe as it stands, on so many GPUs."""
        data = self.recipe.data
        recompute = Recomputation.of(self.config)
        return self._candidate(self._own_layout(gpus), data.micro_batch_size, data.global_batch_size, recompute)

    def problem(self, candidate: Candidate) -> str | None:
        """Why a run would refuse a layout; None where it would not."""
        layout, recompute = candidate.layout, candidate.recompute
        degrees = _degrees_of(layout)
        arrangement = Arrangement(
            degrees,
            layout.gpus_per_node,
            layout.num_nodes,
            self.recipe.data.seq_length,
            candidate.micro_batch_size,
            candidate.global_batch_size,
        )
        try:
            check_arrangement(self.config, self.objective, arrangement)
            check_even_stages(self.config, degrees, layout.gpus)
            if layout.fully_sharded:
                check_sharded_degrees(self.config, degrees)
            if recompute.granularity == "full":
                check_recomputed_layers(self.config, degrees, recompute.num_layers)
            samples = layout.gpus // degrees.model_ranks
            check_batch_sizes(candidate.global_batch_size, candidate.micro_batch_size, samples)
        except ValueError as error:
            return str(error)
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

    def fewer(self, gpus: int, memory_gb: float) -> int | None:
        """The largest number below ``gpus`` that a layout fits: one that is near, or a power of two."""
        near = range(gpus - 1, max(gpus - 1 - NEARBY, 0), -1)
        powers = (2**power for power in range(gpus.bit_length() - 1, -1, -1))
        return next((fewer for fewer in (*near, *powers) if self.fitting(fewer, memory_gb)), None)

    def _layers_of_chunk(self, layout: Layout) -> int:
        return max(self.config.num_layers // (layout.pipeline * layout.virtual), 1)

    def _own_layout(self, gpus: int) -> Layout:
        fields = fdl.ordered_arguments(self.recipe.trainer.strategy, include_defaults=True)
        return layout_of_strategy(fields, gpus, self.largest_node)

    def _candidates(self, gpus: int) -> Iterator[Candidate]:
        own, config = self._own_layout(gpus), self.config
        experts = _common_divisors(64, gpus, config.num_moe_experts) if config.num_moe_experts else [1]
        longest = max(self.recipe.data.seq_length // SHORTEST_SHARD, own.context)
        nodes, per_node = nodes_of(gpus, self.largest_node)
        for tensor, pipeline, context, expert in product(
            _common_divisors(8, per_node, config.num_query_groups),
            _common_divisors(16, gpus, config.num_layers),
            _common_divisors(min(16, longest), gpus, self.recipe.data.seq_length),
            experts,
        ):
            yield from self._settings_of(
                Layout(
                    nodes,
                    per_node,
                    tensor=tensor,
                    pipeline=pipeline,
                    context=context,
                    expert=expert,
                    expert_tensor=tensor if own.fully_sharded and config.num_moe_experts else 1,
                    fully_sharded=own.fully_sharded,
                )
            )

    def _settings_of(self, layout: Layout) -> Iterator[Candidate]:
        data = self.recipe.data
        # In an order of their own: what is listed first wins among equals.
        recomputations = dict.fromkeys((NOTHING, Recomputation.of(self.config), EVERY_LAYER))
        for size, recompute in product({data.micro_batch_size, 1}, recomputations):
            at_once = _samples_at_once(layout, size)
            nearest = max(round(data.global_batch_size / at_once), 1) * at_once
            near = abs(nearest - data.global_batch_size) <= OTHER_BATCH * data.global_batch_size
            yield self._candidate(layout, size, nearest if near else data.global_batch_size, recompute)

    def _candidate(
        self, layout: Layout, micro_batch_size: int, global_batch_size: int, recompute: Recomputation
    ) -> Candidate:
        memory = estimate_training_memory(
            self.config,
            self.objective,
            layout,
            seq_length=self.recipe.data.seq_length,
            micro_batch_size=micro_batch_size,
            global_batch_size=global_batch_size,
            recompute=recompute,
            vocab_size=self.vocab_size,
            adapters=self.adapters,
        )
        return Candidate(layout, micro_batch_size, global_batch_size, recompute, memory)

    def cost(self, candidate: Candidate) -> tuple:
        """The lower, the faster, as far as sizes tell.

        Recomputation costs a third of the work; context-parallel GPUs and experts beyond a node wait for the network;
        what keeps the recipe's global batch learns the same; stages of a pipeline wait for each other; context and
        tensor parallelism, and then experts, exchange more the further they spread.
        """
        layout = candidate.layout
        share = candidate.recompute.share(self._layers_of_chunk(layout))
        beyond_node = max(layout.expert, layout.tensor * layout.context) > layout.gpus_per_node
        return (
            share,
            candidate.recompute.granularity is not None,
            beyond_node,
            candidate.global_batch_size != self.recipe.data.global_batch_size,
            layout.pipeline,
            layout.context,
            layout.tensor,
            layout.expert,
            -candidate.micro_batch_size,
        )


def _degrees_of(layout: Layout) -> Degrees:
    names = ("tensor", "pipeline", "virtual", "context", "expert", "expert_tensor")
    sizes = {name: getattr(layout, name) for name in names}
    return Degrees(**sizes, sequence=layout.sequence and layout.tensor > 1)


def _samples_at_once(layout: Layout, micro_batch_size: int) -> int:
    return micro_batch_size * max(layout.gpus // layout.model_gpus, 1)


def _common_divisors(largest: int, *numbers: int) -> list[int]:
    return [size for size in range(1, largest + 1) if not any(number % size for number in numbers)]
