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


RECIPE = 151
"""The mask token of a recipe; of the golden checkpoints, SDAR declares 196 in config.json, LLaDA2 197 in its tokenizer
alone, A2D and Qwen3 none."""


@pytest.fixture
def start(models, make_twin, single_process, tmp_path):
    """The mask token of a model whose objective has ``chosen``, once it starts from a golden checkpoint."""
    from nemo_dllm.connectors.conversion import diffusion_model
    from nemo_dllm.connectors.start import adopt_hf_checkpoint

    def start(checkpoint, chosen, **config):
        source = tmp_path / "twin"
        if not source.exists():
            make_twin(checkpoint, **config)
        model = diffusion_model(source, mask_token_id=chosen)
        adopt_hf_checkpoint(model, source, tmp_path / "run", recipe_mask_token_id=RECIPE)
        assert model.objective.mask_token_id == model.__io__.objective.mask_token_id
        return model.objective.mask_token_id

    return start


@pytest.mark.nemo
@pytest.mark.parametrize(
    "checkpoint, config, declared",
    [
        ("sdar", {}, 196),
        ("llada2_moe", {}, 197),
        ("a2d_qwen3", {}, None),
        ("qwen3", {}, None),
        ("a2d_qwen3", {"mask_token_id": 150}, 150),
        ("qwen3", {"mask_token_id": 150}, 150),
    ],
)
def test_a_declared_mask_token_counts_before_the_recipe_s(start, checkpoint, config, declared):
    assert start(checkpoint, RECIPE, **config) == (declared or RECIPE)
    assert start(checkpoint, None, **config) == (declared or 196)
    if declared is None:
        assert start(checkpoint, 17, **config) == 17
        return
    assert start(checkpoint, declared, **config) == declared
    named = (
        rf"model.objective.mask_token_id=17 contradicts .*twin, whose mask token is {declared}; set it to {declared} or"
    )
    with pytest.raises(ValueError, match=named):
        start(checkpoint, 17, **config)


@pytest.mark.nemo
def test_the_mask_token_of_an_import_counts_before_the_recipe_s(models, single_process, tmp_path):
    from nemo_dllm.connectors.adoption import adopt_import
    from nemo_dllm.connectors.conversion import diffusion_model, import_checkpoint

    imported = import_checkpoint(models / "qwen3", tmp_path / "nemo", kind="a2d", mask_token_id=42)
    model = diffusion_model(models / "qwen3", "a2d", mask_token_id=RECIPE)
    adopt_import(model, imported, RECIPE)
    assert model.objective.mask_token_id == 42
    model = diffusion_model(models / "qwen3", "a2d", mask_token_id=17)
    with pytest.raises(
        ValueError, match=r"mask_token_id=17 contradicts .*nemo, whose mask token is 42; set it to 42 or"
    ):
        adopt_import(model, imported, RECIPE)


@pytest.mark.nemo
@pytest.mark.parametrize("mask_token_id", [RECIPE, 17, 500, None])
@pytest.mark.parametrize("checkpoint, config", [("qwen3", {}), ("qwen3", {"mask_token_id": 150}), ("sdar", {})])
def test_other_sizes_are_told_before_the_mask_token(
    models, make_twin, single_process, tmp_path, checkpoint, config, mask_token_id
):
    """Whatever the mask token is, no other one would do."""
    from nemo_dllm.connectors.conversion import diffusion_model
    from nemo_dllm.connectors.start import adopt_hf_checkpoint

    make_twin(checkpoint, **config)
    model = diffusion_model(tmp_path / "twin", mask_token_id=mask_token_id)
    model.config.num_layers, model.config.hidden_size = 7, 4096
    for _ in range(2):
        with pytest.raises(ValueError, match="contradicts the config.json of .*num_layers=7.*hidden_size=4096"):
            adopt_hf_checkpoint(model, tmp_path / "twin", tmp_path / "run", recipe_mask_token_id=RECIPE)


@pytest.mark.nemo
def test_another_vocabulary_is_told_before_a_mask_token_that_is_outside_of_it(models, single_process, tmp_path):
    """A recipe's vocabulary and mask token are those of its family's checkpoints."""
    from nemo_dllm.connectors.conversion import diffusion_model
    from nemo_dllm.connectors.start import adopt_hf_checkpoint

    model = diffusion_model(models / "qwen3", mask_token_id=151_669)
    model.config.vocab_size = 151_936
    with pytest.raises(ValueError, match=r"contradicts the config.json of .*: vocab_size=151936 \(checkpoint: "):
        adopt_hf_checkpoint(model, models / "qwen3", tmp_path / "run", recipe_mask_token_id=151_669)


@pytest.mark.nemo
def test_other_sizes_of_an_import_are_told_before_its_mask_token(models, single_process, tmp_path):
    from nemo_dllm.connectors.adoption import adopt_import
    from nemo_dllm.connectors.conversion import diffusion_model, import_checkpoint

    imported = import_checkpoint(models / "qwen3", tmp_path / "nemo", kind="a2d", mask_token_id=42)
    model = diffusion_model(models / "qwen3", "a2d", mask_token_id=17)
    model.config.num_layers = 7
    with pytest.raises(ValueError, match="contradicts the config.json of .*num_layers=7"):
        adopt_import(model, imported, RECIPE)
