"""Any number of GPUs gets layouts that pass the checks of a run, or a word on what would do."""

from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.nemo


@pytest.fixture(scope="module")
def planner():
    """Of a recipe, with its global batch."""
    import nemo_dllm.recipes  # noqa: F401
    from nemo_dllm.recipes.builder import RECIPES
    from nemo_dllm.recipes.planner import Planner

    def planner(name, global_batch_size=256, **strategy):
        recipe = RECIPES[name]()
        recipe.data.global_batch_size = global_batch_size
        for field, value in strategy.items():
            setattr(recipe.trainer.strategy, field, value)
        return Planner(recipe)

    return planner


@pytest.fixture(scope="module")
def check():
    """The checks of a run, on what a candidate sets."""
    import fiddle as fdl

    from nemo_dllm.collections.diffusion.data.batch_sizes import check_batch_sizes
    from nemo_dllm.collections.diffusion.models.layout import check_layout
    from nemo_dllm.collections.diffusion.models.layout_options import check_layout_options

    def check(plans, candidate, gpus):
        recipe = plans.recipe
        before = candidate.settings | plans.own(gpus).settings
        try:
            for field, value in candidate.settings.items():
                set_field(recipe, field, value)
            trainer = SimpleNamespace(
                strategy=fdl.build(recipe.trainer.strategy),
                num_devices=recipe.trainer.devices,
                num_nodes=recipe.trainer.num_nodes,
            )
            assert trainer.num_devices * trainer.num_nodes == gpus
            config, data = fdl.build(recipe.model.config), recipe.data
            degrees = check_layout(config, plans.objective, trainer, data)
            check_layout_options(config, trainer.strategy, "local")
            ranks = degrees.tensor * degrees.pipeline * degrees.context
            check_batch_sizes(data.global_batch_size, data.micro_batch_size, gpus // ranks)
        finally:
            for field, value in before.items():
                set_field(recipe, field, value)

    return check


def set_field(recipe, field, value):
    *path, name = field.split(".")
    for part in path:
        recipe = getattr(recipe, part)
    setattr(recipe, name, value)


@pytest.mark.parametrize("gpus", [1, 3, 6, 7, 12, 24, 1000])
@pytest.mark.parametrize(
    "name, fields",
    [
        ("qwen3_0p6b_mdlm_pretrain", {}),
        ("llama32_3b_bd3lm_pretrain", {}),
        ("qwen3_30b_a3b_bd3lm_pretrain", {}),
        ("llada2_mini_pretrain", {}),
        ("llada_8b_pretrain", {"fsdp": "megatron", "tensor_model_parallel_size": 1}),
    ],
)
def test_layouts_of_any_number_of_gpus_pass_the_checks_of_a_run(planner, check, name, fields, gpus):
    plans = planner(name, **fields)
    fitting = plans.fitting(gpus, 80.0)
    assert fitting or (plans.fewer(gpus, 80.0) or plans.smallest(80.0))
    for candidate in fitting:
        check(plans, candidate, gpus)
        assert abs(candidate.global_batch_size - 256) <= 32
        # Tensor-parallel GPUs are of one node.
        assert candidate.layout.gpus_per_node % candidate.layout.tensor == 0


def test_stages_and_ranks_of_experts_need_not_be_powers_of_two(planner):
    # 28 layers in seven stages leave the batch as it is.
    seven = planner("dream_7b_pretrain").fitting(7, 80.0)[0]
    assert (seven.layout.pipeline, seven.global_batch_size) == (7, 256)
    assert {candidate.layout.pipeline for candidate in planner("qwen3_30b_a3b_mdlm_pretrain").fitting(48, 80.0)} >= {
        3,
        6,
    }


def test_a_global_batch_that_the_gpus_do_not_divide_is_the_nearest_that_they_do(planner):
    plans = planner("qwen3_0p6b_mdlm_pretrain")
    problem = plans.problem(plans.own(3))
    assert "global_batch_size=256 is not a multiple of micro_batch_size=8 x data_parallel_size=3 = 24" in problem
    first = plans.fitting(3, 80.0)[0]
    assert (first.layout.tensor, first.layout.pipeline, first.global_batch_size) == (1, 1, 264)
    assert first.arguments(plans.own(3)) == "trainer.num_nodes=1 trainer.devices=3 data.global_batch_size=264"
    # One that they do divide stays.
    assert planner("qwen3_0p6b_mdlm_pretrain", global_batch_size=240).fitting(3, 80.0)[0].global_batch_size == 240
    assert {candidate.global_batch_size for candidate in plans.fitting(8, 80.0)} == {256}


def test_gpus_that_no_layout_divides(planner):
    from nemo_dllm.recipes.plan import plan

    with pytest.raises(
        ValueError, match="has no layout on 1001 GPUs of 80 GB: .* a global batch near 256 evenly; take 1000 of them"
    ):
        plan("llada_8b_pretrain", gpus=1001)
    assert planner("llada_8b_pretrain").fewer(2**17 + 1, 80.0) == 2**15
    assert planner("llada_8b_pretrain").fewer(3, 80.0) is None


def test_nodes_are_alike():
    from nemo_dllm.recipes.builder import nodes_of

    numbers = {1: (1, 1), 6: (1, 6), 8: (1, 8), 9: (3, 3), 12: (2, 6), 13: (13, 1), 24: (3, 8), 1000: (125, 8)}
    assert {gpus: nodes_of(gpus) for gpus in numbers} == numbers


def test_adapters_need_little_beside_the_weights(planner):
    """Of LLaDA 8B: one GPU, where all its weights take four."""
    plans = planner("llada_8b_lora")
    # Rank 32, of 32 layers: attention's two products, and the MLP's.
    ends = (4096 + 3 * 4096) + 2 * 4096 + (4096 + 2 * 12288) + (12288 + 4096)
    assert plans.adapters == 32 * 32 * ends
    first = plans.fitting(1, 80.0)[0]
    assert first.memory.gradients == 4 * plans.adapters and first.memory.optimizer == 12 * plans.adapters
    assert planner("llada_8b_finetune").fitting(1, 80.0) == []
    # Of experts, attention alone.
    assert planner("sdar_30b_a3b_lora").adapters == 48 * 32 * ((2048 + 4096 + 2 * 512) + (4096 + 2048))
