"""The smallest recipe in half precision is, to its rounding, the run in fp32."""

import pytest

pytestmark = pytest.mark.nemo

# Small enough for the first step not to overflow: the fp32 run never skips one.
SCALE = {"trainer__plugins__fp16_initial_loss_scale": 1024.0}


def gradient_norms(record):
    return [metrics["train/gradient_norm"] for _, metrics in record["train"] if metrics]


@pytest.mark.parametrize("precision, edits", [("bf16", {}), ("fp16", SCALE)])
def test_half_precision_trains_like_fp32(run_recipe, straight, tmp_path, precision, edits):
    record = run_recipe(tmp_path, precision=precision, **edits)
    assert list(record["losses"].values()) == pytest.approx(list(straight["losses"].values()), rel=1e-3)
    assert gradient_norms(record) == pytest.approx(gradient_norms(straight), rel=2e-2)
    assert record["losses"] != straight["losses"]


def test_a_run_goes_on_before_its_loss_scale_fits(run_recipe, tmp_path):
    """Megatron halves the scale at each overflow, ten times here; until then the optimizer has no moments."""
    scale = {"trainer__plugins__fp16_initial_loss_scale": 2.0**18}
    straight = run_recipe(tmp_path / "straight", precision="fp16", **scale)
    validations = [metrics["validation/loss"] for _, metrics in straight["validations"]]
    assert validations[0] == validations[1] != validations[-1]
    run_recipe(tmp_path / "killed", precision="fp16", killed_after=7, **scale)
    resumed = run_recipe(tmp_path / "killed", precision="fp16", trainer__plugins__fp16_initial_loss_scale=2.0**40)
    assert resumed["losses"] == {step: loss for step, loss in straight["losses"].items() if int(step) > 6}


def test_an_fp16_run_goes_on_with_its_scale(run_recipe, tmp_path):
    straight = run_recipe(tmp_path / "straight", precision="fp16", **SCALE)
    run_recipe(tmp_path / "killed", precision="fp16", killed_after=7, **SCALE)
    resumed = run_recipe(tmp_path / "killed", precision="fp16", trainer__plugins__fp16_initial_loss_scale=2.0**40)
    assert resumed["losses"] == {step: loss for step, loss in straight["losses"].items() if int(step) > 6}
