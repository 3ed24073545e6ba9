"""What users get wrong: settings of other types, prompts that are none, models that answer something else."""

import math
import warnings

import numpy
import pytest
import torch

from nemo_dllm.collections.diffusion.sampling import SamplerConfig, denoise, generate, infill, span_between

M = 9


def run(model, prompts=((1, 2),), **fields):
    return generate(model, prompts, SamplerConfig(**{"max_new_tokens": 4, **fields}), mask_token_id=M)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"max_new_tokens": 2.5}, "max_new_tokens=2.5 must be a whole number$"),
        ({"max_new_tokens": "5"}, "max_new_tokens='5' must be a whole number$"),
        ({"max_new_tokens": None}, "max_new_tokens=None must be a whole number$"),
        ({"max_new_tokens": True}, "max_new_tokens=True must be a whole number$"),
        ({"steps": 2.5}, "steps=2.5 must be a whole number or None$"),
        ({"top_k": 1.5}, "top_k=1.5 must be a whole number or None$"),
        ({"temperature": "hot"}, "temperature='hot' must be a number$"),
        ({"temperature": None}, "temperature=None must be a number$"),
        ({"temperature": math.nan}, "temperature=nan must be a finite number of at least 0"),
        ({"threshold": "0.9"}, "threshold='0.9' must be a number or None$"),
        ({"threshold": math.nan}, "threshold=nan must be at least 0"),
        ({"top_p": math.nan}, "top_p=nan must be above 0"),
        ({"right_shift": "yes"}, "right_shift='yes' must be True or False$"),
        ({"eos_token_id": [1, 2]}, r"eos_token_id=\[1, 2\] must be a whole number or None$"),
        ({"seed": 1.5}, "seed=1.5 must be a whole number or None$"),
        ({"suppress_token_ids": 5}, "suppress_token_ids=5 must be a tuple of whole numbers$"),
        ({"suppress_token_ids": (1, "a")}, r"suppress_token_ids=\(1, 'a'\) must be a tuple of whole numbers$"),
        ({"suppress_token_ids": "12"}, "suppress_token_ids='12' is a single text; give a tuple of whole numbers$"),
        ({"stop_strings": (1,), "eos_token_id": 0}, r"stop_strings=\(1,\) must be a tuple of texts$"),
    ],
)
def test_settings_of_another_type(fields, message):
    with pytest.raises(ValueError, match=message):
        SamplerConfig(**fields)


def test_sequences_become_tuples_and_whole_numbers_are_numbers():
    config = SamplerConfig(suppress_token_ids=[1, 2], stop_token_ids=range(3, 5), temperature=1, threshold=0)
    assert (config.suppress_token_ids, config.stop_token_ids) == ((1, 2), (3, 4))
    assert hash(config) == hash(
        SamplerConfig(suppress_token_ids=(1, 2), stop_token_ids=(3, 4), temperature=1, threshold=0)
    )


@pytest.mark.parametrize(
    "prompts, message",
    [
        ([], "prompts is empty"),
        ([1, 2], r"prompts\[0\]=1 is no sequence of token ids; give one per row, as \[\[1, 2, 3\]\]"),
        (["ab"], r"prompts\[0\]='ab' is no sequence of token ids"),
        ([[1], None], r"prompts\[1\]=None is no sequence of token ids"),
        ([[1.5]], r"prompts\[0\] is torch.float32 of shape \[1\].*whole numbers"),
        ([[True, False]], r"prompts\[0\] is torch.bool of shape \[2\]"),
        ([torch.tensor([[1, 2]])], r"prompts\[0\] is torch.int64 of shape \[1, 2\]"),
        ([[1, 2.5]], r"prompts\[0\] is torch.float32 of shape \[2\].*whole numbers"),
        ([[1, [2]]], r"prompts\[0\]=\[1, \[2\]\] is no sequence of token ids"),
        ([[1, 2**63]], r"prompts\[0\]=\[1, 9223372036854775808\] is no sequence of token ids"),
        ([[2**63]], r"prompts\[0\]=\[9223372036854775808\] is no sequence of token ids"),
        ([[2**70]], r"prompts\[0\]=\[.*\] is no sequence of token ids"),
        ([torch.tensor(5)], r"prompts\[0\]=tensor\(5\) is no sequence of token ids"),
        ([[-1, 2]], "-1 among the given tokens is outside the model's vocabulary"),
    ],
)
def test_prompts_that_are_none(table_model, prompts, message):
    with pytest.raises(ValueError, match=message):
        run(table_model({}), prompts)


