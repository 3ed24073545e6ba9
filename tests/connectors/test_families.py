"""What each dense family's config.json means."""

import json

import pytest
from safetensors.torch import load_file

from nemo_dllm.connectors.families.dream import DREAM
from nemo_dllm.connectors.families.llada import LLADA
from nemo_dllm.connectors.families.llama import LLAMA
from nemo_dllm.connectors.families.qwen2 import QWEN2
from nemo_dllm.connectors.families.qwen3 import QWEN3
from nemo_dllm.connectors.families.registry import FAMILIES, family_of, find_family
from nemo_dllm.connectors.families.sdar import SDAR

# folder: family, how its class attends, shift, block size, mask token, whether that is added to the tokenizer.
FACTS = {
    "qwen3": (QWEN3, "causal", False, None, 196, True),
    "a2d_qwen3": (QWEN3, "bidirectional", False, None, 196, True),
    "qwen2": (QWEN2, "causal", False, None, 196, True),
    "a2d_qwen2": (QWEN2, "bidirectional", False, None, 196, True),
    "llama": (LLAMA, "causal", False, None, 196, True),
    "llama3_rope": (LLAMA, "causal", False, None, 196, True),
    "a2d_llama": (LLAMA, "bidirectional", False, None, 196, True),
    "sdar": (SDAR, "block_causal", False, 4, 196, False),
    "dream": (DREAM, "bidirectional", True, None, 194, False),
    "llada": (LLADA, "bidirectional", False, None, 197, False),
    "llada_gqa": (LLADA, "bidirectional", False, None, 197, False),
}


def hf_config(models, name, **changes):
    config = json.loads((models / name / "config.json").read_text()) | changes
    return {key: value for key, value in config.items() if value is not ...}


@pytest.mark.nemo
@pytest.mark.parametrize("name", FACTS)
def test_facts(models, name):
    from nemo_dllm.connectors.facts import read_facts

    family, attention, right_shift, block_size, mask_token_id, added = FACTS[name]
    assert find_family(hf_config(models, name)) is family
    facts = read_facts(models / name)
    assert (facts.family, facts.attention, facts.right_shift) == (family.name, attention, right_shift)
    assert (facts.block_size, facts.mask_token_id, facts.mask_token_added) == (block_size, mask_token_id, added)


@pytest.mark.nemo
def test_a_block_size_that_config_json_does_not_name_is_the_family_s(make_twin, monkeypatch):
    from nemo_dllm.connectors import facts

    said = []
    monkeypatch.setattr(facts.logging, "info", said.append)
    assert facts.read_facts(make_twin("sdar", block_size=16)).block_size == 16
    assert said == []
    assert facts.read_facts(make_twin("sdar", folder="silent", block_size=..., mask_token_id=...)).block_size == 4
    assert "names no block_size; that of family sdar is used, 4; set block_size there" in said[0]


@pytest.mark.nemo
def test_a_configuration_is_of_the_family_of_its_nearest_known_ancestor():
    from nemo.collections import llm

    from nemo_dllm.collections.diffusion.models.dream import DreamConfig7B
    from nemo_dllm.collections.diffusion.models.llada import LLaDAConfig8B
    from nemo_dllm.collections.diffusion.models.sdar import SDARConfig8B

    for config_class, family in (
        (llm.Qwen3Config8B, QWEN3),
        (llm.Qwen25Config7B, QWEN2),
        (llm.Llama2Config7B, LLAMA),
        (llm.Llama32Config1B, LLAMA),
        (SDARConfig8B, SDAR),
        (DreamConfig7B, DREAM),
        (LLaDAConfig8B, LLADA),
    ):
        assert family_of(object.__new__(config_class)) is family
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)


@pytest.mark.nemo
@pytest.mark.parametrize("name", FACTS)
def test_a_configuration_describes_itself(models, name):
    """From config.json to NeMo's configuration, to a new config.json, and back, nothing is lost."""
    hf = hf_config(models, name)
    family = find_family(hf)
    config = family.build_nemo_config(hf)
    assert family.config.differences(config, hf) == {}
    assert family.config.update(hf, config) == hf
    written = family.config.to_hf(config)
    again = family.build_nemo_config(written)
    assert type(again) is type(config)
    assert family.config.to_nemo(written) == family.config.to_nemo(hf)


