"""Whether recipes fit, against what was measured and what is known to fit or not."""

from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "moe_families.md"

pytestmark = pytest.mark.nemo


@pytest.fixture(scope="module")
def planner():
    """Of a recipe, with edits."""
    import nemo_dllm.recipes  # noqa: F401
    from nemo_dllm.recipes.builder import RECIPES
    from nemo_dllm.recipes.plan import Planner

    def planner(name, strategy=None, config=None, **data):
        recipe = RECIPES[name]()
        for place, fields in (
            (recipe.data, data),
            (recipe.trainer.strategy, strategy or {}),
            (recipe.model.config, config or {}),
        ):
            for field, value in fields.items():
                setattr(place, field, value)
        return Planner(recipe)

    return planner


@pytest.fixture(scope="module")
def plan():
    import nemo_dllm.recipes  # noqa: F401
    from nemo_dllm.recipes.plan import plan

    return plan


@pytest.mark.parametrize(
    ("name", "sequences", "measured"),
    [
        ("qwen3_0p6b_mdlm_pretrain", 32, 100.9e9),
        ("qwen3_1p7b_mdlm_pretrain", 16, 103.0e9),
        ("qwen3_0p6b_bd3lm_pretrain", 16, 99.8e9),
    ],
)
def test_the_estimate_is_what_was_measured(planner, name, sequences, measured):
    """Peak memory of docs/throughput.md: one GPU, sequences of 2,048 tokens."""
    own = planner(name, seq_length=2048, micro_batch_size=sequences).own(gpus=1)
    assert 0.98 * measured < own.memory.total < 1.02 * measured


