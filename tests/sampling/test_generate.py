import numpy
import pytest
import torch

from nemo_dllm.collections.diffusion.sampling import (
    SamplerConfig,
    generate,
    generate_stream,
    generation_result,
    infill,
)

M = 9
PROMPTS = [[3, 1, 4], [2, 7, 1, 8, 2, 8, 1, 8, 2], [], [5]]


def lists(rows):
    return [row.tolist() for row in rows]


def test_prompt_is_kept_and_completion_follows(table_model):
    model = table_model({i: {i % 8: 0.9} for i in range(8)})
    result = generate(model, [[6, M], torch.tensor([1, 1, 1])], SamplerConfig(3), mask_token_id=M, pad_token_id=0)
    assert lists(result.sequences) == [[6, M, 2, 3, 4], [1, 1, 1, 3, 4, 5]]
    assert lists(result.completions) == [[2, 3, 4], [3, 4, 5]]
    assert result.steps == 3 == len(model.seen)
    assert model.seen[0].tolist() == [[6, M, M, M, M, 0], [1, 1, 1, M, M, M]]


@pytest.mark.parametrize(
    "prompt",
    [(6, 5), range(6, 4, -1), numpy.array([6, 5]), numpy.array([6, 5], dtype=numpy.uint8)]
    + [torch.tensor([6, 5], dtype=torch.int32), [6, numpy.int32(5)], [6, torch.tensor(5)], [6, torch.tensor([5])]],
    ids=repr,
)
def test_prompts_of_any_kind(table_model, prompt):
    result = generate(table_model({2: {7: 0.9}}), [prompt, [1]], SamplerConfig(1), mask_token_id=M)
    assert result.sequences[0].tolist() == [6, 5, 7]


def test_key_mask_only_where_rows_are_padded():
    seen = []

    def model(tokens_BT, *, key_mask_BT):
        seen.append(key_mask_BT)
        return torch.zeros(*tokens_BT.shape, 10)

    config = SamplerConfig(2, steps=1)
    generate(model, [[1], [2]], config, mask_token_id=M)
    generate(model, [[1], [2, 2]], config, mask_token_id=M)
    assert seen[0] is None
    assert seen[1].tolist() == [[True, True, True, False], [True] * 4]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"steps": 5},
        {"block_size": 4, "steps": 6},
        {"threshold": 0.4},
        {"right_shift": True, "bos_token_id": 6},
        {"eos_token_id": 11},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "block_size": 3},
        {"remasking": "random", "temperature": 1.0, "steps": 4},
        {"remasking": "margin", "threshold": 0.2, "temperature": 1.5, "eos_token_id": 3},
    ],
)
def test_batch_equals_one_by_one_and_order_is_irrelevant(context_model, fields):
    config = SamplerConfig(10, seed=4, **fields)
    model = context_model()

    def sample(rows):
        prompts = [PROMPTS[row] for row in rows]
        result = generate(model, prompts, config, mask_token_id=22, row_ids=rows)
        return dict(zip(rows, lists(result.sequences), strict=True)), result.steps

    together, passes = sample([0, 1, 2, 3])
    alone = [sample([row]) for row in range(4)]
    assert together == {row: single[0][row] for row, single in enumerate(alone)}
    assert passes == max(single[1] for single in alone)
    assert sample([2, 3, 1, 0])[0] == together


def test_batching_relies_on_the_key_mask(context_model):
    model = context_model(ignore_key_mask=True)
    together = generate(model, PROMPTS, SamplerConfig(10), mask_token_id=22)
    alone = [generate(model, [prompt], SamplerConfig(10), mask_token_id=22).sequences[0] for prompt in PROMPTS]
    assert lists(together.sequences) != lists(alone)


def test_several_samples_of_one_prompt(table_model):
    def sample(**fields):
        return lists(generate(table_model({}), [[1, 2]] * 4, SamplerConfig(6, **fields), mask_token_id=M).completions)

    first = sample(temperature=1.0, seed=7)
    assert len({tuple(row) for row in first}) == 4
    assert sample(temperature=1.0, seed=7) == first
    assert sample(temperature=1.0, seed=8) != first
    assert len({tuple(row) for row in sample()}) == 1


def test_a_flat_model_is_sampled_uniformly(table_model):
    config = SamplerConfig(100_000, steps=1, temperature=1.0, seed=0)
    tokens = generate(table_model({}, vocab=6, mask_id=5), [[]], config, mask_token_id=5).completions[0]
    counts = torch.bincount(tokens, minlength=6)
    assert counts[5] == 0
    assert ((counts[:5] - 20_000) ** 2 / 20_000).sum() < 23.5  # 4 degrees of freedom, 1 in 10,000


def eos_rig(table_model):
    # End token 0 at positions 4 and 6; confidence falls from left to right.
    return table_model({i: {0 if i in (4, 6) else 5: 0.95 - 0.05 * i} for i in range(12)})


def test_end_token_finishes_the_row_and_cuts_the_completion(table_model):
    model = eos_rig(table_model)
    result = generate(model, [[0, 7]], SamplerConfig(10, eos_token_id=0), mask_token_id=M)
    assert lists(result.completions) == [[5, 5, 0]]
    assert lists(result.sequences) == [[0, 7, 5, 5, 0]]
    assert result.steps == 3 == len(model.seen)


