import weakref
from importlib import import_module

import pytest
import torch

from nemo_dllm.collections.diffusion.sampling import SamplerConfig, denoise
from nemo_dllm.collections.diffusion.sampling.device import works_apart
from nemo_dllm.collections.diffusion.sampling.remasking import REMASKING_POLICIES, confidence

M = 9


def run(model, tokens, holes, key_mask_BT=None, row_ids=None, **fields):
    """All steps of rows given as lists, where holes are lists of positions."""
    canvas_BT = torch.tensor(tokens)
    holes_BT = torch.zeros_like(canvas_BT, dtype=torch.bool)
    for row, positions in enumerate(holes):
        holes_BT[row, positions] = True
    config = SamplerConfig(**fields)
    return list(denoise(model, canvas_BT, holes_BT, M, config, key_mask_BT, row_ids))


def commits(steps, row=0):
    return [step.committed_BT[row].nonzero().flatten().tolist() for step in steps]


def test_unreachable_threshold_commits_one_per_pass(table_model):
    model = table_model({i: {i: 0.9} for i in range(8)})
    steps = run(model, [[0] * 8], [list(range(8))], threshold=1.01, max_new_tokens=8)
    assert commits(steps) == [[i] for i in range(8)]
    assert len(model.seen) == 8
    assert steps[-1].tokens_BT.tolist() == [list(range(8))] and not steps[-1].holes_BT.any()


@pytest.mark.parametrize("apart, passes", [(True, [2, 3, 4, 4]), (False, [1, 2, 3, 4])])
def test_on_a_gpu_the_next_pass_has_begun_when_a_step_is_handed_out(table_model, monkeypatch, apart, passes):
    module = import_module("nemo_dllm.collections.diffusion.sampling.denoise")
    monkeypatch.setattr(module, "works_apart", lambda device: apart)
    model, canvas_BT = table_model({i: {i: 0.9} for i in range(4)}), torch.zeros(1, 4, dtype=torch.int64)
    begun = [len(model.seen) for _ in denoise(model, canvas_BT, canvas_BT == 0, M, SamplerConfig(4))]
    assert begun == passes


def test_a_gpu_works_apart_and_a_cpu_does_not():
    assert [works_apart(torch.device(name)) for name in ("cuda", "cuda:1", "cpu")] == [True, True, False]


def test_whoever_may_give_up_is_asked_before_the_next_pass(table_model):
    model, canvas_BT = table_model({i: {i: 0.9} for i in range(4)}), torch.zeros(1, 4, dtype=torch.int64)
    seen = []
    steps = denoise(model, canvas_BT, canvas_BT == 0, M, SamplerConfig(4), abandoned=lambda: [len(seen) == 2])
    for step in steps:
        seen.append(step)
        assert len(model.seen) == len(seen)
    assert len(seen) == 2 and int(seen[-1].holes_BT.sum()) == 2


def test_later_steps_leave_earlier_ones_alone(table_model):
    model, canvas_BT = table_model({i: {i: 0.9} for i in range(6)}), torch.zeros(2, 6, dtype=torch.int64)
    holes_BT = canvas_BT == 0
    config, kept = SamplerConfig(6, eos_token_id=3, editing_threshold=0.0), []
    for step in denoise(model, canvas_BT, holes_BT, M, config):
        tensors = {name: value for name, value in vars(step).items() if isinstance(value, torch.Tensor)}
        kept.append((step, {name: value.clone() for name, value in tensors.items()}))
    assert len(kept) > 2 and all(
        torch.equal(getattr(step, name), value) for step, tensors in kept for name, value in tensors.items()
    )
    assert not canvas_BT.any() and holes_BT.all()


def test_threshold_zero_is_one_pass_per_block(table_model):
    model = table_model({})
    assert len(run(model, [[0] * 12], [list(range(12))], threshold=0.0, block_size=4)) == 3
    assert len(run(model, [[0] * 12], [list(range(12))], threshold=0.0)) == 1


def test_threshold_commits_what_is_above_and_no_filler(table_model):
    model = table_model({0: {1: 0.5}, 1: {2: 0.95}, 2: {3: 0.8}, 3: {4: 0.99}})
    assert commits(run(model, [[0] * 4], [[0, 1, 2, 3]], threshold=0.9)) == [[1, 3], [2], [0]]