@pytest.mark.parametrize(
    ("name", "layers", "measured"),
    [
        ("qwen3_30b_a3b_mdlm_pretrain", {"recompute_granularity": None}, 75.7e9),
        ("qwen3_30b_a3b_mdlm_pretrain", {}, 64.4e9),
        ("llada2_mini_pretrain", {"recompute_granularity": None, "moe_layer_freq": [0, 1, 1, 1]}, 81.9e9),
        ("llada2_mini_pretrain", {"moe_layer_freq": [0, 1, 1, 1]}, 71.7e9),
    ],
)
def test_the_estimate_of_experts_is_near_what_was_measured(planner, name, layers, measured):
    """Of docs/throughput.md: four layers, 16 sequences of 2,048 tokens. The estimate takes experts to be in balance."""
    whole = {"expert_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
    own = planner(name, whole, {"num_layers": 4, **layers}, seq_length=2048, micro_batch_size=16).own(gpus=1)
    assert 0.94 * measured < own.memory.total < 1.07 * measured


def test_parts_by_hand(planner):
    """Qwen3-30B-A3B on 16 GPUs: two stages, experts over eight GPUs, everything recomputed."""
    memory = planner("qwen3_30b_a3b_mdlm_pretrain").own(gpus=16).memory
    table, experts = 151936 * 2048, 48 * 128 * 3 * 2048 * 768
    # Attention with its norms, and the router, of each layer.
    layer = 2048 * (2 * 4096 + 2 * 512) + 2 * 128 + 2 * 2048 + 2048 * 128
    held, held_experts = 24 * layer + table + 2048, experts / 16
    assert memory.weights == 2 * (held + held_experts)
    assert memory.gradients == 4 * (held + held_experts)
    assert memory.optimizer == pytest.approx(12 * (held / 8 + held_experts / 1))
    # The last stage, with one of the two micro-batches under way: 2 x 4,096 positions, an input per layer.
    assert memory.activations == 2 * 4096 * 24 * 2 * 2048
    # Two chunks of logits, and the hidden states at work.
    assert memory.logits == 2 * 2 * 4096 * 151936 + 4 * table + 4 * 2 * 8192 * 2048


def test_context_parallelism_is_read_from_the_recipe(planner):
    """131,072 tokens of Qwen3-1.7B over four GPUs, everything recomputed."""
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    sizes = dict(seq_length=131_072, micro_batch_size=1, global_batch_size=4)
    plans = planner("qwen3_1p7b_mdlm_pretrain", {"context_parallel_size": 4}, full, **sizes)
    own = plans.own(gpus=4)
    assert own.layout.context == 4 and plans.problem(own) is None
    assert own.memory.weights == 2 * plans.parameters and own.memory.optimizer == 3 * plans.parameters
    # 28 inputs, one layer with the keys and values of all, and the gradients of its attention or of its MLP.
    kept = 4 * 2048 + 3 * 2048 + 2048 + 4 * 2048 + 3 * 6144
    working = 2 * 2048 + max(2 * 6144, 2048 + 3 * 4 * 2048 - 3 * 6144 - 2 * 2048)
    assert own.memory.activations == 131_072 / 4 * 2 * (27 * 2048 + kept + working)
    assert "x context 4" in own.title and own.settings["trainer.strategy.context_parallel_size"] == 4


def test_long_sequences_are_offered_context_parallelism(planner):
    def contexts(seq_length, **fields):
        plans = planner("qwen3_8b_mdlm_pretrain", seq_length=seq_length, micro_batch_size=1, **fields)
        return [candidate.layout.context for candidate in plans.fitting(16, 80.0)]

    assert set(contexts(4096)) == {1}
    assert set(contexts(65_536, global_batch_size=16)) == {1, 2, 4, 8, 16}
    # One million tokens on 16 GPUs: nothing but all of them for each sample.
    long = planner("qwen3_8b_mdlm_pretrain", seq_length=2**20, micro_batch_size=1, global_batch_size=16)
    first = long.fitting(16, 80.0)[0]
    assert first.layout.tensor * first.layout.context * first.layout.pipeline == 16 and first.layout.context > 1
    assert f"trainer.strategy.context_parallel_size={first.layout.context}" in first.arguments(long.own(16))


def test_shards_and_blocks(planner):
    def problem(gpus=8, **fields):
        plans = planner("qwen3_0p6b_bd3lm_pretrain", **fields)
        return plans.problem(plans.own(gpus))

    context = {"context_parallel_size": 4}
    assert problem(strategy=context) is None
    assert problem(strategy=context, seq_length=4098) == (
        "data.seq_length=4098 is not divisible by trainer.strategy.context_parallel_size=4; "
        "set trainer.strategy.context_parallel_size=1"
    )
    assert problem(strategy=context, seq_length=4224) is None
    assert "makes shards of 1040 tokens, which cut a block of" in problem(strategy=context, seq_length=4160)
    assert "is not divisible by tensor x pipeline x context parallel size = 1 x 1 x 4" in problem(6, strategy=context)


def test_a_fully_sharded_recipe_stays_so(planner):
    plans = planner("qwen3_8b_mdlm_pretrain", {"fsdp": "megatron", "tensor_model_parallel_size": 1})
    plain = planner("qwen3_8b_mdlm_pretrain", {"tensor_model_parallel_size": 1})
    sharded, whole = plans.own(8), plain.own(8)
    assert "fully sharded" in sharded.title and sharded.settings["trainer.strategy.fsdp"] == "megatron"
    assert sharded.memory.optimizer == whole.memory.optimizer
    assert sharded.memory.weights + sharded.memory.gradients < whole.memory.weights + whole.memory.gradients
    assert all(candidate.layout.fully_sharded for candidate in plans.fitting(8, 141.0))
    other = plans.fitting(8, 141.0)[1]
    assert other.layout.tensor == 2
    divided = "trainer.strategy.tensor_model_parallel_size=2 trainer.strategy.sequence_parallel=True"
    assert other.arguments(sharded) == f"trainer.num_nodes=1 trainer.devices=8 {divided}"
    assert not any(candidate.layout.fully_sharded for candidate in plain.fitting(8, 141.0))
    stages = planner("qwen3_8b_mdlm_pretrain", {"fsdp": "megatron", "pipeline_model_parallel_size": 2})
    assert "fsdp='megatron' cannot be combined with trainer.strategy.pipeline_model_parallel_size=2" in stages.problem(
        stages.own(8)
    )


def test_recomputation_is_read_from_the_recipe(planner):
    def own(**config):
        return planner("qwen3_0p6b_mdlm_pretrain", config=config).own(8)

    block = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 7}
    kept, part, none = own(), own(**block), own(**(block | {"recompute_num_layers": 28}))
    assert none.memory.total < part.memory.total < kept.memory.total
    saved = (kept.memory.activations - part.memory.activations) / (8 * 4096)
    # Seven layers keep 1,024 hidden units of 4 x 1,024 + 3 x 2,048 + 2 x 2,048 + 3 x 3,072.
    assert saved == 7 * 2 * (3 * 1024 + 3 * 2048 + 2 * 2048 + 3 * 3072)
    assert part.settings["model.config.recompute_method"] == "block" and part.title.endswith(", recomputed")
    assert own(recompute_granularity="selective", recompute_modules=["mlp"]).title.endswith(", recomputed in part")


def test_what_reads_rows_twice_needs_twice_the_activations(planner):
    masked, block = (planner(f"qwen3_1p7b_{kind}_pretrain", micro_batch_size=2) for kind in ("mdlm", "bd3lm"))
    assert block.own(8).memory.activations == 2 * masked.own(8).memory.activations


