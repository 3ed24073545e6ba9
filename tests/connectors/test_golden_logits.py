"""Logits of the public classes, under every attention and position that their golden files have."""

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.nemo

TOLERANCE = 2e-5
CAUSAL = ("qwen3", "qwen3_tied", "qwen3_sharded", "qwen3_bin", "qwen2", "llama", "llama3_rope")
DIFFUSION = ("a2d_qwen3", "a2d_qwen2", "a2d_llama", "sdar", "dream", "llada", "llada_gqa")
BLOCK_SIZE = 4


@pytest.mark.parametrize("attention_backend", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CAUSAL + DIFFUSION)
def test_logits(load, logit_errors, models, name, attention_backend):
    golden = load_file(models / name / "golden.safetensors")
    errors = logit_errors(load(models / name, attention_backend), golden)
    assert max(errors.values()) < TOLERANCE, errors
    cases = {"logits", "padded_logits", "block_logits"} | ({"pos_logits"} if "llada" not in name else set())
    if name in CAUSAL:
        cases |= {f"{case}_bidirectional" for case in cases - {"block_logits"}}
    if name.startswith("a2d_"):
        cases |= {"logits_causal"}
    assert errors.keys() == cases


@torch.no_grad()
@pytest.mark.parametrize("name", CAUSAL + DIFFUSION)
def test_hidden_states_of_every_layer(load, models, name):
    from nemo_dllm.collections.diffusion.attention.masks import Bidirectional, BlockCausal

    golden, core, states = load_file(models / name / "golden.safetensors"), load(models / name), []
    for layer in core.decoder.layers:
        layer.register_forward_pre_hook(lambda _, args, named: states.append(named["hidden_states"]), with_kwargs=True)
    core.decoder.final_layernorm.register_forward_pre_hook(lambda _, args: states.append(args[0]))
    core(golden["input_ids"], None, BlockCausal(1) if name in CAUSAL else Bidirectional())
    hidden_states = torch.stack(states).transpose(1, 2)
    assert hidden_states.shape == golden["hidden_states"].shape
    assert (hidden_states - golden["hidden_states"]).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", ["llama", "llada"])
def test_the_golden_masks_are_block_causal(models, name):
    from nemo_dllm.collections.diffusion.attention.masks import BlockCausal, dense_mask

    mask = load_file(models / name / "golden.safetensors")["block_attention_mask"]
    assert torch.equal(dense_mask(BlockCausal(BLOCK_SIZE), *mask.shape[-2:], torch.device("cpu")), mask)


def swap(*parts):
    """The tensors of two names in the second layer change places."""

    def change(tensors):
        first, second = (next(name for name in tensors if f".1.{part}.weight" in name) for part in parts)
        tensors[first], tensors[second] = tensors[second], tensors[first]

    return change


def rotate_heads(prefix="", heads=2):
    """Keys and values of the second layer belong to the next group of queries."""

    def change(tensors):
        for part in "kv":
            name = next(name for name in tensors if name.endswith(f".1.{prefix}{part}_proj.weight"))
            tensors[name] = tensors[name].roll(len(tensors[name]) // heads, 0)

    return change


def clear(part):
    """A bias of the second layer is lost."""

    def change(tensors):
        tensors[f"model.layers.1.self_attn.{part}_proj.bias"].zero_()

    return change


MLP = swap("mlp.gate_proj", "mlp.up_proj")
QUERY_KEY_NORM = swap("self_attn.q_norm", "self_attn.k_norm")
GROUPS = rotate_heads("self_attn.")
LAYER_NORMS = swap("input_layernorm", "post_attention_layernorm")
BIASES = {f"no bias of {part}": clear(part) for part in "qkv"}
SWAPS = {
    "qwen3": {"mlp": MLP, "norms": LAYER_NORMS, "query and key norm": QUERY_KEY_NORM, "groups": GROUPS},
    "sdar": {"mlp": MLP, "norms": LAYER_NORMS, "query and key norm": QUERY_KEY_NORM, "groups": GROUPS},
    "llama": {"mlp": MLP, "norms": LAYER_NORMS, "groups": GROUPS},
    "llama3_rope": {"mlp": MLP, "groups": GROUPS},
    "a2d_llama": {"mlp": MLP, "groups": GROUPS},
    "qwen2": {"mlp": MLP, "norms": LAYER_NORMS, "groups": GROUPS} | BIASES,
    "a2d_qwen2": {"mlp": MLP, "groups": GROUPS} | BIASES,
    "dream": {"mlp": MLP, "norms": LAYER_NORMS, "groups": GROUPS} | BIASES,
    "llada": {"mlp": swap("ff_proj", "up_proj"), "norms": swap("attn_norm", "ff_norm"), "heads": rotate_heads(heads=4)},
    "llada_gqa": {"mlp": swap("ff_proj", "up_proj"), "norms": swap("attn_norm", "ff_norm"), "groups": rotate_heads()},
}
CONFIGS = {
    "qwen3": {"rope_theta": 10000},
    "sdar": {"rope_theta": 10000},
    "llama": {"rope_theta": 10000.0},
    "llama3_rope": {"rope_scaling": None},
    "a2d_llama": {"rope_theta": ...},
    "qwen2": {"rope_theta": 10000},
    "a2d_qwen2": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "dream": {"rope_theta": 10000},
    "llada": {"rope_theta": 10000},
    "llada_gqa": {"rms_norm_eps": 1e-2},
}


def visible(errors):
    """How far the least affected case is off; one token alone says little, so all cases must show it."""
    return min(errors.values()) > 100 * TOLERANCE


@pytest.mark.parametrize(("name", "twin"), [(name, twin) for name, twins in SWAPS.items() for twin in twins])
def test_a_twin_with_other_weights_fails(load, logit_errors, models, make_twin, name, twin):
    folder = make_twin(name, SWAPS[name][twin])
    assert visible(logit_errors(load(folder), load_file(models / name / "golden.safetensors")))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_twin_with_another_configuration_fails(load, logit_errors, models, make_twin, name):
    folder = make_twin(name, **CONFIGS[name])
    assert visible(logit_errors(load(folder), load_file(models / name / "golden.safetensors")))


def test_a_bias_that_is_not_there_is_an_error(load, make_twin):
    folder = make_twin("dream", lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.bias"))
    with pytest.raises(ValueError, match=r"the checkpoint lacks \(1\): model.layers.1.self_attn.k_proj.bias"):
        load(folder)
