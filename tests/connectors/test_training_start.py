import json
import shutil
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


@pytest.mark.nemo
@pytest.mark.parametrize("file", ["tokenizer.json", "chat_template.jinja", "generation_config.json"])
def test_another_tokenizer_is_another_start(models, single_process, tmp_path, file):
    """What a run kept of a folder is used again only as long as the folder has the same small files."""
    from nemo_dllm.connectors.conversion import diffusion_model
    from nemo_dllm.connectors.start import adopt_hf_checkpoint

    source = shutil.copytree(models / "qwen3", tmp_path / "source")

    def start():
        return adopt_hf_checkpoint(diffusion_model(source), source, tmp_path / "run")

    first = start()
    assert start() == first
    changed = source / file
    # For JSON the same content, as a change of one token's text would be another size at most.
    changed.write_text((changed.read_text() if changed.exists() else "{{ messages }}") + "\n")
    second = start()
    assert second != first
    assert (second / "hf" / file).is_file() and start() == second