def test_ids_beyond_the_vocabulary(table_model):
    """After a pass at the latest; before it where the model says how many tokens it has."""
    model = table_model({})
    with pytest.raises(ValueError, match="10 among the given tokens is outside the model's vocabulary of 10"):
        run(model, [[10]])
    assert len(model.seen) == 1
    model.vocabulary_size = 10
    for prompts, keywords in (([[10]], {}), ([[1], [1, 2]], {"pad_token_id": 12})):
        with pytest.raises(ValueError, match="outside the model's vocabulary of 10"):
            generate(model, prompts, SamplerConfig(4), mask_token_id=M, **keywords)
    with pytest.raises(ValueError, match="bos_token_id: 17 is outside the model's vocabulary of 10"):
        run(model, [[]], bos_token_id=17)
    with pytest.raises(ValueError, match="mask_token_id: 10 is outside the model's vocabulary of 10"):
        generate(model, [[1]], SamplerConfig(4), mask_token_id=10)
    assert len(model.seen) == 1


@pytest.mark.parametrize("fields", [{"eos_token_id": M}, {"stop_token_ids": (2, M)}])
def test_the_mask_is_no_end_token(table_model, fields):
    with pytest.raises(ValueError, match="mask_token_id=9 is in eos_token_id or stop_token_ids as well"):
        run(table_model({}), **fields)


def test_suppression_that_leaves_no_token(table_model):
    fields = {"suppress_token_ids": tuple(range(8)), "eos_token_id": 8}
    assert run(table_model({}), **fields).completions[0].tolist() == [8]
    for stops in (True, False):
        with pytest.raises(ValueError, match="min_new_tokens=2 and the mask token are the whole vocabulary of 10"):
            run(table_model({}), **fields, stop_at_eos=stops, min_new_tokens=2)


@pytest.mark.parametrize("given", [None, "9", 1.5, 9.0, True, -1, 2**63 - 1, 2**70, [9], torch.tensor([1, 2])])
def test_masks_and_pads_that_are_no_tokens(table_model, given):
    message = "_token_id=.* must be a token id, a whole number of at least 0"
    model, tokens_BT = table_model({}), torch.tensor([[1, 0]])
    with pytest.raises(ValueError, match=f"^mask{message}"):
        generate(model, [[1]], SamplerConfig(4), mask_token_id=given)
    with pytest.raises(ValueError, match=f"^mask{message}"):
        infill(model, [[1, 2]], [[False, True]], SamplerConfig(4), mask_token_id=given)
    with pytest.raises(ValueError, match=f"^mask{message}"):
        denoise(model, tokens_BT, tokens_BT == 0, given, SamplerConfig(4))
    if given is not None:
        with pytest.raises(ValueError, match=f"^pad{message}"):
            generate(model, [[1]], SamplerConfig(4), mask_token_id=M, pad_token_id=given)
    assert not model.seen


def test_numbers_of_other_libraries(context_model):
    """What a field, a seed or an id may be given as makes no difference."""
    config, model = SamplerConfig(6, temperature=1.0, seed=2**62 + 3, suppress_token_ids=(1, 2)), context_model()

    def sample(config=config, mask=M, **keywords):
        result = generate(model, [[3], [4, 5]], config, mask_token_id=mask, **keywords)
        return [row.tolist() for row in result.sequences]

    numbers = {"seed": numpy.int64(2**62 + 3), "suppress_token_ids": numpy.array([1, 2])}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sample(SamplerConfig(numpy.int32(6), temperature=1.0, **numbers)) == sample()
    assert sample(mask=numpy.int64(M), pad_token_id=torch.tensor(0)) == sample()
    for name, values in (("seeds", [-7, 2**62]), ("row_ids", [5, -1])):
        for given in (numpy.array(values), torch.tensor(values), list(numpy.array(values)), tuple(values)):
            assert sample(**{name: given}) == sample(**{name: values})


