"""Where texts end."""

import pytest

from nemo_dllm.collections.diffusion.sampling import SamplerConfig, generate
from nemo_dllm.collections.diffusion.sampling.stopping import text_end

M = 9
LETTERS = "abcdefgh."


def decode(ids):
    return "".join(LETTERS[i] for i in ids)


def left_to_right(table_model, ids):
    """A model that writes these tokens from position 1 on, surest at the left."""
    return table_model({i + 1: {token: 0.95 - 0.01 * i} for i, token in enumerate(ids)})


def run(model, length=10, **fields):
    config = SamplerConfig(length, **fields)
    return generate(model, [[0]], config, mask_token_id=M, decode=decode)


@pytest.mark.parametrize(
    "tokens, fields, end",
    [
        ([1, 2, 3], {"eos_token_id": 2}, 2),
        ([1, 2, 3], {"eos_token_id": 2, "stop_at_eos": False}, None),
        ([1, 2, 3], {"stop_token_ids": (3, 1)}, 1),
        ([1, 2, 3, 4], {"eos_token_id": 0, "stop_strings": ("cd",)}, 3),
        ([1, 2, 3, 4], {"eos_token_id": 4, "stop_strings": ("de", "xx")}, 4),
        ([1, 2, 3, 4], {"eos_token_id": 0, "stop_strings": ("cdf",)}, None),
        ([1, 2, 3, 4], {"eos_token_id": 2, "stop_strings": ("d",)}, 2),
        ([], {"eos_token_id": 0, "stop_strings": ("b",)}, None),
    ],
)
def test_ends_by_hand(tokens, fields, end):
    assert text_end(tokens, SamplerConfig(**fields), decode) == end


def test_stop_tokens_end_a_row_like_the_end_token(table_model):
    model = left_to_right(table_model, [1, 2, 3, 4, 5, 6, 7, 1, 2, 3])
    result = run(model, stop_token_ids=(4, 7))
    assert result.completions[0].tolist() == [1, 2, 3, 4] and result.finish_reasons == ["stop"]
    assert result.steps == 4


def test_a_stop_string_over_several_tokens_ends_a_row(table_model):
    model = left_to_right(table_model, [1, 2, 3, 4, 5, 6, 7, 1, 2, 3])
    result = run(model, stop_strings=("def",), eos_token_id=0)
    assert result.completions[0].tolist() == [1, 2, 3, 4, 5] and result.finish_reasons == ["stop"]
    assert result.steps == 5
    assert run(model, stop_strings=("dfe",), eos_token_id=0).finish_reasons == ["length"]


def test_a_stop_string_waits_for_the_holes_before_it(table_model):
    model = table_model({i + 1: {i: 0.5 + 0.04 * i} for i in range(8)})
    result = run(model, 8, stop_strings=("cd",), eos_token_id=8)
    assert result.completions[0].tolist() == [0, 1, 2, 3] and result.steps == 8


def test_stop_strings_need_a_decoder(table_model):
    config = SamplerConfig(4, stop_strings=("x",), eos_token_id=0)
    with pytest.raises(ValueError, match=r"stop_strings=\('x',\) are looked for in text; give decode"):
        generate(table_model({}), [[1]], config, mask_token_id=M)


def test_decoding_happens_when_a_row_has_grown(table_model):
    model = table_model({i + 1: {i: 0.5 + 0.04 * i} for i in range(8)})
    decoded = []

    def counting(ids):
        decoded.append(len(ids))
        return decode(ids)

    config = SamplerConfig(8, stop_strings=("zz",), eos_token_id=8)
    generate(model, [[0]], config, mask_token_id=M, decode=counting)
    assert decoded == [8, 8]  # filled from right to left: once in the run, once for the result


@pytest.mark.parametrize("fields", [{"min_new_tokens": 3}, {"eos_penalty": 2.0}])
def test_end_tokens_can_be_kept_from_taking_over(table_model, fields):
    """The end token is the surest everywhere: 0.5 against 0.45 for a word."""
    rig = {i: {0: 0.5, 5: 0.45} for i in range(1, 9)}
    assert run(table_model(rig), 8, eos_token_id=0).completions[0].tolist() == [0]
    kept = run(table_model(rig), 8, eos_token_id=0, **fields).completions[0].tolist()
    assert kept[:3] == [5, 5, 5] and len(kept) == (4 if "min_new_tokens" in fields else 8)


def test_min_new_tokens_forbids_every_end_token(table_model):
    rig = {i: {0: 0.5, 3: 0.3, 5: 0.15} for i in range(1, 5)}
    kept = run(table_model(rig), 4, eos_token_id=0, stop_token_ids=(3,), min_new_tokens=2)
    assert kept.completions[0].tolist() == [5, 5, 0]


def test_begin_suppressed_tokens_are_not_the_first(table_model):
    rig = {i: {5: 0.6, 4: 0.3} for i in range(1, 5)}
    assert run(table_model(rig), 4, begin_suppress_token_ids=(5,)).completions[0].tolist() == [4, 5, 5, 5]


def test_rows_have_room_up_to_max_length(table_model):
    model = table_model({i: {i % 8: 0.9} for i in range(9)})
    config = SamplerConfig(6, max_length=7)
    result = generate(model, [[1] * 5, [2] * 2, [3]], config, mask_token_id=M)
    assert [len(row) for row in result.sequences] == [7, 7, 7]
    assert [len(row) for row in result.completions] == [2, 5, 6]
    with pytest.raises(ValueError, match=r"prompts\[1\] has 7 tokens.*max_length=7; shorten the prompt or raise"):
        generate(model, [[1], [1] * 7], config, mask_token_id=M)


def test_an_empty_prompt_starts_with_the_start_token(table_model):
    model = table_model({i: {i: 0.9} for i in range(4)})
    result = generate(model, [[], [7]], SamplerConfig(3, bos_token_id=6, right_shift=True), mask_token_id=M)
    assert [row.tolist() for row in result.sequences] == [[6, 0, 1, 2], [7, 0, 1, 2]]
    assert generate(model, [[]], SamplerConfig(2), mask_token_id=M).sequences[0].tolist() == [0, 1]
    with pytest.raises(ValueError, match=r"prompts\[0\] is empty, and right_shift.*set bos_token_id"):
        generate(model, [[]], SamplerConfig(2, right_shift=True), mask_token_id=M)


def test_requests_with_seeds_of_their_own_repeat_what_they_gave_alone(context_model):
    prompts, fields = [[1, 2], [3, 4, 5], [6]], {"temperature": 1.5, "remasking": "random"}
    together = generate(
        context_model(), prompts, SamplerConfig(8, **fields), mask_token_id=22, seeds=[11, 12, 11], row_ids=None
    )
    for prompt, seed, row in zip(prompts, [11, 12, 11], together.sequences, strict=True):
        alone = generate(context_model(), [prompt], SamplerConfig(8, seed=seed, **fields), mask_token_id=22)
        assert alone.sequences[0].tolist() == row.tolist()
    with pytest.raises(ValueError, match="seeds has 2 entries for 3 rows; give one per row"):
        generate(context_model(), prompts, SamplerConfig(8, **fields), mask_token_id=22, seeds=[1, 2])
