"""Logits and routing of the public classes with experts, and twins that must fail."""

from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.nemo

TOLERANCE = 2e-5
BLOCK_SIZE = 4
PLAIN = {"logits", "padded_logits"}
CASES = {
    "qwen3_moe": {f"{case}{suffix}" for case in PLAIN | {"pos_logits"} for suffix in ("", "_bidirectional")}
    | {"block_logits"},
    "sdar_moe": PLAIN | {"block_logits"},
    "llada_moe": PLAIN,
    "llada_moe_dense_shared": PLAIN,
    "llada2_moe": PLAIN | {"block_logits"},
}


def golden_of(models, name):
    return load_file(models / name / "golden.safetensors")


def routers(core):
    return [layer.mlp.router for layer in core.decoder.layers if hasattr(layer.mlp, "router")]


@pytest.mark.parametrize("attention_backend", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CASES)
def test_logits(load, logit_errors, models, name, attention_backend):
    errors = logit_errors(load(models / name, attention_backend), golden_of(models, name))
    assert errors.keys() == CASES[name]
    assert max(errors.values()) < TOLERANCE, errors


@contextmanager
def watched_routers(core):
    """Router logits and weights [tokens, experts] of every sparse layer, tokens of a sample together."""
    logits, weights = [], []

    def watch(method, seen):
        def watched(*args):
            result = method(*args)
            output = result[0] if isinstance(result, tuple) else result
            seen.append(output)
            return result

        return watched

    for router in routers(core):
        router.gating, router.routing = watch(router.gating, logits), watch(router.routing, weights)
    yield logits, weights
    for router in routers(core):
        del router.gating, router.routing
    logits[:] = [layer_SBE.transpose(0, 1).flatten(0, 1) for layer_SBE in logits]
    samples = 2
    weights[:] = [w.unflatten(0, (-1, samples)).transpose(0, 1).flatten(0, 1) for w in weights]


@torch.no_grad()
def routing_of(core, golden):
    """Router logits and weights of all sparse layers in the native case, [layers, tokens, experts]."""
    from nemo_dllm.collections.diffusion.attention.masks import Bidirectional, BlockCausal

    with watched_routers(core) as (logits, weights):
        core(golden["input_ids"], None, BlockCausal(1) if "logits_bidirectional" in golden else Bidirectional())
    return torch.stack(logits), torch.stack(weights)


@pytest.mark.parametrize("name", CASES)
def test_router_logits(load, models, name):
    golden = golden_of(models, name)
    logits, weights = routing_of(load(models / name), golden)
    assert torch.allclose(logits, golden["router_logits"], rtol=0, atol=TOLERANCE)
    chosen = (weights > 0).sum(-1)
    assert (chosen == chosen[0, 0]).all()


def test_chosen_experts_and_their_weights(load, models):
    golden = golden_of(models, "llada2_moe")
    _, weights = routing_of(load(models / "llada2_moe"), golden)
    expected = torch.zeros_like(weights).scatter(-1, golden["topk_idx"], golden["topk_weight"])
    assert torch.equal(weights > 0, expected > 0)
    assert torch.allclose(weights, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "twin"), [("qwen3_moe", {"norm_topk_prob": False}), ("llada_moe", {}), ("qwen3_moe", {})]
)
def test_softmax_weights_by_hand(load, models, make_twin, name, twin):
    golden = golden_of(models, name)
    logits, weights = routing_of(load(make_twin(name, **twin)), golden)
    scores, chosen = logits.softmax(-1).topk(3, dim=-1)
    if name == "qwen3_moe" and not twin:
        scores = scores / scores.sum(-1, keepdim=True)
    assert torch.allclose(weights, torch.zeros_like(weights).scatter(-1, chosen, scores), rtol=0, atol=1e-6)


def in_second_layer(part):
    return f"model.layers.1.{part}.weight"


def swap(first, second):
    def change(tensors):
        one, other = in_second_layer(first), in_second_layer(second)
        tensors[one], tensors[other] = tensors[other], tensors[one]

    return change


def swap_in_all_experts(tensors):
    for name in [name for name in tensors if ".experts." in name and "gate_proj" in name]:
        other = name.replace("gate_proj", "up_proj")
        tensors[name], tensors[other] = tensors[other], tensors[name]


def roll_experts(tensors):
    """Every router row belongs to the next expert."""
    for name in [name for name in tensors if name.endswith("mlp.gate.weight")]:
        tensors[name] = tensors[name].roll(1, 0)


