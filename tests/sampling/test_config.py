import math

import pytest

from nemo_dllm.collections.diffusion.sampling import SamplerConfig


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
        ({"threshold": 0.9, "steps": 8}, "threshold=0.9 sets how many tokens.*steps=8 would have no effect"),
    ],
)
def test_bad_fields_are_named_with_value_and_fix(fields, message):
    with pytest.raises(ValueError, match=message):
        SamplerConfig(**fields)


def test_limits_are_inside():
    SamplerConfig(max_new_tokens=1, steps=1, block_size=1, temperature=0, top_p=1.0, top_k=1)
    SamplerConfig(threshold=0.0)
    SamplerConfig(threshold=1.01, block_size=1000)
