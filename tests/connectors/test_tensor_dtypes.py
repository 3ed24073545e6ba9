"""Every tensor comes back in the dtype that it had, and a tied head as often as it was there."""

import json

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.nemo

FAMILIES = ("qwen3", "qwen2", "llama", "sdar", "dream", "llada", "qwen3_moe", "sdar_moe", "llada_moe", "llada2_moe")
HEADS = {
    "qwen3": ("model.embed_tokens.weight", "lm_head.weight", "tie_word_embeddings"),
    "llada": ("model.transformer.wte.weight", "model.transformer.ff_out.weight", "weight_tying"),
    "llada2_moe": ("model.word_embeddings.weight", "lm_head.weight", "tie_word_embeddings"),
}


def of(main, **others):
    """Casts tensors to ``main``, and those with a part of their name in ``others`` to that dtype."""

    def change(tensors):
        for name in tensors:
            own = next((dtype for part, dtype in others.items() if part in name), main)
            tensors[name] = tensors[name].to(own)

    return change


MIXTURES = {
    "norms fp32": of(torch.bfloat16, norm=torch.float32, ln_f=torch.float32),
    "norms bf16": of(torch.float32, norm=torch.bfloat16, ln_f=torch.bfloat16),
    "routers fp32": of(torch.float16, gate=torch.float32),
    # In one parameter with tensors of the other: neither holds the other's values.
    "queries and up fp16": of(torch.bfloat16, q_proj=torch.float16, query_key=torch.float16, up_proj=torch.float16),
    # Megatron stores the layers as one.
    "a layer fp32": of(torch.bfloat16, **{"layers.1.": torch.float32, "blocks.1.": torch.float32}),
}


@pytest.fixture
def convert(single_process, tmp_path):
    """Imports a folder and exports that; returns both."""
    from nemo_dllm.connectors.conversion import import_checkpoint
    from nemo_dllm.connectors.hf_export import export_hf_checkpoint

    def convert(source, label="1"):
        imported = import_checkpoint(source, tmp_path / f"nemo{label}")
        return imported, export_hf_checkpoint(imported, tmp_path / f"hf{label}")

    return convert


def summary(folder):
    return json.loads((folder / "nemo_dllm_conversion.json").read_text())


def assert_same_file(exported, source):
    left, right = (load_file(folder / "model.safetensors") for folder in (exported, source))
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype and torch.equal(tensor, right[name]), name
    assert (exported / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("name", FAMILIES)
def test_mixed_dtypes_come_back(convert, make_twin, name, mixture):
    # Wrong on purpose: what the file holds counts.
    source = make_twin(name, MIXTURES[mixture], dtype="float16")
    imported, exported = convert(source)
    assert_same_file(exported, source)
    assert json.loads((exported / "config.json").read_text())["dtype"] == "float16"
    assert summary(imported)["checksum"] == summary(exported)["checksum"]
    assert summary(imported)["dtype"] == {"norms bf16": "float32", "routers fp32": "float16"}.get(mixture, "bfloat16")


def test_models_in_use_have_one_dtype(convert, make_twin):
    from nemo_dllm.connectors.hf_export import load_nemo_checkpoint

    imported, _ = convert(make_twin("qwen3", MIXTURES["norms fp32"]))
    assert {p.dtype for p in load_nemo_checkpoint(imported).module.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("name", HEADS)
def test_a_tied_head_that_is_in_the_file_stays_there(convert, make_twin, name):
    embedding, head, tie = HEADS[name]

    def repeat(tensors):
        tensors[head] = tensors[embedding].clone()

    source = make_twin(name, repeat, **{tie: True})
    imported, exported = convert(source)
    assert_same_file(exported, source)
    # It is no parameter of its own.
    tensors = load_file(source / "model.safetensors")
    unique = sum(tensor.numel() for key, tensor in tensors.items() if key != head)
    assert summary(imported)["parameters"]["total"] == summary(exported)["parameters"]["total"] == unique
    assert_same_file(convert(exported, "2")[1], source)


def test_a_head_that_is_not_there_may_be_tied(convert, make_twin):
    def remove(tensors):
        del tensors["lm_head.weight"]

    expected = "lacks .1.: lm_head.weight\n.* if it is, set tie_word_embeddings to true there"
    with pytest.raises(ValueError, match=expected):
        convert(make_twin("qwen3", remove))


def test_integers_are_no_weights(convert, make_twin):
    def quantise(tensors):
        tensors["model.layers.0.mlp.down_proj.weight"] = tensors["model.layers.0.mlp.down_proj.weight"].to(torch.int8)

    with pytest.raises(ValueError, match=r"tensors that are no floats \(1\): .*down_proj.weight \(torch.int8\)"):
        convert(make_twin("qwen3", quantise))


def test_a_dtype_that_is_never_trained_is_named(convert, make_twin):
    def quantise(tensors):
        for name in ("lm_head.weight", "model.norm.weight"):
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)

    expected = "holds tensors of F8_E4M3, which are not supported: lm_head.weight, model.norm.weight; take the"
    with pytest.raises(ValueError, match=expected):
        convert(make_twin("qwen3", quantise))
