import json
from types import SimpleNamespace

import pytest

from nemo_dllm.connectors.config_table import ConfigTable, Field
from nemo_dllm.connectors.families.qwen3 import QWEN3
from nemo_dllm.connectors.families.registry import find_family
from nemo_dllm.connectors.rope import Rope


def hf_config(models, name="qwen3", **changes):
    config = json.loads((models / name / "config.json").read_text()) | changes
    return {key: value for key, value in config.items() if value is not ...}


def test_finds_families_by_model_type():
    assert find_family({"model_type": "qwen3"}) is QWEN3
    assert find_family({"model_type": "a2d-qwen3", "architectures": ["A2DQwen3LMHeadModel"]}) is QWEN3
    assert QWEN3.hf_class({"model_type": "a2d-qwen3"}).attention == "bidirectional"
    assert QWEN3.hf_class({"model_type": "qwen3"}).attention == "causal"
    assert QWEN3.diffusion_class.architecture == "A2DQwen3LMHeadModel"


@pytest.mark.parametrize("config", [{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, {}])
def test_an_unknown_family_lists_the_known_ones(config):
    with pytest.raises(ValueError, match=r"no known family; known: .*qwen3 \(Qwen3ForCausalLM\), a2d-qwen3"):
        find_family(config)


def test_translates_sizes(models):
    values = QWEN3.config.to_nemo(hf_config(models, initializer_range=0.03, attention_dropout=0.1))
    assert values == {
        "num_layers": 3,
        "hidden_size": 64,
        "ffn_hidden_size": 112,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 32,
        "vocab_size": 200,
        "layernorm_epsilon": 1e-6,
        "share_embeddings_and_output_weights": False,
        "max_position_embeddings": 512,
        "init_method_std": 0.03,
        "attention_dropout": 0.1,
        "rotary_base": 1000000,
        "seq_len_interpolation_factor": None,
    }


def test_silent_fields_have_the_defaults_of_the_published_class(models):
    values = QWEN3.config.to_nemo(hf_config(models, head_dim=..., tie_word_embeddings=...))
    assert (values["kv_channels"], values["share_embeddings_and_output_weights"]) == (128, False)


def test_names_all_absent_fields(models):
    with pytest.raises(ValueError, match=r"lacks num_hidden_layers, rms_norm_eps$"):
        QWEN3.config.to_nemo(hf_config(models, num_hidden_layers=..., rms_norm_eps=...))


def test_names_all_unsupported_values(models):
    config = hf_config(models, attention_bias=True, hidden_act="gelu", layer_types=["sliding_attention"])
    expected = r"hidden_act='gelu' \(supported: 'silu'\); attention_bias=True .*; layer_types with sliding_attention"
    with pytest.raises(ValueError, match=expected):
        QWEN3.config.to_nemo(config)
    with pytest.raises(ValueError, match="has quantization_config"):
        QWEN3.config.to_nemo(hf_config(models, quantization_config={"quant_method": "fp8"}))


@pytest.mark.parametrize(
    ("rope", "base", "factor"),
    [
        ({"rope_theta": 5e5}, 5e5, None),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "default"}}, 1e4, None),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0}}, 1e4, 4.0),
        ({"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5, None),
        ({"rope_theta": ..., "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}}, 1e6, 2.0),
    ],
)
def test_reads_both_spellings_of_rotary_embeddings(models, rope, base, factor):
    config = hf_config(models, **rope)
    values = QWEN3.config.to_nemo(config)
    assert (values["rotary_base"], values["seq_len_interpolation_factor"]) == (base, factor)
    both = config | Rope().to_hf(SimpleNamespace(**values))
    old, new = ({k: v for k, v in both.items() if k != name} for name in ("rope_parameters", "rope_scaling"))
    new.pop("rope_theta")
    assert QWEN3.config.to_nemo(old) == QWEN3.config.to_nemo(new) == values


def test_refuses_a_rotary_base_that_nobody_names(models):
    with pytest.raises(ValueError, match="neither rope_theta nor rope_parameters.rope_theta"):
        QWEN3.config.to_nemo(hf_config(models, rope_theta=...))


def test_refuses_rotary_scaling_that_it_does_not_know(models):
    with pytest.raises(ValueError, match="rope_type='yarn' is not supported; known: default, linear"):
        QWEN3.config.to_nemo(hf_config(models, rope_scaling={"rope_type": "yarn", "factor": 4.0}))


class Config:
    """A NeMo configuration of the table below."""

    def __init__(self, **fields):
        self.__dict__ |= {"size": 4, "std": 0.1, "vocab_size": 9, "rotary_base": 1e4} | fields
        self.seq_len_interpolation_factor = fields.get("seq_len_interpolation_factor")


TABLE = ConfigTable((Field("hf_size", "size"), Field("hf_std", "std", binding=False)), {"act": "silu"})
HF = {"hf_size": 4, "hf_std": 0.2, "rope_theta": 1e4, "other": [1]}


def test_both_directions_agree():
    config = Config(seq_len_interpolation_factor=2.0)
    assert TABLE.to_nemo(TABLE.to_hf(config)) == {
        "size": 4,
        "std": 0.1,
        "rotary_base": 1e4,
        "seq_len_interpolation_factor": 2.0,
    }


def test_differences_are_those_that_make_another_model():
    assert TABLE.differences(Config(), HF) == {}
    assert TABLE.differences(Config(size=5, rotary_base=1e6), HF) == {"size": (5, 4), "rotary_base": (1e6, 1e4)}


def test_update_changes_nothing_but_what_differs():
    assert TABLE.update(HF, Config()) == HF
    assert TABLE.update(HF, Config(size=5)) == HF | {"hf_size": 5}
    updated = TABLE.update(HF, Config(rotary_base=1e6))
    assert TABLE.to_nemo(updated)["rotary_base"] == 1e6
    assert updated["other"] == [1]


FAMILIES = (
    *("qwen3", "qwen2", "llama", "sdar", "dream", "llada", "llada_gqa"),
    *("qwen3_moe", "sdar_moe", "llada_moe", "llada2_moe"),
)


@pytest.mark.parametrize("name", FAMILIES)
def test_null_says_as_little_as_a_field_that_is_not_there(models, name):
    """As transformers saves fields without a value; what no default stands in for is named either way."""
    source = hf_config(models, name)
    family = find_family(source)
    for field in source.keys() - {"model_type", "architectures"}:
        assert outcome(family, source | {field: None}) == outcome(family, hf_config(models, name, **{field: ...})), (
            field
        )


def outcome(family, config):
    try:
        return family.config.to_nemo(config)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "sdar", "dream", "qwen3_moe", "llada2_moe"])
def test_without_a_number_of_keys_every_head_has_its_own(models, name):
    config = hf_config(models, name, num_key_value_heads=None)
    assert find_family(config).config.to_nemo(config)["num_query_groups"] == config["num_attention_heads"]


def test_the_rotary_fields_of_transformers_5(models):
    """Base and rotated part of a head in one dict."""
    rope = {"rope_type": "default", "rope_theta": 3e5, "partial_rotary_factor": 0.25}
    config = hf_config(models, "llada2_moe", rope_theta=..., partial_rotary_factor=..., rope_parameters=rope)
    values = find_family(config).config.to_nemo(config)
    assert (values["rotary_base"], values["rotary_percent"]) == (3e5, 0.25)
    config = hf_config(models, "llada", rope_theta=..., rope_parameters=rope)
    assert find_family(config).config.to_nemo(config)["rotary_base"] == 3e5
    with pytest.raises(ValueError, match="rope_type='yarn' is not supported"):
        find_family(config).config.to_nemo(config | {"rope_parameters": rope | {"rope_type": "yarn"}})