@pytest.mark.parametrize(
    "per_row",
    [{"seeds": [None]}, {"seeds": [1.5]}, {"row_ids": ["a"]}, {"seeds": 3}, {"row_ids": 0}, {"seeds": torch.tensor(3)}],
)
def test_seeds_and_row_ids_are_whole_numbers(table_model, per_row):
    (name,) = per_row
    with pytest.raises(ValueError, match=f"{name}=.* must be whole numbers, one per row"):
        generate(table_model({}), [[1]], SamplerConfig(4), mask_token_id=M, **per_row)


class Answering:
    """A model whose logits go through a function first."""

    def __init__(self, change):
        self.change = change

    def __call__(self, tokens_BT, *, key_mask_BT):
        return self.change(torch.arange(10.0).expand(*tokens_BT.shape, 10))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda x: (x,), r"the model returned tuple for tokens of shape \[1, 6\]"),
        (lambda x: x[0], r"the model returned \[6, 10\] for tokens of shape \[1, 6\]"),
        (lambda x: x[:, 1:], r"the model returned \[1, 5, 10\] for tokens of shape \[1, 6\]"),
        (lambda x: x * math.nan, "logits are NaN"),
        (lambda x: torch.where(x == M, x, -math.inf), "or -inf for every token that may be chosen"),
        (lambda x: x[..., :5], "mask_token_id: 9 is outside the model's vocabulary of 5"),
    ],
)
def test_models_that_answer_something_else(change, message):
    with pytest.raises(ValueError, match=message):
        run(Answering(change))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64])
def test_logits_of_any_dtype(dtype):
    assert run(Answering(lambda x: x.to(dtype))).completions[0].tolist() == [8] * 4


def test_logits_that_have_overflowed():
    """The first infinity wins; with guidance, where both halves have them, nothing turns into NaN."""
    overflowed = Answering(lambda x: (1e4 * x).half())
    assert run(overflowed).completions[0].tolist() == [7] * 4
    unlikely = Answering(lambda x: torch.where(x < 5, -math.inf, x))
    assert run(unlikely, cfg_scale=2.0).completions[0].tolist() == [8] * 4
    drawn = run(unlikely, cfg_scale=2.0, temperature=1.0, seed=0, max_new_tokens=50).completions[0]
    assert set(drawn.tolist()) <= {5, 6, 7, 8}


@pytest.mark.parametrize("temperature", [1e-300, 1e-30])
def test_a_temperature_next_to_0_takes_the_best(temperature):
    result = run(Answering(lambda x: x), temperature=temperature, seed=3)
    assert result.completions[0].tolist() == [8] * 4


def test_infilling(table_model):
    def fill(tokens, holes, **fields):
        return infill(table_model({}), tokens, holes, SamplerConfig(**fields), mask_token_id=M).sequences

    assert [row.tolist() for row in fill([[], [1, 2]], [[], [False, False]])] == [[], [1, 2]]
    assert [row.tolist() for row in fill([[], []], [[], []], block_size=2)] == [[], []]
    with pytest.raises(ValueError, match=r"tokens\[0\] is torch.float32"):
        fill([[1.0]], [[True]])
    with pytest.raises(ValueError, match="one boolean per token"):
        fill([[1, 2]], [[True]])
    for rows in ([[True], [False]], [[True, False]] * 2):
        with pytest.raises(ValueError, match=rf"holes\[1\] is of shape \[2, {len(rows[0])}\]; give one boolean"):
            fill([[1], [1, 2]], [[True], rows])
    with pytest.raises(ValueError, match=r"holes\[0\] is of shape \[1, 1\]; give one boolean per token"):
        fill([[1]], [[[True]]])
    for row in ([0, 2], [0.0, 0.5], "ab", None):
        with pytest.raises(ValueError, match=r"holes\[0\]=.* are no booleans.*give one boolean per token"):
            fill([[1, 2]], [row])
    assert [row.tolist() for row in fill([[1, 2]], [[0, 0]])] == [[1, 2]]
    assert span_between([1], [2], 0) == ([1, 2], [False, False])
    with pytest.raises(ValueError, match="length=-3 must be at least 0"):
        span_between([1], [2], -3)
