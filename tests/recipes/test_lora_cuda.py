"""Adapters on a GPU, from a Hugging Face folder to a Hugging Face folder, with and without Transformer Engine."""

import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from nemo_dllm.collections.diffusion.attention.layers import have_transformer_engine

pytestmark = [pytest.mark.gpu, pytest.mark.nemo]

MODEL = Path(__file__).parents[1] / "golden" / "models" / "qwen3"
JOBS = Path(__file__).with_name("family_jobs.py")
needs_transformer_engine = pytest.mark.skipif(not have_transformer_engine(), reason="needs Transformer Engine")
LAYERS = ["local", pytest.param("transformer_engine", marks=needs_transformer_engine)]

SCRIPT = """
import runpy
import sys
import nemo_run as run
import torch
from nemo_dllm.collections.diffusion.inference.locate import locate_checkpoint
from nemo_dllm.collections.diffusion.single_process import single_process
from nemo_dllm.connectors import hf_export
from nemo_dllm.connectors.checkpoint_files import HFCheckpoint
from nemo_dllm.recipes.builder import RECIPES, set_precision

jobs, source, folder, layers, steps = sys.argv[1:]
if steps != "0":
    recipe = RECIPES["qwen3_8b_a2d_lora"](init_from=source, dir=folder, name="run")
    runpy.run_path(jobs)["shrink"](recipe, HFCheckpoint(source).config, 196)
    set_precision(recipe, "bf16")
    recipe.model.transformer_impl = layers
    recipe.trainer.max_steps, recipe.optim.config.lr = int(steps), 1e-2
    run.run(recipe, direct=True)
else:
    last = locate_checkpoint(f"{folder}/run").path
    hf_export.export_hf_checkpoint(last, f"{folder}/hf")
    tokens = torch.arange(32, device="cuda").view(2, 16)

    def logits():
        with torch.no_grad():
            return hf_export.load_nemo_checkpoint(last).module.cuda().eval()(tokens).float()

    with single_process():
        merged = logits()
        hf_export.merge_adapters = lambda core: None
        applied = logits()
        hf_export.add_adapters = lambda core, lora: None
        hf_export._ADAPTER = "no name has this"
        base = logits()
    assert (merged - applied).abs().mean() < 0.02 * base.std()
    assert (merged - base).abs().mean() > 0.1 * base.std()
"""


@pytest.mark.parametrize("layers", LAYERS)
def test_trained_resumed_and_merged(tmp_path, layers):
    for steps in ("2", "4", "0"):
        command = [sys.executable, "-c", SCRIPT, JOBS, MODEL, tmp_path, layers, steps]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, (steps, done.stderr[-5000:])
    before, after = (load_file(folder / "model.safetensors") for folder in (MODEL, tmp_path / "hf"))
    assert before.keys() == after.keys()
    changed = {name for name in before if (before[name].bfloat16() != after[name].bfloat16()).any()}
    assert changed == {name for name in before if "_proj." in name}
