import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

TOKENIZER = ("special_tokens_map.json", "tokenizer.json", "tokenizer_config.json")


@pytest.mark.nemo
def test_a_training_starts_from_an_import_and_its_checkpoint_exports(models, tmp_path):
    """Two Adam steps with a learning rate of 1e-3 move no weight by more than about 2e-3, and hardly any by nothing."""
    source = models / "qwen3"
    script = Path(__file__).with_name("train_from_import.py")
    run = subprocess.run([sys.executable, script, source, tmp_path], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-5000:]
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "exported" / "model.safetensors")
    assert before.keys() == after.keys()
    moved = torch.cat([(after[name] - before[name]).abs().flatten() for name in before])
    assert moved.max() < 2.1e-3
    assert (moved > 0).float().mean() > 0.9
    exported, imported = tmp_path / "exported", tmp_path / "imported" / "context" / "hf"
    assert (exported / "generation_config.json").read_bytes() == (source / "generation_config.json").read_bytes()
    for file in TOKENIZER:
        assert (exported / file).read_bytes() == (imported / file).read_bytes() != (source / file).read_bytes()
    assert json.loads((exported / TOKENIZER[0]).read_text()) == {
        **json.loads((source / TOKENIZER[0]).read_text()),
        "mask_token": "<|mask|>",
    }
    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert (config["model_type"], config["mask_token_id"], config["eos_token_id"]) == ("a2d-qwen3", 196, 192)
