"""Rotary embeddings and layouts that the golden files lack, against transformers' own LLaMA and Qwen2."""

import pytest
import torch

from nemo_dllm.connectors.families.registry import find_family

pytestmark = pytest.mark.nemo

LENGTH = 256
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 200,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"rope_type": "linear", "factor": 4.0}
VARIANTS = {
    "base 1e4": {"rope_theta": 1e4},
    "base 5e5": {"rope_theta": 5e5},
    "base 1e6": {"rope_theta": 1e6},
    "linear": {"rope_theta": 1e4, "rope_scaling": LINEAR},
    "llama3": {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 64}},
    "llama3, other factors": {
        "rope_theta": 1e4,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 2.0,
            "high_freq_factor": 8.0,
            "original_max_position_embeddings": 128,
        },
    },
    "every head has keys": {"num_key_value_heads": 4},
    "one head of keys": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "heads of 24": {"head_dim": 24},
}


def save(folder, model_class, config_class, **changes):
    """A random model of transformers on disk, and its tokens and logits."""
    torch.manual_seed(7)
    model = model_class(config_class(**SIZES | changes)).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data = 1 + 0.2 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    tokens = torch.randint(SIZES["vocab_size"], (2, LENGTH))
    with torch.no_grad():
        return tokens, model(tokens).logits


@torch.no_grad()
def error(build_core, folder, tokens, logits):
    from nemo_dllm.collections.diffusion.attention.masks import BlockCausal
    from nemo_dllm.connectors.load import load_hf_weights

    core = build_core(folder)
    load_hf_weights(core, folder)
    positions = torch.arange(LENGTH).expand(2, -1)
    errors = [(core(tokens, given, BlockCausal(1)) - logits).abs().max().item() for given in (None, positions)]
    return max(errors)


@pytest.mark.parametrize("spelling", ["transformers 4", "transformers 5"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_llama_as_in_transformers(build_core, tmp_path, variant, spelling):
    from transformers import LlamaConfig, LlamaForCausalLM

    tokens, logits = save(tmp_path, LlamaForCausalLM, LlamaConfig, **VARIANTS[variant])
    if spelling == "transformers 5":
        respell(tmp_path)
    assert error(build_core, tmp_path, tokens, logits) < 2e-5


@pytest.mark.parametrize("variant", ["base 1e6", "linear", "every head has keys", "tied"])
def test_qwen2_as_in_transformers(build_core, tmp_path, variant):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokens, logits = save(tmp_path, Qwen2ForCausalLM, Qwen2Config, **VARIANTS[variant])
    assert error(build_core, tmp_path, tokens, logits) < 2e-5


def respell(folder):
    import json

    file = folder / "config.json"
    config = json.loads(file.read_text())
    theta, scaling = config.pop("rope_theta"), config.pop("rope_scaling") or {"rope_type": "default"}
    file.write_text(json.dumps(config | {"rope_parameters": {"rope_theta": theta, **scaling}}))


LLAMA2 = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
    "vocab_size": 200,
    "max_position_embeddings": 512,
}


def test_a_llama_of_before_grouped_queries_and_named_bases():
    family = find_family(LLAMA2)
    values = family.config.to_nemo(LLAMA2)
    assert (values["rotary_base"], values["num_query_groups"], values["kv_channels"]) == (1e4, 4, 16)
    exported = family.config.to_hf(family.build_nemo_config(LLAMA2))
    assert (exported["rope_theta"], exported["num_key_value_heads"], exported["head_dim"]) == (1e4, 4, 16)


def test_scaled_frequencies_are_another_configuration_class():
    from nemo.collections.llm.gpt.model.llama import Llama31Config, LlamaConfig

    family = find_family(LLAMA2)
    scaling = LLAMA3 | {"original_max_position_embeddings": 64}
    plain, scaled = family.build_nemo_config(LLAMA2), family.build_nemo_config(LLAMA2 | {"rope_scaling": scaling})
    assert (type(plain), type(scaled)) == (LlamaConfig, Llama31Config)
    assert (scaled.scale_factor, scaled.old_context_len) == (4.0, 64)
    assert family.config.differences(plain, LLAMA2 | {"rope_scaling": scaling}) == {
        "scale_factor": (None, 4.0),
        "low_freq_factor": (None, 1.0),
        "high_freq_factor": (None, 4.0),
        "old_context_len": (None, 64),
    }
    assert family.config.differences(scaled, LLAMA2)["scale_factor"] == (4.0, None)
    for config, expected in ((plain, None), (scaled, scaling)):
        assert family.config.to_hf(config)["rope_scaling"] == expected
        assert family.config.update(LLAMA2, config).get("rope_scaling") == expected
    scaled.seq_len_interpolation_factor = 2.0
    with pytest.raises(ValueError, match="scales its rotary embedding twice"):
        family.config.to_hf(scaled)


def test_a_scaling_without_its_numbers_is_refused():
    with pytest.raises(ValueError, match="rope_type='llama3' lacks low_freq_factor, original_max_position_embeddings$"):
        scaling = {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}
        find_family(LLAMA2).config.to_nemo(LLAMA2 | {"rope_scaling": scaling})


@pytest.mark.parametrize("bias", ["attention_bias", "mlp_bias"])
def test_a_llama_with_biases_is_refused(bias):
    with pytest.raises(ValueError, match=rf"has {bias}=True \(supported: False\)"):
        find_family(LLAMA2).config.to_nemo(LLAMA2 | {bias: True})
