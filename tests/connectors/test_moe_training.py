"""A training from an imported checkpoint with experts."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file


def train(source, folder, bias_update_rate):
    """Weights before and after two Adam steps with a learning rate of 1e-3."""
    script = Path(__file__).with_name("train_from_import.py")
    arguments = [sys.executable, script, source, folder, str(bias_update_rate)]
    run = subprocess.run(arguments, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-5000:]
    before, after = load_file(source / "model.safetensors"), load_file(folder / "exported" / "model.safetensors")
    assert before.keys() == after.keys()
    return before, after


@pytest.mark.nemo
def test_biases_that_follow_the_load_are_saved_and_exported(models, tmp_path):
    before, after = train(models / "llada2_moe", tmp_path, 0.25)
    names = [name for name in before if name.endswith("expert_bias")]
    assert len(names) == 2
    for name in names:
        # Each of two steps is up, down or, at the mean load, none.
        steps = (after[name] - before[name]) / 0.25
        assert torch.allclose(steps, steps.round(), atol=1e-5)
        assert steps.abs().max() in (1, 2) and (steps > 0).any() and (steps < 0).any()


@pytest.mark.nemo
def test_experts_that_tokens_reach_learn_and_biases_stay(models, tmp_path):
    before, after = train(models / "llada2_moe", tmp_path, 0.0)
    moved = {name: (after[name] - before[name]).abs().max() for name in before}
    assert max(moved.values()) < 2.1e-3
    assert not any(moved[name] for name in moved if name.endswith("expert_bias"))
    for layer in (1, 2):
        prefix = f"model.layers.{layer}.mlp."
        assert min(moved[name] for name in moved if name.startswith(f"{prefix}shared_experts.")) > 5e-4
        assert moved[f"{prefix}gate.weight"] > 5e-4
        experts = torch.stack([moved[f"{prefix}experts.{expert}.down_proj.weight"] for expert in range(16)])
        # At least the four of one token; weight decay alone moves the others.
        assert 4 <= (experts > 5e-4).sum() < 16
