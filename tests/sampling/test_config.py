"""Settings of a sampler: their ranges, presets, and what programs get of them."""

import json
import math
from dataclasses import asdict
from dataclasses import fields as dataclass_fields

import numpy
import pytest

from nemo_dllm.collections.diffusion.sampling import (
    PRESETS,
    REFERENCE_PRESETS,
    ReferenceQuirks,
    SamplerConfig,
    preset,
    sampler_fields,
    settings_of_gaps,
)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
        ({"steps": 0}, "steps=0 must be from 1 to max_new_tokens=128.*leave it None"),
        ({"steps": 9, "max_new_tokens": 8}, "steps=9 must be from 1 to max_new_tokens=8"),
        ({"block_size": 0}, "block_size=0 must be at least 1; leave it None"),
        ({"temperature": -0.1}, "temperature=-0.1 must be a finite number of at least 0"),
        ({"temperature": math.inf}, "temperature=inf must be a finite"),
        ({"temperature": math.nan}, "temperature=nan must be a finite"),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0 and at most 1"),
        ({"top_p": 1.1}, "top_p=1.1 must be above 0 and at most 1"),
        ({"top_k": 0}, "top_k=0 must be at least 1"),
        ({"remasking": "low"}, "remasking='low' is unknown; known: confidence, entropy, margin, random"),
        ({"threshold": -0.5}, "threshold=-0.5 must be at least 0"),
        ({"threshold": math.nan}, "threshold=nan must be at least 0"),
        ({"max_length": 0}, "max_length=0 must be at least 1; leave it None"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens=9 must be from 0 to max_new_tokens=8"),
        ({"steps_per_block": 0, "block_size": 4}, "steps_per_block=0 must be from 1 to .*block_size=4"),
        ({"steps_per_block": 5, "block_size": 4}, "steps_per_block=5 must be from 1 to .*every step commits a token"),
        ({"steps_per_block": 2, "block_size": 4, "steps": 8}, "steps_per_block=2 stands in place of steps=8"),
        ({"schedule": "log"}, "schedule='log' is unknown; known: cosine, even, even_block, linear"),
        ({"block_origin": "end"}, "block_origin='end' is unknown; known: prompt, sequence"),
        (
            {"cache": "dual"},
            "cache='dual' is unknown; known: approximate_delayed, approximate_dual, approximate_prefix, exact; leave",
        ),
        ({"cache": "exact"}, "cache='exact' works block by block; set block_size"),
        ({"refresh_interval": 0}, "refresh_interval=0 must be at least 1"),
        ({"remasking_temperature": -1}, "remasking_temperature=-1 must be a finite number of at least 0"),
        ({"factor": 0.0}, "factor=0.0 must be a finite number above 0"),
        ({"factor": 1.0, "threshold": 0.9}, "factor=1.0 and threshold=0.9 both set how many"),
        ({"editing_threshold": 1.1}, "editing_threshold=1.1 must be from 0 to 1"),
        ({"max_post_steps": -1}, "max_post_steps=-1 must be at least 0"),
        ({"cfg_scale": -1.0}, "cfg_scale=-1.0 must be a finite number of at least 0"),
        ({"cfg_scale": 1e30}, r"cfg_scale=1e\+30 must be .* at least 0, which is no guidance, and at most 1000000"),
        ({"cfg_scale": math.nan}, "cfg_scale=nan must be a finite number of at least 0"),
        ({"eos_penalty": math.inf}, "eos_penalty=inf must be a finite"),
        ({"stop_strings": ("x",)}, r"stop_strings=\('x',\) need a token to fill an ended row with; set eos_token_id"),
        ({"stop_strings": "stop", "eos_token_id": 0}, "stop_strings='stop' is a single text; give a tuple of texts"),
        ({"quirks": ReferenceQuirks(stop_after_block=True)}, "quirks=.*stop_after_block need.*set eos_token_id"),
        ({"stop_strings": ("x", ""), "eos_token_id": 0}, "stop_strings=.* hold an empty text"),
        ({"quirks": ReferenceQuirks(mask_token_allowed=True)}, "quirks=.*leave holes for ever.*set steps"),
        (
            {"quirks": ReferenceQuirks(stray_masks_compete=True), "steps": 4, "cache": "exact", "block_size": 4},
            "stray_masks_compete need the whole canvas in every pass; leave cache None",
        ),
    ],
)
def test_bad_fields_are_named_with_value_and_fix(fields, message):
    with pytest.raises(ValueError, match=message):
        SamplerConfig(**fields)