def test_the_end_token_waits_for_the_holes_before_it(table_model):
    # Confidence rises from left to right: the end tokens come long before the text.
    model = table_model({i: {0 if i in (4, 6) else 5: 0.4 + 0.04 * i} for i in range(12)})
    result = generate(model, [[7, 7]], SamplerConfig(10, eos_token_id=0), mask_token_id=M)
    assert lists(result.completions) == [[5, 5, 0]]
    assert result.steps == 10
    blocks = generate(model, [[7, 7]], SamplerConfig(10, eos_token_id=0, block_size=4), mask_token_id=M)
    assert lists(blocks.completions) == [[5, 5, 0]]
    assert blocks.steps == 4


def test_stopping_changes_no_token_of_the_text(context_model):
    fields = {"max_new_tokens": 12, "eos_token_id": 8, "temperature": 20.0, "block_size": 4, "seed": 2}
    prompts = [[1, 2]] * 40
    stopped = generate(context_model(), prompts, SamplerConfig(**fields), mask_token_id=22)
    full = generate(context_model(), prompts, SamplerConfig(stop_at_eos=False, **fields), mask_token_id=22)
    assert all(len(row) == 12 for row in full.completions)
    assert any(len(row) < 12 for row in stopped.completions)
    for short, long in zip(lists(stopped.completions), lists(full.completions), strict=True):
        assert short == long[: len(short)]
        assert 8 not in short[:-1]
        assert short[-1] == 8 or len(short) == 12


def test_rest_of_a_finished_row_is_filled_with_the_end_token(table_model):
    *_, last = generate_stream(eos_rig(table_model), [[7, 7]], SamplerConfig(10, eos_token_id=0), mask_token_id=M)
    assert last.tokens_BT.tolist() == [[7, 7, 5, 5] + [0] * 8]
    assert not last.holes_BT.any()
    assert last.committed_BT.sum() == 8


def test_without_stopping_the_end_token_is_a_token(table_model):
    config = SamplerConfig(10, eos_token_id=0, stop_at_eos=False)
    result = generate(eos_rig(table_model), [[7, 7]], config, mask_token_id=M)
    assert lists(result.completions) == [[5, 5, 0, 5, 0, 5, 5, 5, 5, 5]]


def test_stream_and_result_agree(context_model):
    config = SamplerConfig(8, steps=4)
    steps = list(generate_stream(context_model(), PROMPTS, config, mask_token_id=22))
    streamed = generation_result(steps[-1], PROMPTS, config)
    direct = generate(context_model(), PROMPTS, config, mask_token_id=22)
    assert lists(streamed.sequences) == lists(direct.sequences)
    assert [step.step for step in steps] == [1, 2, 3, 4] and direct.steps == 4


def test_no_prompts():
    with pytest.raises(ValueError, match="prompts is empty; give at least one prompt"):
        generate(lambda tokens_BT, *, key_mask_BT: None, [], SamplerConfig(), mask_token_id=M)


def test_infill_keeps_the_given_tokens(table_model):
    model = table_model({i: {i: 0.9} for i in range(6)})
    tokens = [[7, M, M, 8, M], [M, 7]]
    holes = [[False, True, True, False, True], [False, False]]
    result = infill(model, tokens, holes, SamplerConfig(), mask_token_id=M, pad_token_id=6)
    assert lists(result.sequences) == [[7, 1, 2, 8, 4], [M, 7]]
    assert lists(result.completions) == [[1, 2, 4], []]
    assert result.steps == 3
    assert model.seen[0][1].tolist() == [M, 7, 6, 6, 6]


def test_infill_without_holes(table_model):
    model = table_model({})
    result = infill(model, [[1, M, 2]], torch.zeros(1, 3, dtype=torch.bool), SamplerConfig(), mask_token_id=M)
    assert lists(result.sequences) == [[1, M, 2]] and lists(result.completions) == [[]]
    assert result.steps == 0 and model.seen == []


def test_infill_does_not_stop_at_an_end_token(table_model):
    model = table_model({i: {0: 0.9} for i in range(4)})
    result = infill(model, [[M, 7, M]], [[True, False, True]], SamplerConfig(eos_token_id=0), mask_token_id=M)
    assert lists(result.sequences) == [[0, 7, 0]] and result.steps == 2


def test_infill_batch_equals_one_by_one(context_model):
    rows = [[1, 2, 3, 4, 5, 6], [7, 8, 9], [4, 4, 4, 4]]
    holes = [[i % 2 == 1 for i in range(6)], [True] * 3, [False, False, True, True]]
    config = SamplerConfig(6, steps=2, temperature=1.0, seed=1)
    together = infill(context_model(), rows, holes, config, mask_token_id=22)
    alone = [
        infill(context_model(), [rows[i]], [holes[i]], config, mask_token_id=22, row_ids=[i]).sequences[0]
        for i in range(3)
    ]
    assert lists(together.sequences) == lists(alone)


def test_infill_errors(table_model):
    with pytest.raises(ValueError, match=r"holes has rows of lengths \[2\] for tokens of lengths \[3\]"):
        infill(table_model({}), [[1, 2, 3]], [[True, False]], SamplerConfig(), mask_token_id=M)
