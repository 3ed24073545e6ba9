"""Checkpoints with experts through NeMo's own import and export calls."""

import json

import pytest
import torch
from safetensors.torch import load_file

from nemo_dllm.connectors.tokenizer_files import load_hf_tokenizer

pytestmark = pytest.mark.nemo

BIASES = [f"model.layers.{layer}.mlp.gate.expert_bias" for layer in (1, 2)]


@pytest.fixture
def roundtrip(single_process, tmp_path):
    """Imports a checkpoint folder and exports it; ``change`` may edit the NeMo checkpoint in between."""
    from nemo.collections import llm

    import nemo_dllm.connectors.importers  # noqa: F401
    from nemo_dllm.collections.diffusion.models.mdlm import MDLMModel
    from nemo_dllm.collections.diffusion.objectives import MaskedDiffusion
    from nemo_dllm.connectors.config import hf_to_nemo_config

    def convert(source, **export):
        model = MDLMModel(hf_to_nemo_config(source), MaskedDiffusion())
        imported = llm.import_ckpt(model, source=f"hf://{source}", output_path=tmp_path / "nemo")
        return llm.export_ckpt(imported, target="hf", output_path=tmp_path / "hf", **export)

    return convert


def weights(folder):
    return {name: t for file in folder.glob("model*.safetensors") for name, t in load_file(file).items()}


def assert_same(exported, source):
    ours, theirs = weights(exported), weights(source)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) and ours[name].dtype == theirs[name].dtype for name in ours)
    ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (exported, source))
    # Told by the tokenizer there.
    assert ours == theirs | {"mask_token_id": load_hf_tokenizer(source).mask_token_id}


@pytest.mark.parametrize("name", ["sdar_moe", "llada_moe", "llada_moe_dense_shared", "llada2_moe"])
def test_a_diffusion_checkpoint_comes_back_as_it_was(roundtrip, models, name):
    exported = roundtrip(models / name)
    assert_same(exported, models / name)
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        assert (exported / file).read_bytes() == (models / name / file).read_bytes()


def test_shards_do_not_matter(roundtrip, models):
    exported = roundtrip(models / "llada2_moe", max_shard_size=300_000)
    assert len(list(exported.glob("model-*.safetensors"))) > 1
    assert_same(exported, models / "llada2_moe")


@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16])
def test_half_precision_stays_and_biases_keep_theirs(roundtrip, make_twin, bias_dtype):
    def halve(tensors):
        for name in tensors:
            tensors[name] = tensors[name].to(bias_dtype if name in BIASES else torch.bfloat16)

    twin = make_twin("llada2_moe", halve, torch_dtype="bfloat16")
    assert_same(roundtrip(twin), twin)


def stack(tensors):
    """The layout in which dFactory trains: one tensor for all experts of a layer."""
    for layer in (1, 2):
        for part in ("gate_proj", "up_proj", "down_proj"):
            prefix = f"model.layers.{layer}.mlp.experts."
            tensors[f"{prefix}{part}"] = torch.stack([tensors.pop(f"{prefix}{e}.{part}.weight") for e in range(16)])


def test_stacked_experts_become_single_ones(roundtrip, models, make_twin):
    twin = make_twin("llada2_moe", stack, model_type="llada2_moe_veomni")
    assert weights(twin)["model.layers.1.mlp.experts.down_proj"].shape == (16, 64, 32)
    assert_same(roundtrip(twin), models / "llada2_moe")


def test_slices_of_stacked_experts(models, make_twin):
    from nemo_dllm.connectors.checkpoint_files import HFCheckpoint
    from nemo_dllm.connectors.stacked_experts import per_expert

    single = HFCheckpoint(models / "llada2_moe")
    stacked = per_expert(HFCheckpoint(make_twin("llada2_moe", stack)))
    assert stacked.shapes == single.shapes
    assert per_expert(single) is single
    for name in ("model.layers.2.mlp.experts.15.down_proj.weight", "model.layers.1.mlp.experts.3.up_proj.weight"):
        for part in ({}, {"rows": slice(8, 16)}, {"columns": slice(4, 20)}):
            assert torch.equal(stacked.tensor(name, **part), single.tensor(name, **part))


def test_stacks_of_too_few_experts_are_named(load, make_twin):
    def shorten(tensors):
        stack(tensors)
        name = "model.layers.1.mlp.experts.up_proj"
        tensors[name] = tensors[name][:15].clone()

    with pytest.raises(ValueError, match=r"lacks \(1\): model.layers.1.mlp.experts.15.up_proj.weight$"):
        load(make_twin("llada2_moe", shorten))


def test_an_autoregressive_model_becomes_a_diffusion_model(roundtrip, models):
    exported = roundtrip(models / "qwen3_moe")
    ours, theirs = weights(exported), weights(models / "qwen3_moe")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    config = json.loads((exported / "config.json").read_text())
    assert (config["model_type"], config["mask_token_id"]) == ("a2d-qwen3moe", 196)
    assert (config["num_experts"], config["norm_topk_prob"], config["mlp_only_layers"]) == (8, True, [])