@pytest.mark.parametrize(
    ("name", "gpus"),
    [
        ("qwen3_0p6b_mdlm_pretrain", 1),
        ("llada_moe_7b_a1b_pretrain", 8),
        ("llada2_mini_pretrain", 8),
        ("qwen3_30b_a3b_bd3lm_pretrain", 16),
        ("llada2_flash_pretrain", 64),
    ],
)
def test_layouts_that_fit_do(planner, name, gpus):
    plans = planner(name)
    for count in (gpus, 4 * gpus):
        fitting = plans.fitting(count, 80.0)
        assert fitting
        for candidate in fitting:
            assert plans.problem(candidate) is None
            assert candidate.memory.total <= 70e9
            assert candidate.layout.num_nodes * candidate.layout.gpus_per_node == count
        assert len({candidate.layout for candidate in fitting}) == len(fitting)


def test_the_table(plan):
    lines = plan("qwen3_0p6b_mdlm_pretrain", gpus=8, memory=80).splitlines()
    assert lines[0] == "qwen3_0p6b_mdlm_pretrain: 0.60 billion parameters, fits"
    assert lines[2].split()[-6:] == ["weights", "gradients", "optimizer", "activations", "logits", "total"]
    *parts, total = map(float, lines[3].removeprefix("as it stands").split())
    assert sum(parts) == pytest.approx(total, abs=0.3)
    # Nothing would be faster.
    assert len(lines) == 4


def test_proposals_where_a_recipe_does_not_fit_as_it_stands(plan):
    text = plan("qwen3_4b_mdlm_pretrain", gpus=8, memory=60)
    assert "does not fit 8 GPUs of 60 GB as it stands (10 GB stay free for CUDA and NCCL)" in text
    assert "8 GPUs: tensor 2 x pipeline 1, micro-batch 1" in text
    assert "trainer.num_nodes=1 trainer.devices=8 data.micro_batch_size=1\n" in text


def test_arguments_are_fields_of_the_recipe(planner):
    plans = planner("qwen3_30b_a3b_mdlm_pretrain")
    own = plans.own(16)
    for name in own.settings:
        *path, field = name.split(".")
        place = plans.recipe
        for part in path:
            place = getattr(place, part)
        setattr(place, field, getattr(place, field, None))
    other = plans.fitting(16, 80.0)[0]
    assert other.recompute.granularity is None and "model.config.recompute_granularity=None" in other.arguments(own)
    assert own.arguments(own) == "trainer.num_nodes=2 trainer.devices=8"


def test_layouts_that_do_not_divide_are_named(plan):
    assert "as it stands (" not in plan("qwen3_0p6b_mdlm_pretrain", gpus=8)
    text = plan("qwen3_14b_mdlm_pretrain", gpus=4, memory=141)
    assert "as it stands (trainer.devices x trainer.num_nodes = 4 x 1 = 4 is not divisible by tensor x" in text


def test_what_cannot_fit_is_refused(plan):
    with pytest.raises(
        ValueError, match=r"llada2_flash_pretrain, 102.89 billion .* not fit 8 GPUs of 80 GB in any"
    ) as e:
        plan("llada2_flash_pretrain", gpus=8)
    assert "1,852 GB; it takes 32 of them" in str(e.value)
    with pytest.raises(ValueError, match="no number of them is enough; take GPUs of more memory"):
        plan("llada2_flash_pretrain", gpus=8, memory=11)
    with pytest.raises(ValueError, match="recipe='qwem' is unknown; `nemo-dllm recipes` lists the names"):
        plan("qwem")
    with pytest.raises(ValueError, match="recipe='qwen3_8b_mdlm' is unknown; did you mean qwen3_8b_mdlm_pretrain or"):
        plan("qwen3_8b_mdlm")
    with pytest.raises(ValueError, match="gpus=0 must be at least 1"):
        plan("mdlm_tiny", gpus=0)


def cell(plans, gpus):
    fitting = plans.fitting(gpus, 80.0)
    if not fitting:
        return f"— ({plans.smallest(80.0)} GPUs at least)"
    first = fitting[0]
    layout, recomputed = first.layout, ", recomputed" if first.recompute.granularity else ""
    divided = f"{layout.tensor} × {layout.pipeline}, experts {layout.expert}, {first.micro_batch_size}{recomputed}"
    return f"{divided}: {first.memory.total / 1e9:.0f} GB"