def test_a_checkpoint_of_dense_llada(models):
    hf = hf_config(models, "llada_gqa")
    values = LLADA.config.to_nemo(hf)
    assert (values["num_attention_heads"], values["num_query_groups"], values["kv_channels"]) == (4, 2, 16)
    for change, groups in (
        ({"n_kv_heads": None}, 4),
        ({"n_kv_heads": ...}, 4),
        ({"n_kv_heads": None, "multi_query_attention": True}, 1),
    ):
        assert LLADA.config.to_nemo(hf_config(models, "llada_gqa", **change))["num_query_groups"] == groups
    unnamed = hf_config(models, "llada", mlp_hidden_size=None, mlp_ratio=3)
    assert LLADA.config.to_nemo(unnamed)["ffn_hidden_size"] == 192
    with pytest.raises(ValueError, match="config.json lacks n_layers, weight_tying$"):
        LLADA.config.to_nemo(hf_config(models, "llada", weight_tying=..., n_layers=...))
    with pytest.raises(ValueError, match="neither rope_theta nor rope_parameters.rope_theta"):
        LLADA.config.to_nemo(hf_config(models, "llada", rope_theta=...))


def test_llada_s_tables_have_embedding_size_rows(models):
    hf = hf_config(models, "llada", vocab_size=190)
    assert LLADA.config.to_nemo(hf)["vocab_size"] == 200
    assert LLADA.config.to_nemo(hf_config(models, "llada", embedding_size=None))["vocab_size"] == 200


@pytest.mark.nemo
def test_a_grown_llada_names_both_sizes(models):
    hf = hf_config(models, "llada", vocab_size=190)
    config = LLADA.build_nemo_config(hf)
    assert LLADA.config.update(hf, config) == hf
    config.vocab_size = 208
    updated = LLADA.config.update(hf, config)
    assert (updated["vocab_size"], updated["embedding_size"]) == (208, 208)


@pytest.mark.nemo
@pytest.mark.parametrize("name", ["llada", "dream"])
def test_heads_of_a_size_that_config_json_cannot_tell_are_refused(models, name):
    hf = hf_config(models, name)
    family = find_family(hf)
    config = family.build_nemo_config(hf)
    config.kv_channels = 32
    with pytest.raises(ValueError, match=r"kv_channels=32 cannot be told in config.json.* = 16 units; set it to that"):
        family.config.to_hf(config)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llada", {"include_bias": True}),
        ("llada", {"include_qkv_bias": True}),
        ("llada", {"block_type": "sequential"}),
        ("llada", {"activation_type": "swiglu"}),
        ("llada", {"layer_norm_type": "default"}),
        ("llada", {"attention_layer_norm": True}),
        ("llada", {"block_group_size": 2}),
        ("llada", {"alibi": True}),
        ("llada", {"scale_logits": True}),
        ("llada", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("qwen2", {"use_sliding_window": True}),
        ("qwen2", {"layer_types": ["sliding_attention", "full_attention"]}),
        ("dream", {"use_sliding_window": True}),
        ("sdar", {"attention_bias": True}),
        ("llama", {"mlp_bias": True}),
        ("llama", {"hidden_act": "gelu"}),
    ],
)
def test_what_the_layers_do_not_do_is_refused(models, name, change):
    hf = hf_config(models, name, **change)
    with pytest.raises(ValueError, match=f"has {next(iter(change))}"):
        find_family(hf).config.to_nemo(hf)


def test_the_golden_checkpoints_have_what_their_family_has(models):
    """The tensors that make a family one: a test of the tests' data."""
    for name, tensor in (
        ("qwen2", "model.layers.0.self_attn.q_proj.bias"),
        ("dream", "model.layers.1.self_attn.v_proj.bias"),
        ("sdar", "model.layers.2.self_attn.q_norm.weight"),
        ("llada", "model.transformer.blocks.1.ff_proj.weight"),
    ):
        assert load_file(models / name / "model.safetensors")[tensor].abs().max() > 0.01
