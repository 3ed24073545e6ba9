"""Exports that bring their modelling code along: loaded without us, imported again, exported again."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

pytestmark = pytest.mark.nemo

# Written anew by every conversion: it names the source.
SUMMARY = "nemo_dllm_conversion.json"
FAMILIES = {"qwen3_tied": "a2d-qwen3", "llama": "a2d-llama", "qwen3_moe": "a2d-qwen3moe"}


@pytest.fixture(scope="module")
def convert(single_process):
    """Imports a checkpoint, as an A2DModel where it is autoregressive, and exports it."""
    from nemo.collections import llm

    import nemo_dllm.connectors.importers  # noqa: F401
    from nemo_dllm.collections.diffusion.models.a2d import A2DModel
    from nemo_dllm.collections.diffusion.models.mdlm import MDLMModel
    from nemo_dllm.collections.diffusion.objectives import MaskedDiffusion
    from nemo_dllm.connectors.config import hf_to_nemo_config
    from nemo_dllm.connectors.facts import read_facts

    def run(source, folder) -> Path:
        model_class = A2DModel if read_facts(source).attention == "causal" else MDLMModel
        model = model_class(hf_to_nemo_config(source), MaskedDiffusion())
        imported = llm.import_ckpt(model, source=f"hf://{source}", output_path=folder / "nemo")
        return llm.export_ckpt(imported, target="hf", output_path=folder / "hf")

    return run


@pytest.fixture(scope="module", params=FAMILIES)
def exported(request, convert, models, tmp_path_factory):
    """Name of an autoregressive checkpoint, and what became of it."""
    return request.param, convert(models / request.param, tmp_path_factory.mktemp(request.param))


def test_plain_transformers_loads_it_with_our_logits(exported, models):
    name, folder = exported
    copy = shutil.copytree(folder, folder.with_name("with_golden"))
    shutil.copy(models / name / "golden.safetensors", copy)
    script = Path(__file__).with_name("load_with_transformers.py")
    run = subprocess.run([sys.executable, script, copy], capture_output=True, text=True, timeout=300, cwd="/")
    assert run.returncode == 0, run.stderr[-3000:]
    (facts,) = json.loads(run.stdout.splitlines()[-1])["folders"].values()
    assert facts["config"]["model_type"] == FAMILIES[name]
    for differences in facts["loaded"].values():
        assert max(differences.values()) < 2e-5, differences


def test_comes_back_equal_without_its_code_being_run(exported, convert, tmp_path):
    _, first = exported
    hostile = shutil.copytree(first, tmp_path / "hostile")
    code = hostile / "modeling_a2d.py"
    code.write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\nraise SystemExit('code of the checkpoint ran')\n")
    second = convert(hostile, tmp_path)
    assert not (tmp_path / "executed").exists()
    assert sorted(os.listdir(second)) == sorted(os.listdir(first))
    for file in first.iterdir():
        if file.name == code.name:
            assert (second / file.name).read_bytes() == code.read_bytes()
        elif file.suffix != ".safetensors" and file.name != SUMMARY:
            assert (second / file.name).read_bytes() == file.read_bytes(), file.name
    left, right = (load_file(folder / "model.safetensors") for folder in (first, second))
    assert left.keys() == right.keys()
    assert all((left[key] == right[key]).all() for key in left)


def test_names_its_code_completely(exported):
    _, folder = exported
    auto_map = json.loads((folder / "config.json").read_text())["auto_map"]
    assert auto_map.keys() == {"AutoConfig", "AutoModel", "AutoModelForMaskedLM"}
    source = (folder / "modeling_a2d.py").read_text()
    for target in auto_map.values():
        module, name = target.split(".")
        assert (folder / f"{module}.py").is_file()
        assert f"class {name}(" in source
    assert "nemo" not in source


def test_code_of_an_autoregressive_source_is_not_mistaken_for_ours(convert, make_twin, tmp_path):
    twin = make_twin("qwen3", auto_map={"AutoModelForCausalLM": "modeling_qwen3.Qwen3"})
    (twin / "modeling_qwen3.py").write_text("raise SystemExit('code of the checkpoint ran')\n")
    folder = convert(twin, tmp_path)
    auto_map = json.loads((folder / "config.json").read_text())["auto_map"]
    assert {target.split(".")[0] for target in auto_map.values()} == {"modeling_a2d"}


def test_a_diffusion_checkpoint_without_code_gets_none(convert, models, tmp_path):
    """It is exported as it came; its reader knows the class."""
    folder = convert(models / "a2d_qwen3", tmp_path)
    assert not list(folder.glob("*.py"))
    assert "auto_map" not in json.loads((folder / "config.json").read_text())
