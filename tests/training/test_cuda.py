"""The smallest recipe on a GPU: train, save, be killed, go on, sample; with and without Transformer Engine."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_dllm.collections.diffusion.attention.layers import have_transformer_engine

pytestmark = [pytest.mark.gpu, pytest.mark.nemo]

SCRIPT = Path(__file__).with_name("recorded_run.py")
needs_transformer_engine = pytest.mark.skipif(not have_transformer_engine(), reason="needs Transformer Engine")
LAYERS = ["local", pytest.param("transformer_engine", marks=needs_transformer_engine)]


@pytest.fixture
def run_on_gpu(tmp_path):
    """Runs the recipe in a process of its own; returns its record."""
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"line {i} holds {i * i} and {i % 7}" for i in range(3000)))

    def run(name, killed_after=None, precision="bf16", **edits):
        records = tmp_path / f"records {name} {killed_after}"
        records.mkdir()
        small = {"data.path": str(text), "data.cache_dir": str(tmp_path / "cache"), "data.num_val_rows": 32}
        # Head sizes that every attention kernel takes.
        small |= {"model.config.kv_channels": 64, "trainer.max_steps": 12, "trainer.val_check_interval": 3}
        small |= {"trainer.log_every_n_steps": 2, "optim.lr_scheduler.warmup_steps": 2}
        job = {"folder": str(tmp_path / name), "records": str(records), "rank": 0, "ranks": 1}
        job |= {"killed_after": killed_after, "precision": precision, "edits": small | edits}
        job["factory"] = "mdlm_tiny"
        code = f"import runpy; runpy.run_path({str(SCRIPT)!r}, {{'job': {job!r}}}, '__main__')"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=240)
        console = (
            (records / "console0").read_text()[-3000:] if (records / "console0").exists() else done.stderr.decode()
        )
        assert done.returncode == (0 if killed_after is None else -9), console
        return json.loads((records / "record0").read_text())

    return run


@pytest.mark.parametrize("transformer_impl", LAYERS)
def test_a_killed_run_goes_on_and_its_model_writes(run_on_gpu, tmp_path, transformer_impl):
    layers = {"model.transformer_impl": transformer_impl}
    straight = run_on_gpu("straight", **layers)
    run_on_gpu("killed", killed_after=7, **layers)
    resumed = run_on_gpu("killed", **layers)
    assert resumed["start"] == 6
    for step, loss in resumed["losses"].items():
        # Sums on a GPU come in any order.
        assert loss == pytest.approx(straight["losses"][step], rel=2e-3)
        assert resumed["samples"][step] == straight["samples"][step]
    command = [sys.executable, "-m", "nemo_dllm.cli", "generate", str(tmp_path / "killed" / "mdlm_tiny")]
    written = subprocess.run(
        [*command, "--prompt", "line 7", "--max-new-tokens", "8", "--no-watch"], capture_output=True, text=True
    )
    assert written.returncode == 0, written.stderr[-3000:]
    assert written.stdout.startswith("line 7")
    assert "<|mask|>" not in written.stdout


@needs_transformer_engine
def test_weights_trained_with_transformer_engine_load_into_local_layers(run_on_gpu, tmp_path):
    run_on_gpu("run", **{"trainer.max_steps": 3})
    code = (
        "import sys; sys.modules['transformer_engine'] = None\n"
        "from nemo_dllm.collections.diffusion.inference import load_checkpoint\n"
        f"model = load_checkpoint({str(tmp_path / 'run' / 'mdlm_tiny')!r})\n"
        "import torch; print(torch.isfinite(model.denoiser(torch.arange(8, device=model.device)[None])).all().item())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("True")


@needs_transformer_engine
@pytest.mark.parametrize("first, then", [("local", "transformer_engine"), ("transformer_engine", "local")])
def test_a_run_goes_on_with_the_other_layers(run_on_gpu, first, then):
    """The same weights and optimizer states under other names: the losses stay within what bf16 kernels differ by."""
    straight = run_on_gpu("straight", **{"model.transformer_impl": first})
    run_on_gpu("changed", killed_after=7, **{"model.transformer_impl": first})
    resumed = run_on_gpu("changed", **{"model.transformer_impl": then})
    assert resumed["start"] == 6
    for step, loss in resumed["losses"].items():
        assert loss == pytest.approx(straight["losses"][step], rel=1e-2)
        assert resumed["samples"][step] == straight["samples"][step]


@pytest.mark.parametrize("precision", ["fp32", "fp16", pytest.param("fp8", marks=needs_transformer_engine)])
def test_every_precision_trains(run_on_gpu, precision):
    record = run_on_gpu(precision, precision=precision, **{"trainer.max_steps": 6})
    assert all(map(math.isfinite, record["losses"].values()))


def test_a_killed_run_that_saves_behind_its_steps_loses_at_most_the_last_checkpoint(run_on_gpu):
    saves = {"trainer.strategy.ckpt_async_save": True}
    straight = run_on_gpu("straight", **saves)
    run_on_gpu("killed", killed_after=10, **saves)
    resumed = run_on_gpu("killed", **saves)
    # Step 9's may not have been complete.
    assert resumed["start"] in (6, 9)
    for step, loss in resumed["losses"].items():
        assert loss == pytest.approx(straight["losses"][step], rel=2e-3)
