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

    def planner(name, **data):
        recipe = RECIPES[name]()
        for field, value in data.items():
            setattr(recipe.data, field, value)
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
    assert 0.97 * measured < own.memory.total < 1.03 * measured


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
    # 2 x 4,096 positions: an input per layer, and one layer whole.
    whole = 2 * (4 * 2048 + 2 * (4096 + 1024) + 4096 + 8 * (2048 + 3 * 768)) + 12 * 128
    assert memory.activations == 2 * 4096 * (48 * 2 * 2048 + whole)


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
    assert not other.recompute and "model.config.recompute_granularity=None" in other.arguments(own)
    assert own.arguments(own) == "trainer.num_nodes=2 trainer.devices=8"


def test_layouts_that_do_not_divide_are_named(plan):
    assert "layers over pipeline" not in plan("qwen3_0p6b_mdlm_pretrain", gpus=8)
    text = plan("qwen3_14b_mdlm_pretrain", gpus=4, memory=141)
    assert "as it stands (GPUs over tensor x pipeline: 4 is not divisible by 8)" in text


def test_what_cannot_fit_is_refused(plan):
    with pytest.raises(
        ValueError, match=r"llada2_flash_pretrain, 102.89 billion .* not fit 8 GPUs of 80 GB in any"
    ) as e:
        plan("llada2_flash_pretrain", gpus=8)
    assert "1,852 GB; it takes 32 of them" in str(e.value)
    with pytest.raises(ValueError, match="no number of them is enough; take GPUs of more memory"):
        plan("llada2_flash_pretrain", gpus=8, memory=11)
    with pytest.raises(ValueError, match="recipe='qwen' is unknown; `nemo-dllm recipes` lists the names"):
        plan("qwen")
    with pytest.raises(ValueError, match="gpus=0 must be at least 1"):
        plan("mdlm_tiny", gpus=0)


def cell(plans, gpus):
    fitting = plans.fitting(gpus, 80.0)
    if not fitting:
        return f"— ({plans.smallest(80.0)} GPUs at least)"
    first = fitting[0]
    layout, recomputed = first.layout, ", recomputed" if first.recompute else ""
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


def test_the_command_prints_it(capsys):
    from nemo_dllm.recipes.commands import print_plan

    print_plan("qwen3_0p6b_mdlm_pretrain", gpus=1, memory=143)
    assert capsys.readouterr().out.startswith("qwen3_0p6b_mdlm_pretrain: 0.60 billion parameters, fits\n")