def test_threshold_reads_probability_under_every_policy(table_model):
    model = table_model({0: {1: 0.5}, 1: {2: 0.95}, 2: {3: 0.8}, 3: {4: 0.99}})
    for remasking in ("margin", "entropy"):
        steps = run(model, [[0] * 4], [[0, 1, 2, 3]], threshold=0.9, remasking=remasking)
        assert commits(steps)[0] == [1, 3]


def test_finished_rows_stay_as_they_are(table_model):
    model = table_model({i: {i: 0.9} for i in range(6)})
    steps = run(model, [[7] * 6, [8] * 6, [5] * 6], [[0], list(range(6)), []], threshold=2.0)
    assert len(steps) == 6
    assert all(step.tokens_BT[0].tolist() == [0, 7, 7, 7, 7, 7] for step in steps)
    assert all(step.tokens_BT[2].tolist() == [5] * 6 for step in steps)
    assert commits(steps, 0) == [[0], [], [], [], [], []]


def test_later_block_waits_however_confident(table_model):
    model = table_model({i: {i % 8: 0.3 + 0.05 * i} for i in range(12)})
    steps = run(model, [[0] * 12], [list(range(12))], steps=12, max_new_tokens=12, block_size=4)
    assert commits(steps) == [[3], [2], [1], [0], [7], [6], [5], [4], [11], [10], [9], [8]]
    assert (steps[-1].tokens_BT != M).all()


def test_partial_last_block_and_blocks_counted_from_the_first_hole(table_model):
    model = table_model({i: {1: 0.3 + 0.05 * i} for i in range(9)})
    steps = run(model, [[5] * 9], [[2, 3, 4, 5, 6, 7, 8]], steps=3, max_new_tokens=7, block_size=3)
    assert commits(steps) == [[2, 3, 4], [5, 6, 7], [8]]


def test_rows_with_different_hole_counts_follow_their_own_schedule(table_model):
    model = table_model({i: {1: 0.9 - 0.05 * i} for i in range(10)})
    steps = run(model, [[5] * 10, [5] * 10], [list(range(10)), [0, 1, 2, 3, 4]], steps=4, max_new_tokens=10)
    assert [len(c) for c in commits(steps, 0)] == [2, 3, 2, 3]  # 10 / 4 and 5 / 2 are halves, rounded to even
    assert [len(c) for c in commits(steps, 1)] == [1, 1, 2, 1]


def test_no_hole_no_forward_pass(table_model):
    model = table_model({})
    assert run(model, [[1, M, 2]], [[]]) == []
    assert model.seen == []


def test_mask_token_in_the_given_text_is_no_hole(table_model):
    model = table_model({i: {i: 0.9} for i in range(5)})
    steps = run(model, [[M, 4, 0, M, 0]], [[2, 4]])
    assert steps[-1].tokens_BT.tolist() == [[M, 4, 2, M, 4]]
    assert model.seen[0].tolist() == [[M, 4, M, M, M]]


def test_mask_and_suppressed_tokens_are_never_chosen(table_model):
    table = {i: {M: 0.9, 3: 0.05, 4: 0.04} for i in range(4)}
    for temperature in (0.0, 2.0):
        model = table_model(table)
        steps = run(model, [[0] * 4], [[0, 1, 2, 3]], temperature=temperature, suppress_token_ids=(3,), seed=0)
        assert not {M, 3} & set(steps[-1].tokens_BT[0].tolist())
    greedy = run(table_model(table), [[0] * 4], [[0, 1, 2, 3]])
    assert greedy[-1].tokens_BT.tolist() == [[3] * 4]


def test_forbidding_the_mask_token_renormalises_confidence(table_model):
    # Without the mask token's 0.6 the first position is 0.3 / 0.4 = 0.75 sure, more than the second.
    model = table_model({0: {M: 0.6, 1: 0.3}, 1: {2: 0.7}})
    assert commits(run(model, [[0, 0]], [[0, 1]])) == [[0], [1]]


