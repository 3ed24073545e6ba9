"""Recipes with experts from a Hugging Face folder, two steps, and back."""

import multiprocessing
import runpy
from pathlib import Path

import pytest
from safetensors.torch import load_file

pytestmark = pytest.mark.nemo

MODELS = Path(__file__).parents[1] / "golden" / "models"
# checkpoint -> recipe, fields of the objective.
JOBS = {
    "llada2_moe": ("llada2_mini_finetune", {"block_size": 4}),
    "llada_moe": ("llada_moe_7b_a1b_pretrain", {}),
    "sdar_moe": ("sdar_30b_a3b_finetune", {"block_size": 4}),
}


@pytest.mark.parametrize("checkpoint", JOBS)
def test_from_a_folder_to_a_folder(tmp_path, monkeypatch, checkpoint):
    recipe, objective = JOBS[checkpoint]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    job = {
        "recipe_name": recipe,
        "checkpoint": MODELS / checkpoint,
        "folder": tmp_path,
        "mask_token_id": 197,
        "objective": objective,
    }
    script = Path(__file__).with_name("family_jobs.py")
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=runpy.run_path, args=(str(script), {"job": job}, "__main__"))
    process.start()
    process.join(timeout=400)
    assert process.exitcode == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (MODELS / checkpoint, tmp_path / "hf"))
    assert before.keys() == after.keys()
    moved = {name: (after[name] - before[name]).abs().max().item() for name in before}
    biases = {name for name in moved if name.endswith("expert_bias")}
    assert not any(moved[name] for name in biases)
    # All weights but those of experts without tokens, none further than two steps of Adam take it.
    rest = moved.keys() - biases
    assert min(moved[name] for name in rest if ".experts." not in name) > 0
    assert max(moved[name] for name in rest if ".experts." in name) > 0
    assert max(moved[name] for name in rest) < 1e-3
