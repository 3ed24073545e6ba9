"""Checkpoints of runs of which no fp16 step has fitted yet: they are saved, and any layout goes on from them."""

import pytest

from .test_resume import checkpoints_of

pytestmark = pytest.mark.nemo

# Megatron halves the scale at each overflow. Eight of twelve steps of one run; none fits before the kill.
SCALE = {"trainer__plugins__fp16_initial_loss_scale": 2.0**22}
NEVER_FITS = {"trainer__plugins__fp16_initial_loss_scale": 2.0**40}
TWO = {"ranks": 2, "trainer__strategy__sequence_parallel": False}


def assert_goes_on(record, straight, start=6):
    """With the losses of a run that was never stopped, in half precision and maybe another layout."""
    assert record["start"] == start
    assert len(set(record["losses"].values())) > 1
    for step, loss in record["losses"].items():
        assert loss == pytest.approx(straight["losses"][step], rel=5e-3), step


def test_two_tensor_parallel_ranks_and_then_one(run_recipe, tmp_path):
    model = {"precision": "fp16", "model__config__num_query_groups": 2}
    layout = {**TWO, "trainer__strategy__tensor_model_parallel_size": 2}
    straight = run_recipe(tmp_path / "straight", **model, **SCALE)
    run_recipe(tmp_path / "run", killed_after=7, **model, **layout, **SCALE)
    # The scale comes from the checkpoint, not from the recipe.
    assert_goes_on(run_recipe(tmp_path / "run", **model, **NEVER_FITS), straight)


@pytest.mark.slow
def test_experts_whose_optimizers_are_chained(run_recipe, tmp_path):
    """Of two expert-parallel ranks, and then of one."""
    experts = {"factory": "mdlm_moe_tiny", "precision": "fp16"}
    straight = run_recipe(tmp_path / "straight", **experts, **SCALE)
    layout = {**TWO, "trainer__strategy__expert_model_parallel_size": 2}
    run_recipe(tmp_path / "run", killed_after=7, **experts, **layout, **SCALE)
    assert_goes_on(run_recipe(tmp_path / "run", **experts, **NEVER_FITS), straight)


def test_adapters_of_a_frozen_model(run_recipe, straight_folder, straight, tmp_path):
    base = next(path for (_, last), path in checkpoints_of(straight_folder).items() if last)
    adapters = {"precision": "fp16", "signals": {"lora_from": str(base)}}
    uninterrupted = run_recipe(tmp_path / "straight", **adapters, **SCALE)
    run_recipe(tmp_path / "run", killed_after=7, **adapters, **SCALE)
    assert_goes_on(run_recipe(tmp_path / "run", **adapters, **NEVER_FITS), uninterrupted)
