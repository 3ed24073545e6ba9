"""A training from an imported checkpoint with experts."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file


@pytest.mark.nemo
def test_experts_that_tokens_reach_learn_and_biases_stay(models, tmp_path):
    """Two Adam steps with a learning rate of 1e-3."""
    source = models / "llada2_moe"
    script = Path(__file__).with_name("train_from_import.py")
    run = subprocess.run([sys.executable, script, source, tmp_path], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-5000:]
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "exported" / "model.safetensors")
    assert before.keys() == after.keys()
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