def test_limits_are_inside():
    SamplerConfig(max_new_tokens=1, steps=1, block_size=1, temperature=0, top_p=1.0, top_k=1)
    SamplerConfig(threshold=0.0)
    SamplerConfig(threshold=1.01, block_size=1000)
    SamplerConfig(threshold=0.9, steps=8)
    SamplerConfig(steps_per_block=4, block_size=4, min_new_tokens=128, editing_threshold=1.0, max_post_steps=0)


def test_end_tokens():
    assert SamplerConfig().end_token_ids == ()
    assert SamplerConfig(eos_token_id=3, stop_token_ids=(5, 7)).end_token_ids == (3, 5, 7)
    assert SamplerConfig(eos_token_id=3, stop_token_ids=(5,), stop_at_eos=False).end_token_ids == (5,)


def test_blocks_of_a_block_causal_model_are_counted_from_the_start():
    assert SamplerConfig(block_size=4).counts_blocks_from == "prompt"
    assert SamplerConfig(block_size=4, cache="approximate_dual").counts_blocks_from == "prompt"
    assert SamplerConfig(block_size=4, cache="exact").counts_blocks_from == "sequence"
    assert SamplerConfig(block_size=4, cache="exact", block_origin="prompt").counts_blocks_from == "prompt"


def test_every_field_but_quirks_has_a_help_text():
    described = sampler_fields()
    assert set(described) == {field.name for field in dataclass_fields(SamplerConfig)} - {"quirks"}
    assert all(len(field.help) > 15 and "`" not in field.help for field in described.values())
    steps = described["steps"]
    assert (steps.name, steps.type, steps.default) == ("steps", int | None, None)
    assert steps.help == (
        "denoising steps per row, 1 to max_new_tokens, split evenly over the row's blocks and rounded up. None commits "
        "one token per step."
    )


@pytest.mark.parametrize("name", [*PRESETS, "dllm_bd3lm", "dllm_mdlm", "dllm_llada2", "dllm_dream"])
def test_presets_are_settings_that_fit_together(name):
    of_references = {"block_size": 4, "steps_per_block": 4, "eos_token_id": 0} if name.startswith("dllm") else {}
    config = preset(name, seed=3, **of_references)
    assert config.seed == 3
    for field, value in (PRESETS | REFERENCE_PRESETS)[name].items():
        assert getattr(config, field) == value


def test_presets_of_ours_have_no_quirks_and_blocks_shorter_than_the_answer():
    for name in PRESETS:
        config = preset(name)
        assert config.quirks == ReferenceQuirks()
        assert config.block_size < config.max_new_tokens
    assert [name for name in PRESETS if "approximate" in str(preset(name).cache)] == ["fast_dllm"]


def test_fields_win_over_the_preset():
    assert preset("sdar", threshold=0.5).threshold == 0.5
    with pytest.raises(ValueError, match="preset='lada' is unknown; known: .*llada, llada2, llada2_1, sdar"):
        preset("lada")


@pytest.mark.parametrize(
    "settings, length",
    [
        ({}, 12),
        ({"steps": 9, "max_new_tokens": 3}, 12),
        ({"steps": 300}, 300),
        ({"steps_per_block": 40, "min_new_tokens": 50}, 50),
        ({"steps": None}, 12),
    ],
)
def test_the_length_of_gaps_is_that_of_their_tokens(settings, length):
    found = settings_of_gaps(settings, tokens=12)
    assert found == settings | {"max_new_tokens": length}
    SamplerConfig(**found)


def test_numbers_of_numpy_become_pythons():
    given = {"seed": numpy.uint64(7), "threshold": numpy.float32(0.5), "suppress_token_ids": numpy.array([1, 2])}
    plain = SamplerConfig(6, seed=7, threshold=0.5, suppress_token_ids=(1, 2))
    assert json.dumps(asdict(SamplerConfig(numpy.int32(6), **given))) == json.dumps(asdict(plain))