def test_right_shift_reads_the_left_neighbour(table_model):
    # An autoregressive stub: the logits at i put their mass on token i + 1.
    model = table_model({i: {i + 1: 0.9} for i in range(6)})
    shifted = run(model, [[0] * 6], [[0, 1, 2, 3, 4, 5]], right_shift=True)
    assert shifted[-1].tokens_BT.tolist() == [[1, 1, 2, 3, 4, 5]]
    plain = run(model, [[0] * 6], [[0, 1, 2, 3, 4, 5]])
    assert plain[-1].tokens_BT.tolist() == [[1, 2, 3, 4, 5, 6]]


def test_earlier_steps_are_left_alone(table_model):
    steps = run(table_model({i: {i: 0.9 - 0.1 * i} for i in range(3)}), [[5] * 3], [[0, 1, 2]])
    assert [step.tokens_BT.tolist() for step in steps] == [[[0, M, M]], [[0, 1, M]], [[0, 1, 2]]]
    assert [step.holes_BT.sum().item() for step in steps] == [2, 1, 0]
    assert [step.step for step in steps] == [1, 2, 3]


@pytest.mark.parametrize(
    "names", [{"canvas_BT"}, {"holes_BT"}, {"key_mask_BT"}, {"canvas_BT", "holes_BT", "key_mask_BT"}]
)
@pytest.mark.parametrize("fields", [{}, {"cache": "approximate_delayed"}, {"editing_threshold": 0.2, "block_size": 2}])
def test_where_positions_lie_in_memory_does_not_matter(tiny_attention, names, fields):
    canvas_BT = torch.arange(12).view(2, 6)
    key_mask_BT = torch.arange(6) < torch.tensor([[6], [5]])
    given = {"canvas_BT": canvas_BT, "holes_BT": key_mask_BT & (canvas_BT % 3 > 0), "key_mask_BT": key_mask_BT}
    apart = {name: x_BT.t().contiguous().t() if name in names else x_BT for name, x_BT in given.items()}
    config = SamplerConfig(**fields)
    one, other = (
        list(denoise(tiny_attention(13), mask_token_id=12, config=config, **inputs)) for inputs in (given, apart)
    )
    assert len(one) == len(other)
    for before, after in zip(one, other, strict=True):
        for name in ("tokens_BT", "holes_BT", "committed_BT", "settled_BT"):
            assert torch.equal(getattr(before, name), getattr(after, name))


def test_inputs_are_left_alone_and_no_graph_is_built():
    weight = torch.zeros(1, 3, 10, requires_grad=True)
    seen = []

    def model(tokens_BT, *, key_mask_BT):
        seen.append((torch.is_grad_enabled(), key_mask_BT))
        return weight * 2

    canvas_BT, holes_BT = torch.tensor([[1, 2, 3]]), torch.tensor([[False, True, True]])
    key_mask_BT = torch.ones_like(holes_BT)
    list(denoise(model, canvas_BT, holes_BT, M, SamplerConfig(steps=1), key_mask_BT))
    assert canvas_BT.tolist() == [[1, 2, 3]] and holes_BT.tolist() == [[False, True, True]]
    assert seen == [(False, key_mask_BT)]
    assert torch.is_grad_enabled()


def test_the_schedule_sets_the_pace(table_model):
    holes = [list(range(16))]
    linear = run(table_model({}), [[0] * 16], holes, steps=4)
    late = run(table_model({}), [[0] * 16], holes, steps=4, schedule="cosine")
    assert [len(c) for c in commits(linear)] == [4, 4, 4, 4]
    # Masked shares 1, 0.924, 0.707, 0.383, 0.
    assert [len(c) for c in commits(late)] == [1, 4, 5, 6]
    odd = [list(range(10))]
    assert [len(c) for c in commits(run(table_model({}), [[0] * 10], odd, steps=4, schedule="even"))] == [3, 3, 2, 2]


