"""NeMo's own import, and what it wrote in use, on a machine with a GPU."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

pytestmark = [pytest.mark.gpu, pytest.mark.nemo]

# Not behind `if __name__ == "__main__"`: people write scripts so, and no process may be spawned that runs it again.
SCRIPT = """
import sys
import torch
from nemo.collections import llm
from safetensors.torch import load_file, save_file
import nemo_dllm.connectors.importers
from nemo_dllm.collections.diffusion.inference import load_checkpoint
from nemo_dllm.collections.diffusion.models.a2d import A2DModel
from nemo_dllm.collections.diffusion.objectives import MaskedDiffusion
from nemo_dllm.connectors.config import hf_to_nemo_config

source, folder = sys.argv[1:]
model = A2DModel(hf_to_nemo_config(source), MaskedDiffusion())
llm.import_ckpt(model, source=f"hf://{source}", output_path=f"{folder}/imported")
llm.export_ckpt(f"{folder}/imported", target="hf", output_path=f"{folder}/exported")
loaded = load_checkpoint(f"{folder}/imported")
assert loaded.device.type == "cuda"
tokens = load_file(f"{source}/golden.safetensors")["input_ids"].cuda()
save_file({"logits": loaded.denoiser(tokens).float().cpu()}, f"{folder}/logits.safetensors")
"""


@pytest.mark.parametrize("name", ["qwen3", "qwen3_tied"])
def test_import_export_and_logits(models, tmp_path, name):
    source = models / name
    run = subprocess.run([sys.executable, "-c", SCRIPT, source, tmp_path], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-5000:]
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "exported" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    expected = load_file(source / "golden.safetensors")["logits_bidirectional"]
    logits = load_file(tmp_path / "logits.safetensors")["logits"]
    # TF32 and Transformer Engine's kernels are as a user has them.
    assert (logits - expected).abs().mean() / expected.std() < 2e-2
