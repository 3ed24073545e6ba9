"""Every dense family through NeMo's import and export: what comes back is what went in."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.nemo

DIFFUSION = ("a2d_qwen2", "a2d_llama", "sdar", "dream", "llada", "llada_gqa")
AUTOREGRESSIVE = ("qwen2", "llama", "llama3_rope")
INDEX = "model.safetensors.index.json"
SUMMARY = "nemo_dllm_conversion.json"


@pytest.fixture
def round_trip(single_process, tmp_path):
    """Imports a folder as NeMo does and exports that; returns the export's folder."""
    from nemo.collections import llm

    import nemo_dllm.connectors.importers  # noqa: F401
    from nemo_dllm.collections.diffusion.models.a2d import A2DModel
    from nemo_dllm.collections.diffusion.models.bd3lm import BD3LMModel
    from nemo_dllm.collections.diffusion.models.mdlm import MDLMModel
    from nemo_dllm.collections.diffusion.objectives import BlockDiffusion, MaskedDiffusion
    from nemo_dllm.connectors.config import hf_to_nemo_config
    from nemo_dllm.connectors.facts import read_facts

    def run(source, label="1", **objective):
        facts = read_facts(source)
        objective = {"right_shift": facts.right_shift} | objective
        if facts.block_size is None:
            model_class = A2DModel if facts.attention == "causal" else MDLMModel
            model = model_class(hf_to_nemo_config(source), MaskedDiffusion(**objective))
        else:
            model = BD3LMModel(hf_to_nemo_config(source), BlockDiffusion(block_size=facts.block_size, **objective))
        imported = llm.import_ckpt(model, source=f"hf://{source}", output_path=tmp_path / f"nemo{label}")
        return llm.export_ckpt(imported, target="hf", output_path=tmp_path / f"hf{label}")

    return run


def read_config(folder):
    return json.loads((folder / "config.json").read_text())


def assert_same_weights(left, right):
    left, right = (load_file(folder / "model.safetensors") for folder in (left, right))
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) and left[name].dtype == right[name].dtype for name in left)


@pytest.mark.parametrize("name", DIFFUSION)
def test_a_diffusion_checkpoint_comes_back_as_it_was(round_trip, make_twin, models, name):
    # A name for the mask token that the tokenizer has: else its files would get one.
    mask_token_id = read_config(models / name).get("mask_token_id", 17)
    source = make_twin(name, mask_token_id=mask_token_id)
    (source / "chat_template.jinja").write_text("{{ messages }}")
    exported = round_trip(source)
    assert_same_weights(exported, source)
    names = {file.name for file in source.iterdir()}
    assert {file.name for file in exported.iterdir()} - names <= {SUMMARY}
    for file in names - {"golden.safetensors", "model.safetensors"}:
        assert (exported / file).read_bytes() == (source / file).read_bytes(), file


@pytest.mark.parametrize("name", AUTOREGRESSIVE)
def test_an_autoregressive_checkpoint_becomes_a_diffusion_model(round_trip, models, name):
    first = round_trip(models / name)
    assert_same_weights(first, models / name)
    source, config = read_config(models / name), read_config(first)
    kind = "llama" if "llama" in name else "qwen2"
    changed = {key for key, value in config.items() if value != source.get(key, ...)}
    assert changed <= {
        *("model_type", "architectures", "auto_map", "mask_token_id", "right_shift_logits", "rope_parameters"),
        "rope_scaling",
    }
    assert config["model_type"] == f"a2d-{kind}"
    assert config["rope_scaling"] == source.get("rope_scaling")
    assert config["rope_parameters"]["rope_theta"] == source["rope_theta"]
    second = round_trip(first, "2")
    assert read_config(second) == config
    assert_same_weights(second, first)


@pytest.mark.parametrize("name", ["qwen2", "llada"])
def test_half_precision_and_tied_heads_stay(round_trip, make_twin, name):
    head, tie = {
        "qwen2": ("lm_head.weight", {"tie_word_embeddings": True}),
        "llada": ("model.transformer.ff_out.weight", {"weight_tying": True}),
    }[name]

    def change(tensors):
        del tensors[head]
        for key in tensors:
            tensors[key] = tensors[key].bfloat16()

    source = make_twin(name, change, torch_dtype="bfloat16", **tie)
    exported = round_trip(source)
    assert_same_weights(exported, source)
    assert read_config(exported)["torch_dtype"] == "bfloat16"


def test_a_pickle_comes_back_as_safetensors(round_trip, models, tmp_path):
    source = shutil.copytree(models / "dream", tmp_path / "bin")
    tensors = load_file(source / "model.safetensors")
    torch.save(tensors, source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()
    exported = round_trip(source)
    assert_same_weights(exported, models / "dream")


def shard(folder, num_shards=2):
    """Spread the tensors of a checkpoint folder over shards in turn, so that every layer is in all of them."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = [f"part{index}.safetensors" for index in range(num_shards)]
    weight_map = {name: files[index % num_shards] for index, name in enumerate(tensors)}
    for file in files:
        held = {name: tensor for name, tensor in tensors.items() if weight_map[name] == file}
        save_file(held, folder / file, metadata={"format": "pt"})
    # Wrong on purpose: what a source says stays.
    index = {"metadata": {"total_size": 7, "by": "hand"}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def files_of_weights(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir() if "safetensors" in file.name}


@pytest.mark.parametrize("name", ["qwen3_sharded", "llada", "sdar_moe"])
def test_shards_come_back_byte_for_byte(round_trip, make_twin, models, name):
    source = models / name if name == "qwen3_sharded" else shard(make_twin(name), 3)
    exported = round_trip(source)
    theirs = files_of_weights(source)
    theirs.pop("golden.safetensors")
    assert files_of_weights(exported) == theirs


def test_a_grown_vocabulary_keeps_the_shards(round_trip, make_twin):
    def cut(tensors):
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = tensors[name][:196].clone()

    source = shard(make_twin("qwen3", cut, vocab_size=196))
    exported = round_trip(source)
    index, old = (json.loads((folder / INDEX).read_text()) for folder in (exported, source))
    assert index["weight_map"] == old["weight_map"]
    sizes = {file.name: load_file(file) for file in exported.glob("*.safetensors")}
    total = sum(tensor.nbytes for tensors in sizes.values() for tensor in tensors.values())
    assert index["metadata"] == {"total_size": total, "by": "hand"}
    assert {name: file for file, tensors in sizes.items() for name in tensors} == old["weight_map"]
    table = sizes[old["weight_map"]["lm_head.weight"]]["lm_head.weight"]
    assert len(table) == 197