@pytest.mark.parametrize(
    "holes_BT, row_ids, message",
    [
        (torch.zeros(1, 3), None, r"holes_BT is torch.float32 \[1, 3\] .* holes_BT as bool"),
        (torch.zeros(1, 4, dtype=torch.bool), None, r"holes_BT is torch.bool \[1, 4\] for canvas_BT of shape \[1, 3\]"),
        (torch.zeros(1, 3, dtype=torch.bool), [0, 1], "row_ids has 2 entries for 1 rows; give one per row"),
    ],
)
def test_bad_arguments_raise_before_the_first_step(table_model, holes_BT, row_ids, message):
    with pytest.raises(ValueError, match=message):
        denoise(table_model({}), torch.zeros(1, 3, dtype=torch.int64), holes_BT, M, SamplerConfig(), row_ids=row_ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_a_canvas_of_no_token_ids_is_refused(table_model, dtype):
    canvas_BT = torch.tensor([[1, 2, 3]])
    with pytest.raises(ValueError, match=f"canvas_BT is {dtype}; give token ids"):
        denoise(table_model({}), canvas_BT.to(dtype), canvas_BT == 3, M, SamplerConfig())
    *_, last = denoise(table_model({2: {4: 0.9}}), canvas_BT.int(), canvas_BT == 3, M, SamplerConfig(), device="cpu")
    assert (last.tokens_BT.dtype, last.tokens_BT.tolist()) == (torch.int64, [[1, 2, 4]])


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
@pytest.mark.parametrize("shape", [(1, 3), (1, 2), (2, 3), (3,)])
def test_a_key_mask_of_another_type_or_shape_is_refused(table_model, dtype, shape):
    """``~`` of 0 and 1 are -1 and -2: a mask of them would hide nothing from the checks."""
    canvas_BT = torch.tensor([[1, 2, 3]])
    for key_mask_BT in (torch.ones(shape, dtype=dtype), torch.ones(shape, dtype=torch.bool)):
        if key_mask_BT.dtype != torch.bool or shape != (1, 3):
            with pytest.raises(ValueError, match=r"key_mask_BT is torch.* for canvas_BT of shape \[1, 3\]; give one"):
                denoise(table_model({}), canvas_BT, canvas_BT == 3, M, SamplerConfig(), key_mask_BT)


def test_holes_at_padding_are_refused(table_model):
    holes_BT = torch.tensor([[False, True, True]])
    key_mask_BT = torch.tensor([[True, True, False]])
    with pytest.raises(ValueError, match="holes_BT holds positions that key_mask_BT hides"):
        denoise(table_model({}), torch.zeros(1, 3, dtype=torch.int64), holes_BT, M, SamplerConfig(), key_mask_BT)


def test_a_step_is_handed_out_before_the_error_of_the_pass_after_it(table_model):
    class Failing(table_model):
        def __call__(self, tokens_BT, *, key_mask_BT):
            if len(self.seen) == 2:
                raise RuntimeError("the third pass")
            return super().__call__(tokens_BT, key_mask_BT=key_mask_BT)

    canvas_BT = torch.zeros(1, 4, dtype=torch.int64)
    steps = denoise(Failing({i: {i: 0.9} for i in range(4)}), canvas_BT, canvas_BT == 0, M, SamplerConfig(4))
    assert [next(steps).tokens_BT.tolist() for _ in range(2)] == [[[0, M, M, M]], [[0, 1, M, M]]]
    with pytest.raises(RuntimeError, match="the third pass"):
        next(steps)
    assert next(steps, None) is None


@pytest.mark.parametrize("abandoned", [None, lambda: [False]], ids=["ahead", "in turn"])
def test_what_a_pass_has_predicted_is_gone_before_the_next(table_model, monkeypatch, abandoned):
    """With numbers for the whole vocabulary it may be most of the memory that is left beside a model."""
    found, left = [], []

    class Noting(table_model):
        def __call__(self, tokens_BT, *, key_mask_BT):
            left.append([predictions for predictions in found if predictions() is not None])
            return super().__call__(tokens_BT, key_mask_BT=key_mask_BT)

    def noting(predictions):
        found.append(weakref.ref(predictions))
        return confidence(predictions)

    monkeypatch.setitem(REMASKING_POLICIES, "noting", noting)
    model, canvas_BT = Noting({i: {i: 0.9} for i in range(4)}), torch.zeros(1, 4, dtype=torch.int64)
    config = SamplerConfig(4, remasking="noting")
    steps = list(denoise(model, canvas_BT, canvas_BT == 0, M, config, abandoned=abandoned))
    assert len(steps) == len(found) == 4 and left == [[]] * 4
