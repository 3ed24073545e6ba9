"""Values of config.json that are none: named with what they must be, before anything is built of them."""

import json

import pytest

from nemo_dllm.connectors import config_values
from nemo_dllm.connectors.config_values import Kind
from nemo_dllm.connectors.facts import read_facts
from nemo_dllm.connectors.families.registry import FAMILIES, find_family

KINDS = {name: kind for name, kind in vars(config_values).items() if isinstance(kind, Kind)}
JSON = (
    "x",
    "2",
    2,
    0,
    1,
    -1,
    2.0,
    0.5,
    -0.5,
    1.5,
    True,
    False,
    [],
    [1],
    ["x"],
    [2.0],
    {},
    {"a": 1},
    float("nan"),
    1e400,
)
FITTING = {
    "COUNT": [2, 1],
    "COUNT_OR_ZERO": [2, 0, 1],
    "POSITIVE": [2, 1, 2.0, 0.5, 1.5],
    "NOT_NEGATIVE": [2, 0, 1, 2.0, 0.5, 1.5],
    "SHARE": [0, 1, 0.5],
    "FLAG": [True, False],
    "NAME": ["x", "2"],
    "NAMES": [[], ["x"]],
    "NUMBERS": [[], [1]],
    "FIELDS": [{}, {"a": 1}],
    "TOKENS": [2, 0, 1, -1, [], [1]],
    "ANYTHING": list(JSON),
}
GOLDEN = ("qwen3", "qwen2", "llama3_rope", "sdar", "dream", "llada", "qwen3_moe", "sdar_moe", "llada_moe", "llada2_moe")


@pytest.mark.parametrize("name", KINDS)
def test_what_fits_a_kind(name):
    # By their text: True equals 1, and NaN nothing.
    assert [repr(value) for value in JSON if KINDS[name].fits(value)] == [repr(value) for value in FITTING[name]]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_field_of_a_table_has_a_kind(family):
    assert [field.hf for field in family.config.fields if field.kind is config_values.ANYTHING] == []


@pytest.mark.parametrize("name", GOLDEN)
def test_every_wrong_value_is_named(models, name):
    hf = json.loads((models / name / "config.json").read_text())
    table = find_family(hf).config
    kinds = {**config_values.OF_ALL_FAMILIES, **table.kinds, **{field.hf: field.kind for field in table.fields}}
    for field, kind in kinds.items():
        for value in JSON:
            if not kind.fits(value):
                with pytest.raises(ValueError) as error:
                    table.to_nemo(hf | {field: value})
                assert f"{field}={value!r} (must be {kind.text})" in str(error.value)


def test_all_wrong_values_are_named_beside_what_is_not_supported(models):
    hf = json.loads((models / "qwen3" / "config.json").read_text())
    wrong = {"hidden_size": "64", "tie_word_embeddings": "false", "rms_norm_eps": "1e-6", "hidden_act": "gelu"}
    with pytest.raises(ValueError) as error:
        find_family(hf).config.check(hf | wrong)
    assert all(f"{field}={value!r}" in str(error.value) for field, value in wrong.items())


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("qwen3", {"num_key_value_heads": 3}, "num_attention_heads=4, which is no multiple of num_key_value_heads=3"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts=8, which is less than num_experts_per_tok=9"),
        (
            "llada2_moe",
            {"n_group": 3, "topk_group": 2},
            "num_experts=16, which is no multiple of n_group=3",
        ),
        (
            "qwen3_moe",
            {"num_experts": None, "num_local_experts": 8, "num_experts_per_tok": 9},
            "num_local_experts=8, which is less than num_experts_per_tok=9",
        ),
        ("llada", {"n_kv_heads": 3}, "n_heads=4, which is no multiple of n_kv_heads=3"),
    ],
)
def test_values_that_contradict_each_other(models, name, fields, message):
    hf = json.loads((models / name / "config.json").read_text())
    with pytest.raises(ValueError, match=f"config.json has {message}; correct"):
        find_family(hf).config.to_nemo(hf | fields)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"factor": 2.0}, r"the rotary scaling \{'factor': 2.0\} names no rope_type"),
        ({"rope_type": None, "factor": 2.0}, "names no rope_type"),
        ({"full_attention": {"rope_type": "default"}}, "names no rope_type"),
        ({"type": "linear", "factor": "2"}, r"has factor='2' \(must be a number above 0\)"),
        ({"type": "linear", "factor": 0}, r"has factor=0 \(must be a number above 0\)"),
        (
            {"type": "llama3", "factor": 8.0},
            "lacks low_freq_factor, high_freq_factor, original_max_position_embeddings",
        ),
    ],
)
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_scalings_that_are_none(models, spelling, scaling, message):
    hf = json.loads((models / "llama" / "config.json").read_text())
    with pytest.raises(ValueError, match=message):
        find_family(hf).config.to_nemo(hf | {spelling: scaling})


def test_the_folder_is_named_and_null_says_nothing(make_twin):
    with pytest.raises(
        ValueError, match=r"twin: config.json of model_type='sdar' has block_size='4' \(must be a whole"
    ):
        read_facts(make_twin("sdar", block_size="4"))
    silent = dict.fromkeys(("block_size", "right_shift_logits", "ar_loss_weight", "block_start"))
    facts = read_facts(make_twin("sdar", folder="silent", **silent))
    assert facts.right_shift is False
    assert facts.block_fields == {"block_size": 4, "ar_loss_weight": 0.0, "block_start": "clean_prefix"}


@pytest.mark.parametrize("named", ["Qwen3ForCausalLM", 3])
def test_architectures_that_are_no_list(make_twin, named):
    with pytest.raises(ValueError, match=f"architectures={named!r} in config.json is no list; write \\['{named}'\\]"):
        read_facts(make_twin("qwen3", architectures=named))
