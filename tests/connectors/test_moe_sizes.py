"""Sizes of published models with experts: against their config.json, and their parameters counted."""

import pytest
import torch

from nemo_dllm.connectors.families.registry import family_of, find_family

pytestmark = pytest.mark.nemo

LLADA2_HF = {
    "model_type": "llada2_moe",
    "architectures": ["LLaDA2MoeModelLM"],
    "max_position_embeddings": 16384,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_experts": 256,
    "num_key_value_heads": 4,
    "num_shared_experts": 1,
    "rope_theta": 600000,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "use_bias": False,
    "use_qkv_bias": False,
    "rms_norm_eps": 1e-6,
    "head_dim": 128,
    "vocab_size": 157184,
    "moe_router_enable_expert_bias": True,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "score_function": "sigmoid",
    "partial_rotary_factor": 0.5,
}
QWEN3_MOE_HF = {
    "max_position_embeddings": 40960,
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
# As published; LLaDA-MoE's vocabulary is that of its tokenizer.
PUBLISHED = {
    "LLaDA2Config16B": LLADA2_HF
    | {
        "num_hidden_layers": 20,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "moe_intermediate_size": 512,
        "num_attention_heads": 16,
    },
    "LLaDA2Config100B": LLADA2_HF
    | {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 9216,
        "moe_intermediate_size": 1024,
        "num_attention_heads": 32,
    },
    "LLaDAMoEConfig7B_A1B": {
        "model_type": "llada",
        "architectures": ["LLaDAMoEModelLM"],
        "num_hidden_layers": 16,
        "hidden_size": 2048,
        "dense_intermediate_size": 8192,
        "expert_intermediate_size": 1024,
        "shared_expert_intermediate_size": None,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_layer_freq": [1] * 16,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000,
        "vocab_size": 157184,
    },
    "SDARMoEConfig30B_A3B": QWEN3_MOE_HF | {"model_type": "sdar_moe", "architectures": ["SDARMoeForCausalLM"]},
}
# Billions, all and those that a token uses, as the models' names and pages round them. LLaDA-MoE's page says 1.4
# active ones: it leaves the table of embeddings out, of which a token reads one row.
BILLIONS = {
    "LLaDA2Config16B": (16, 1.4),
    "LLaDA2Config100B": (100, 6.1),
    "LLaDAMoEConfig7B_A1B": (7, 1.4 + 0.32),
    "SDARMoEConfig30B_A3B": (30.5, 3.3),
}


def config_class(name):
    from nemo_dllm.collections.diffusion.models import llada2, llada_moe, sdar_moe

    return next(getattr(module, name) for module in (llada2, llada_moe, sdar_moe) if hasattr(module, name))


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_those_of_the_published_config(name):
    config, hf = config_class(name)(), PUBLISHED[name]
    assert family_of(config) is find_family(hf)
    assert family_of(config).config.differences(config, hf) == {}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_differing_size_is_found(name):
    config = config_class(name)(num_layers=PUBLISHED[name]["num_hidden_layers"], hidden_size=1024)
    assert "hidden_size" in family_of(config).config.differences(config, PUBLISHED[name])


def parameters_by_hand(hf):
    """(all, active): from the sizes in config.json."""
    hidden, heads, kv_heads = hf["hidden_size"], hf["num_attention_heads"], hf["num_key_value_heads"]
    head, layers, experts = hf.get("head_dim", hidden // heads), hf["num_hidden_layers"], hf["num_experts"]
    width = hf.get("moe_intermediate_size") or hf["expert_intermediate_size"]
    dense_layers = hf.get("first_k_dense_replace", 0)
    attention = hidden * head * (2 * heads + 2 * kv_heads) + 2 * head
    per_layer = attention + 2 * hidden
    expert = 3 * hidden * width
    router = experts * hidden
    shared = hf.get("num_shared_experts", 0) * expert
    dense = 3 * hidden * hf.get("intermediate_size", 0)
    table = hf["vocab_size"] * hidden

    def total(used):
        sparse = (layers - dense_layers) * (router + shared + used * expert)
        return layers * per_layer + dense_layers * dense + sparse + hidden + 2 * table

    return total(experts), total(hf["num_experts_per_tok"])


def count_on_meta(config, layers):
    """Parameters of a model with the first ``layers`` layers, and of its routed experts."""
    from nemo_dllm.collections.diffusion.models.mdlm import MDLMModel
    from nemo_dllm.collections.diffusion.objectives import MaskedDiffusion

    config.num_layers, config.init_model_with_meta_device, config.perform_initialization = layers, True, False
    if isinstance(config.moe_layer_freq, list):
        config.moe_layer_freq = config.moe_layer_freq[:layers]
    config.vocab_size = config.vocab_size or 157184
    model = MDLMModel(config, MaskedDiffusion(mask_token_id=1))
    model.configure_model()
    sizes = {name: p.numel() for name, p in model.module.named_parameters()}
    assert all(p.is_meta for p in model.module.parameters())
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    return torch.tensor([sum(sizes.values()), experts])


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters(single_process, name):
    config = config_class(name)()
    layers, share = config.num_layers, config.moe_router_topk / config.num_moe_experts
    # All layers from the second on are alike.
    two, three = (count_on_meta(config_class(name)(), n) for n in (2, 3))
    total, experts = (two + (layers - 2) * (three - two)).tolist()
    active = total - round(experts * (1 - share))
    assert (total, active) == parameters_by_hand(PUBLISHED[name])
    published_total, published_active = BILLIONS[name]
    assert total / 1e9 == pytest.approx(published_total, rel=0.06)
    assert active / 1e9 == pytest.approx(published_active, rel=0.06)
