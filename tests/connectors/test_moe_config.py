"""Configurations of families with experts, in both directions."""

import json

import pytest

from nemo_dllm.connectors.families.llada2 import LLADA2
from nemo_dllm.connectors.families.llada_moe import LLADA_MOE
from nemo_dllm.connectors.families.qwen3_moe import QWEN3_MOE
from nemo_dllm.connectors.families.registry import FAMILIES, find_family
from nemo_dllm.connectors.families.sdar_moe import SDAR_MOE

GOLDEN = {
    "qwen3_moe": QWEN3_MOE,
    "sdar_moe": SDAR_MOE,
    "llada_moe": LLADA_MOE,
    "llada_moe_dense_shared": LLADA_MOE,
    "llada2_moe": LLADA2,
}


def hf_config(models, name, **changes):
    config = json.loads((models / name / "config.json").read_text()) | changes
    return {key: value for key, value in config.items() if value is not ...}


@pytest.mark.parametrize("name", GOLDEN)
def test_finds_the_family(models, name):
    assert find_family(hf_config(models, name)) is GOLDEN[name]


def test_llada_is_sparse_or_dense_by_its_architecture(models):
    assert find_family(hf_config(models, "llada_moe")).name == "llada_moe"
    assert find_family(hf_config(models, "llada")).name == "llada"
    with pytest.raises(ValueError, match=r"model_type='llada' with architectures=\[\] belongs to no known family"):
        find_family({"model_type": "llada"})


@pytest.mark.parametrize("model_type", ["llada2_moe", "llada21_moe", "llada2_moe_veomni"])
def test_llada2_has_several_model_types(models, model_type):
    hf = hf_config(models, "llada2_moe", model_type=model_type)
    assert find_family(hf) is LLADA2
    assert LLADA2.hf_class(hf).attention == "block_causal"


def test_sdar_is_exported_as_published(models):
    assert SDAR_MOE.diffusion_class.architecture == "SDARMoeForCausalLM"
    assert (SDAR_MOE.block_size, LLADA2.block_size, LLADA_MOE.block_size) == (4, 32, None)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "qwen3_moe",
            {
                "num_moe_experts": 8,
                "moe_router_topk": 3,
                "moe_ffn_hidden_size": 32,
                "ffn_hidden_size": 112,
                "moe_layer_freq": 1,
                "moe_router_pre_softmax": False,
            },
        ),
        (
            "llada_moe_dense_shared",
            {
                "num_moe_experts": 6,
                "moe_router_topk": 2,
                "moe_ffn_hidden_size": 32,
                "ffn_hidden_size": 128,
                "moe_shared_expert_intermediate_size": 48,
                "moe_layer_freq": [0, 1, 1],
                "softmax_expert_bias": False,
                "kv_channels": 16,
                "num_query_groups": 2,
            },
        ),
        (
            "llada2_moe",
            {
                "num_moe_experts": 16,
                "moe_router_topk": 4,
                "moe_ffn_hidden_size": 32,
                "ffn_hidden_size": 112,
                "moe_shared_expert_intermediate_size": 32,
                "moe_layer_freq": [0, 1, 1],
                "moe_router_num_groups": 4,
                "moe_router_group_topk": 2,
                "moe_router_topk_scaling_factor": 2.5,
                "moe_router_enable_expert_bias": True,
                "rotary_percent": 0.5,
                "rotary_base": 600000,
            },
        ),
    ],
)
def test_translates_experts(models, name, expected):
    values = GOLDEN[name].config.to_nemo(hf_config(models, name))
    assert {field: values[field] for field in expected} == expected


@pytest.mark.parametrize(
    ("fields", "frequency"),
    [
        ({}, 1),
        ({"decoder_sparse_step": 2}, [0, 1]),
        ({"decoder_sparse_step": 2, "num_hidden_layers": 5}, [0, 1, 0, 1, 0]),
        ({"mlp_only_layers": [0], "num_hidden_layers": 3}, [0, 1, 1]),
        ({"mlp_only_layers": [1, 3], "decoder_sparse_step": 2, "num_hidden_layers": 6}, [0, 0, 0, 0, 0, 1]),
        ({"mlp_only_layers": ..., "decoder_sparse_step": ...}, 1),
    ],
)
def test_sparse_layers_of_qwen3(models, fields, frequency):
    assert QWEN3_MOE.config.to_nemo(hf_config(models, "qwen3_moe", **fields))["moe_layer_freq"] == frequency


@pytest.mark.parametrize(
    ("fields", "frequency", "shared"),
    [
        ({"first_k_dense_replace": 0}, 1, 32),
        ({"first_k_dense_replace": 2, "num_shared_experts": 2}, [0, 0, 1], 64),
        ({"num_shared_experts": 0}, [0, 1, 1], None),
        ({"num_shared_experts": ...}, [0, 1, 1], None),
    ],
)
def test_dense_layers_and_shared_experts_of_llada2(models, fields, frequency, shared):
    values = LLADA2.config.to_nemo(hf_config(models, "llada2_moe", **fields))
    assert (values["moe_layer_freq"], values["moe_shared_expert_intermediate_size"]) == (frequency, shared)


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_llada2_may_choose_all_groups(models, groups):
    values = LLADA2.config.to_nemo(hf_config(models, "llada2_moe", n_group=groups, topk_group=groups))
    assert values["moe_router_num_groups"] == values["moe_router_group_topk"] == groups


