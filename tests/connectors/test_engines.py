"""Exports keep the layout and the fields that serving engines read."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nemo_dllm.connectors.families.registry import FAMILIES

pytestmark = pytest.mark.nemo

GOLDEN = {"SDARForCausalLM": "sdar", "SDARMoeForCausalLM": "sdar_moe", "LLaDA2MoeModelLM": "llada2_moe"}


def served_layouts():
    """The module beside this file; test files are no package."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("served_layouts", Path(__file__).with_name("served_layouts.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.LAYOUTS


LAYOUTS = served_layouts()
KNOWN = {c.architecture for family in FAMILIES for c in family.hf_classes}
SERVED = sorted(KNOWN & LAYOUTS.keys())


@pytest.fixture
def model_of(single_process):
    """An unbuilt diffusion model of a checkpoint folder."""
    from nemo_dllm.collections.diffusion.models.mdlm import MDLMModel
    from nemo_dllm.collections.diffusion.objectives import MaskedDiffusion
    from nemo_dllm.connectors.config import hf_to_nemo_config

    return lambda source: MDLMModel(hf_to_nemo_config(source), MaskedDiffusion())


def test_every_served_class_has_a_family():
    assert SERVED == sorted(LAYOUTS) == sorted(GOLDEN)


@pytest.mark.parametrize("architecture", SERVED)
def test_an_export_has_the_tensors_and_fields_that_are_read(model_of, models, tmp_path, architecture):
    from nemo.collections import llm

    import nemo_dllm.connectors.importers  # noqa: F401

    source = models / GOLDEN[architecture]
    imported = llm.import_ckpt(model_of(source), source=f"hf://{source}", output_path=tmp_path / "nemo")
    exported = llm.export_ckpt(imported, target="hf", output_path=tmp_path / "hf")
    config = json.loads((exported / "config.json").read_text())
    layout = LAYOUTS[architecture]
    # Engines choose their loader by the first name.
    assert config["architectures"][0] == architecture
    assert layout.required | layout.silent <= config.keys()
    tensors = load_file(exported / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == layout.shapes(config)


@pytest.mark.parametrize("architecture", SERVED)
def test_a_model_trained_from_scratch_says_what_would_be_defaulted(model_of, models, architecture):
    from nemo_dllm.connectors.config import diffusion_hf_config

    source = json.loads((models / GOLDEN[architecture] / "config.json").read_text())
    model = model_of(models / GOLDEN[architecture])
    config = diffusion_hf_config(model.config, model.objective, vocab_size=200, dtype=torch.bfloat16)
    layout = LAYOUTS[architecture]
    assert config["architectures"] == [architecture]
    missing = (layout.required | layout.silent) - config.keys()
    assert not missing
    differing = {name: (config[name], source[name]) for name in layout.silent if config[name] != source[name]}
    assert not differing
