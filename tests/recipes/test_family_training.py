"""A family's recipe from a Hugging Face folder, two steps, and back to a Hugging Face folder."""

import json
import runpy
from fnmatch import fnmatch
from pathlib import Path

import pytest
from safetensors.torch import load_file

pytestmark = pytest.mark.nemo

MODELS = Path(__file__).parents[1] / "golden" / "models"
# recipe, golden checkpoint, mask token, fields of the objective
JOBS = {
    "dream": ("dream_7b_finetune", "dream", 194, {}),
    "llada": ("llada_8b_pretrain", "llada_gqa", 197, {}),
    "llama": ("llama31_8b_a2d_pretrain", "llama3_rope", 196, {}),
    "llada lora": ("llada_8b_lora", "llada_gqa", 197, {}),
    "qwen3moe lora": ("qwen3_30b_a3b_a2d_lora", "qwen3_moe", 196, {}),
    "sdar": ("sdar_1p7b_finetune", "sdar", 196, {}),
    "qwen2": ("qwen25_7b_bd3lm_finetune", "qwen2", 196, {"block_size": 4}),
}


@pytest.mark.parametrize("family", JOBS)
def test_from_a_folder_to_a_folder(forks, tmp_path, family):
    recipe, checkpoint, mask_token_id, objective = JOBS[family]
    job = {
        "recipe_name": recipe,
        "checkpoint": MODELS / checkpoint,
        "folder": tmp_path,
        "mask_token_id": mask_token_id,
        "objective": objective,
    }
    script = Path(__file__).with_name("family_jobs.py")
    process = forks.Process(target=runpy.run_path, args=(str(script), {"job": job}, "__main__"))
    process.start()
    process.join(timeout=300)
    assert process.exitcode == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (MODELS / checkpoint, tmp_path / "hf"))
    assert before.keys() == after.keys()
    moved = {name: (after[name] - before[name]).abs().max().item() for name in before}
    if recipe.endswith("_lora"):
        attention = ("q_proj", "k_proj", "v_proj", "o_proj", "attn_out")
        linear = attention if "moe" in family else (*attention, "ff_proj", "up_proj", "blocks.*.ff_out")
        expected = {name for name in before if any(fnmatch(name, f"*.{layer}.weight") for layer in linear)}
        assert {name for name, by in moved.items() if by > 0} == expected
    else:
        # Two steps at the recipe's rate: all weights have moved, none further than two steps of Adam take it.
        assert min(moved.values()) > 0 and max(moved.values()) < 1e-3
    source, config = (json.loads((f / "config.json").read_text()) for f in (MODELS / checkpoint, tmp_path / "hf"))
    if checkpoint in ("dream", "llada_gqa", "sdar"):
        assert config == source
    else:
        assert config["model_type"] == f"a2d-{family.split()[0]}"
        assert config["mask_token_id"] == mask_token_id
        assert config.get("block_size") == objective.get("block_size")