def test_reads_the_number_of_experts_as_transformers_5_calls_it(models):
    hf = hf_config(models, "qwen3_moe", num_experts=..., num_local_experts=8)
    assert QWEN3_MOE.config.to_nemo(hf) == QWEN3_MOE.config.to_nemo(hf_config(models, "qwen3_moe"))


def test_silent_fields_have_the_defaults_of_the_published_classes(models):
    silent = {"norm_topk_prob": ..., "head_dim": ...}
    values = QWEN3_MOE.config.to_nemo(hf_config(models, "qwen3_moe", **silent))
    assert (values["moe_router_pre_softmax"], values["kv_channels"]) == (True, 128)
    silent = dict.fromkeys(("n_group", "topk_group", "routed_scaling_factor", "partial_rotary_factor", "head_dim"), ...)
    values = LLADA2.config.to_nemo(hf_config(models, "llada2_moe", num_experts_per_tok=8, **silent))
    assert (values["moe_router_num_groups"], values["moe_router_group_topk"]) == (8, 4)
    assert (values["moe_router_topk_scaling_factor"], values["rotary_percent"], values["kv_channels"]) == (2.5, 0.5, 16)
    values = LLADA_MOE.config.to_nemo(hf_config(models, "llada_moe", num_key_value_heads=None))
    assert values["num_query_groups"] == 4


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("llada2_moe", {"topk_group": 1}, "topk_group=1 of n_group=4 with num_experts_per_tok=4 is not supp"),
        ("llada2_moe", {"use_qkv_bias": True}, r"use_qkv_bias=True \(supported: False\)"),
        ("llada2_moe", {"score_function": "softmax"}, r"score_function='softmax' \(supported: 'sigmoid'\)"),
        ("llada_moe", {"moe_layer_freq": [1]}, r"moe_layer_freq=\[1\] must have a number for each of num_hidden_la"),
        ("llada_moe", {"qk_layernorm": False}, r"qk_layernorm=False \(supported: True\)"),
        ("llada_moe", {"clip_qkv": 8.0}, r"clip_qkv=8.0 \(supported: None\)"),
        ("qwen3_moe", {"num_experts": ...}, "config.json lacks num_experts$"),
    ],
)
def test_refuses_what_the_model_cannot_be(models, name, fields, message):
    with pytest.raises(ValueError, match=message):
        GOLDEN[name].config.to_nemo(hf_config(models, name, **fields))


@pytest.mark.nemo
class TestWithNeMo:
    """Against NeMo's configuration classes."""

    def nemo_config(self, models, name, **fields):
        hf = hf_config(models, name, **fields)
        return hf, GOLDEN[name].build_nemo_config(hf)

    @pytest.mark.parametrize("name", GOLDEN)
    def test_config_json_comes_back(self, models, name):
        hf, config = self.nemo_config(models, name)
        table = GOLDEN[name].config
        assert table.differences(config, hf) == {}
        assert table.update(hf, config) == hf
        assert table.to_nemo(table.to_hf(config)) == table.to_nemo(hf)

    @pytest.mark.parametrize(
        ("name", "fields"),
        [
            ("qwen3_moe", {"mlp_only_layers": [0], "norm_topk_prob": False}),
            ("llada2_moe", {"num_shared_experts": 3, "first_k_dense_replace": 2}),
            ("llada2_moe", {"num_shared_experts": None, "first_k_dense_replace": 0}),
            ("llada_moe", {"moe_layer_freq": [1, 0], "moe_router_enable_expert_bias": True}),
        ],
    )
    def test_other_values_come_back_too(self, models, name, fields):
        hf, config = self.nemo_config(models, name, **fields)
        written = GOLDEN[name].config.to_hf(config)
        assert {field: written[field] for field in fields} == fields

    def test_what_config_json_cannot_say(self, models):
        _, config = self.nemo_config(models, "llada2_moe")
        config.moe_layer_freq = [1, 0, 1]
        with pytest.raises(ValueError, match=r"moe_layer_freq=\[1, 0, 1\] has a dense layer behind a sparse one"):
            LLADA2.config.to_hf(config)
        config.moe_layer_freq, config.moe_shared_expert_intermediate_size = [0, 1, 1], 33
        with pytest.raises(ValueError, match="moe_shared_expert_intermediate_size=33 is no multiple of moe_ffn_hidden"):
            LLADA2.config.to_hf(config)

    @pytest.mark.parametrize("name", GOLDEN)
    def test_imported_models_do_not_balance_their_experts(self, models, name):
        _, config = self.nemo_config(models, name)
        assert config.moe_aux_loss_coeff == 0
        assert config.moe_router_bias_update_rate == 0 or not config.moe_router_enable_expert_bias
        assert config.moe_router_dtype == "fp32"

    def test_every_class_belongs_to_one_family(self):
        classes = [family.nemo_config() for family in FAMILIES]
        assert len(set(classes)) == len(classes)