def interleave_groups(tensors):
    """As if the file went group by group, as Megatron does: two query heads, the key, the value."""
    name = in_second_layer("attention.query_key_value")
    query, key, value = tensors[name].split([4 * 32, 2 * 32, 2 * 32])
    parts = (query.reshape(2, 64, 64), key.reshape(2, 32, 64), value.reshape(2, 32, 64))
    tensors[name] = torch.cat(parts, dim=1).flatten(0, 1)


def clear_bias(tensors):
    for name in [name for name in tensors if name.endswith("expert_bias")]:
        tensors[name].zero_()


def roll_keys_and_values(tensors):
    for part in "kv":
        name = in_second_layer(f"self_attn.{part}_proj")
        tensors[name] = tensors[name].roll(len(tensors[name]) // 2, 0)


QUERY_KEY_NORM = swap("self_attn.q_norm", "self_attn.k_norm")
SHARED = "mlp.shared_experts.{}_proj"
TWINS = {
    "qwen3_moe": {"gate and up": swap_in_all_experts, "experts": roll_experts, "norms": QUERY_KEY_NORM},
    "sdar_moe": {"gate and up": swap_in_all_experts, "experts": roll_experts, "groups": roll_keys_and_values},
    "llada_moe": {"gate and up": swap_in_all_experts, "experts": roll_experts, "norms": QUERY_KEY_NORM},
    "llada_moe_dense_shared": {
        "gate and up": swap_in_all_experts,
        "shared": swap("shared_expert.gate_proj", "shared_expert.up_proj"),
        "groups": roll_keys_and_values,
    },
    "llada2_moe": {
        "gate and up": swap_in_all_experts,
        "experts": roll_experts,
        "shared": swap(SHARED.format("gate"), SHARED.format("up")),
        "interleaved": interleave_groups,
        "norms": swap("attention.query_layernorm", "attention.key_layernorm"),
        "no bias": clear_bias,
    },
}
CONFIGS = {
    "qwen3_moe": {"rope_theta": 10000.0, "norm_topk_prob": False, "num_experts_per_tok": 2},
    "sdar_moe": {"norm_topk_prob": False},
    "llada_moe": {"rope_theta": 10000, "rms_norm_eps": 1e-2, "partial_rotary_factor": 0.5},
    "llada2_moe": {
        "partial_rotary_factor": 1.0,
        "n_group": 2,
        "routed_scaling_factor": 1.0,
        "rope_theta": 10000,
    },
}


def visible(errors):
    """How far the least affected case is off."""
    return min(errors.values()) > 100 * TOLERANCE


@pytest.mark.parametrize(("name", "twin"), [(name, twin) for name, twins in TWINS.items() for twin in twins])
def test_a_twin_with_other_weights_fails(load, logit_errors, models, make_twin, name, twin):
    folder = make_twin(name, TWINS[name][twin])
    assert visible(logit_errors(load(folder), golden_of(models, name)))


@pytest.mark.parametrize(("name", "field"), [(name, field) for name, fields in CONFIGS.items() for field in fields])
def test_a_twin_with_another_configuration_fails(load, logit_errors, models, make_twin, name, field):
    folder = make_twin(name, **{field: CONFIGS[name][field]})
    assert visible(logit_errors(load(folder), golden_of(models, name)))


def test_a_bias_in_the_weights_fails(load, logit_errors, models):
    """It belongs to the choice alone."""
    core = load(models / "llada2_moe")
    for router in routers(core):

        def routing(logits, original=router.routing, bias=router.expert_bias):
            _, chosen = original(logits)
            scores = (logits.flatten(0, 1).sigmoid() + bias) * chosen
            return scores / scores.sum(-1, keepdim=True) * 2.5, chosen

        router.routing = routing
    assert visible(logit_errors(core, golden_of(models, "llada2_moe")))


@pytest.mark.parametrize("name", ["llada_moe", "llada_moe_dense_shared"])
def test_renormalised_weights_of_llada_moe_fail(load, logit_errors, models, name):
    core = load(models / name)
    core.config.moe_router_pre_softmax = False
    assert visible(logit_errors(core, golden_of(models, name)))


@pytest.mark.parametrize("ignored", [{"norm_topk_prob": True}, {"routed_scaling_factor": 2.5}])
def test_llada_moe_does_not_read_what_its_class_does_not(load, logit_errors, models, make_twin, ignored):
    errors = logit_errors(load(make_twin("llada_moe", **ignored)), golden_of(models, "llada_moe"))
    assert max(errors.values()) < TOLERANCE