def test_the_page_on_experts_has_the_first_choices(planner):
    names = (
        "llada_moe_7b_a1b",
        "llada2_mini",
        "qwen3_30b_a3b_mdlm",
        "qwen3_30b_a3b_bd3lm",
        "sdar_30b_a3b",
        "llada2_flash",
    )
    for name in names:
        plans = planner(f"{name}_pretrain")
        row = f"| `{name}` | " + " | ".join(cell(plans, gpus) for gpus in (8, 64, 256)) + " |"
        assert row in PAGE.read_text(), row


def test_small_models_are_told_in_small_units(plan):
    lines = plan("mdlm_tiny", gpus=1).splitlines()
    assert lines[0] == "mdlm_tiny: 2.16 million parameters, fits"
    assert lines[2].startswith("MB on the fullest GPU")
    assert float(lines[3].split()[3]) == pytest.approx(2 * 2.16, abs=0.1)


def test_the_command_prints_it(capsys):
    from nemo_dllm.recipes.commands import print_plan

    print_plan("qwen3_0p6b_mdlm_pretrain", gpus=1, memory=143)
    assert capsys.readouterr().out.startswith("qwen3_0p6b_mdlm_pretrain: 0.60 billion parameters, fits\n")


def test_fields_of_the_recipe(plan, planner):
    """As ``pretrain`` takes them; what a plan proposes is on top of them."""
    overrides = ("data.seq_length=8192", "trainer.strategy.tensor_model_parallel_size=2", "data.micro_batch_size=1")
    edited = planner(
        "qwen3_8b_mdlm_pretrain", {"tensor_model_parallel_size": 2}, seq_length=8192, micro_batch_size=1
    ).own(8)
    line = plan("qwen3_8b_mdlm_pretrain", gpus=8, memory=141, overrides=overrides).splitlines()[3]
    assert float(line.split()[-1]) == pytest.approx(edited.memory.total / 1e9, abs=0.05)
    assert plan("qwen3_8b_mdlm_pretrain", memory=141).splitlines()[3] != line
    named = plan("qwen3_8b_mdlm_pretrain(name='mine')", memory=141, overrides=overrides).splitlines()
    assert named[3] == line
    proposed = plan("qwen3_8b_mdlm_pretrain", overrides=["data.seq_length=8192", "data.micro_batch_size=4"])
    assert " data.micro_batch_size=1" in proposed and "data.seq_length" not in proposed


def test_the_number_of_gpus_is_the_trainer_s_where_that_is_said(plan):
    assert "does not fit 4 GPUs of" in plan("qwen3_14b_mdlm_pretrain", memory=141, overrides=["trainer.devices=4"])
    text = plan("qwen3_14b_mdlm_pretrain", memory=60, overrides=["trainer.devices=4", "trainer.num_nodes=4"])
    assert " fits\n" in text and "trainer.num_nodes=4 trainer.devices=4 " in text and "trainer.devices=8" not in text
    with pytest.raises(
        ValueError, match="^gpus=8 is another number than trainer.devices=4 x trainer.num_nodes=1; leave"
    ):
        plan("qwen3_14b_mdlm_pretrain", gpus=8, overrides=["trainer.devices=4"])


@pytest.mark.parametrize(
    "override, message",
    [
        ("data.seq_lengthh=4", "^data.seq_lengthh is unknown; did you mean data.seq_length"),
        ("data.seq_length=x", "^data.seq_length=x cannot be read as int"),
        ("data.seq_length=0", "^data.seq_length=0 must be at least 1$"),
        ("data.micro_batch_size=0", "^data.micro_batch_size=0 must be at least 1$"),
        ("data.global_batch_size=-8", "^data.global_batch_size=-8 must be at least 1$"),
        ("data.seq_length", "^data.seq_length is neither an option .* nor FIELD=VALUE$"),
    ],
)
@pytest.mark.parametrize("recipe", ["qwen3_8b_mdlm_pretrain", "qwen3_8b_mdlm_finetune", "qwen3_8b_mdlm_lora"])
def test_fields_that_mean_nothing_to_a_recipe(plan, recipe, override, message):
    with pytest.raises(ValueError, match=message):
        plan(recipe, overrides=[override])


@pytest.mark.parametrize("order", [1, -1])
def test_the_command_under_nemo_takes_fields_too(order, capsys):
    from nemo_run.cli.api import Console

    from nemo_dllm.recipes.commands import print_plan

    arguments = ["recipe=qwen3_0p6b_mdlm_pretrain", "memory=143", "trainer.devices=2", "data.seq_length=2048"]
    print_plan.cli_entrypoint._execute_simple(arguments[::order], Console())
    assert capsys.readouterr().out.startswith("qwen3_0p6b_mdlm_pretrain: 0.60 billion parameters, fits\n")
