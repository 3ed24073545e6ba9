"""From clean tokens to target rows, by hand, and to the loss that the objective itself would form.

Shape letters: B samples, L positions, N targets, V vocabulary.
"""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("megatron.core")

from nemo_dllm.collections.diffusion.attention.masks import Bidirectional
from nemo_dllm.collections.diffusion.models.batch import corrupt_batch
from nemo_dllm.collections.diffusion.objectives import MaskedDiffusion

MASK = 199
TOKENS_BL = torch.tensor([[10, 11, 12, 13], [20, 21, 22, 23]])
LOSS_MASK_BL = torch.tensor([[True] * 4, [False, True, True, False]])
TIME_B = torch.tensor([0.5, 1.0])
UNIFORMS_BL = torch.tensor([[0.1, 0.9, 0.4, 0.6], [0.3, 0.3, 0.3, 0.3]])


def batch_of(**changes):
    batch = {"tokens": TOKENS_BL, "loss_mask": LOSS_MASK_BL, "sample_index": torch.tensor([0, 1])}
    return batch | changes


def objective_of(time=TIME_B, uniforms_BL=UNIFORMS_BL, **fields):
    """The real objective with given noise: row 0 masks positions 0 and 2, row 1 positions 1 and 2."""
    objective = MaskedDiffusion(mask_token_id=MASK, time_sampling="iid", **fields)
    objective.corrupt = partial(objective.corrupt, time=time, uniforms_BL=uniforms_BL)
    return objective


def test_targets_by_hand():
    batch = corrupt_batch(batch_of(), objective_of(), validation=False)
    assert batch.input_ids.tolist() == [[MASK, 11, MASK, 13], [20, MASK, MASK, 23]]
    # position * 2 + sample, for (sample, position) = (0, 0), (0, 2), (1, 1), (1, 2).
    assert batch.targets.row_N.tolist() == [0, 4, 3, 5]
    assert batch.targets.token_N.tolist() == [10, 12, 21, 22]
    assert batch.targets.loss_weight_N.tolist() == [2.0, 2.0, 1.0, 1.0]
    assert batch.nll_weight_N.tolist() == [2.0, 2.0, 1.0, 1.0]
    assert batch.time_bucket_N.tolist() == [4, 4, 9, 9]
    assert (batch.count, batch.counts_3.tolist()) == (6, [6, 6, 4])
    assert batch.pattern == Bidirectional()


def test_under_the_right_shift_a_targets_logit_stands_one_position_before_it():
    """Position 0 has no logit before it and is never masked, so nothing is scored from its own."""
    batch = corrupt_batch(batch_of(), objective_of(right_shift=True), validation=False)
    assert batch.input_ids.tolist() == [[10, 11, MASK, 13], [20, MASK, MASK, 23]]
    assert batch.targets.row_N.tolist() == [1 * 2 + 0, 0 * 2 + 1, 1 * 2 + 1]
    assert batch.targets.token_N.tolist() == [12, 21, 22]
    assert (batch.count, batch.counts_3.tolist()) == (5, [5, 5, 3])


@pytest.mark.parametrize(
    "norm, weights, count",
    # A row's weights divided by its maskable tokens, 4 and 2; the rows.
    [("token", [2, 2, 1, 1], 6), ("sequence", [0.5, 0.5, 0.5, 0.5], 2), ("batch", [2, 2, 1, 1], 2)],
)
def test_norms_differ_in_weights_and_count_but_not_in_the_likelihood_bound(norm, weights, count):
    batch = corrupt_batch(batch_of(), objective_of(loss_norm=norm), validation=False)
    assert batch.targets.loss_weight_N.tolist() == weights
    assert batch.count == count
    assert batch.nll_weight_N.tolist() == [2, 2, 1, 1]
    assert batch.counts_3[1] == 6


def test_uniform_weights_leave_the_likelihood_bound_alone():
    batch = corrupt_batch(batch_of(), objective_of(loss_weight="uniform"), validation=False)
    assert batch.targets.loss_weight_N.tolist() == [1, 1, 1, 1]
    assert batch.nll_weight_N.tolist() == [2, 2, 1, 1]


def test_a_clean_mask_token_is_no_target():
    """What is masked comes from the draw, not from the token id."""
    tokens_BL = TOKENS_BL.clone()
    tokens_BL[0, 1] = tokens_BL[1, 0] = MASK
    batch = corrupt_batch(batch_of(tokens=tokens_BL), objective_of(), validation=False)
    assert batch.targets.row_N.tolist() == [0, 4, 3, 5]
    assert MASK not in batch.targets.token_N.tolist()


def test_nothing_maskable():
    batch = corrupt_batch(batch_of(loss_mask=torch.zeros(2, 4, dtype=torch.bool)), objective_of(), validation=False)
    assert torch.equal(batch.input_ids, TOKENS_BL)
    assert batch.targets.row_N.shape == batch.targets.token_N.shape == batch.targets.loss_weight_N.shape == (0,)
    assert (batch.count, batch.counts_3.tolist()) == (0, [0, 0, 0])


@pytest.mark.parametrize(
    "time, bucket", [(1e-3, 0), (0.1, 0), (0.11, 1), (0.2, 1), (0.5, 4), (0.901, 9), (1.0, 9)], ids=str
)
def test_time_buckets_are_open_below_and_closed_above(time, bucket):
    objective = objective_of(time=torch.full((2,), time), uniforms_BL=torch.zeros(2, 4))
    assert set(corrupt_batch(batch_of(), objective, validation=False).time_bucket_N.tolist()) == {bucket}


def test_only_real_padding_makes_a_mask():
    padded = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 0]])
    for key_mask, expected in (
        (torch.ones(2, 4, dtype=torch.bool), None),
        (torch.ones(2, 4, dtype=torch.int64), None),
        (padded.bool(), padded.bool()),
        (padded, padded),
    ):
        actual = corrupt_batch(batch_of(key_mask=key_mask), objective_of(), validation=False).pattern.key_mask_BL
        assert actual is expected or torch.equal(actual, expected)


def test_training_and_validation_draw_from_different_streams():
    objective = MaskedDiffusion(mask_token_id=MASK, time_sampling="iid")
    batch = batch_of(tokens=torch.full((2, 64), 7), loss_mask=torch.ones(2, 64, dtype=torch.bool))
    drawn = {v: corrupt_batch(batch, objective, validation=v).input_ids for v in (True, False)}
    assert not torch.equal(drawn[True], drawn[False])
    assert torch.equal(drawn[True], corrupt_batch(batch, objective, validation=True).input_ids)


@pytest.mark.nemo
@pytest.mark.parametrize("shift", [False, True], ids=["no shift", "right shift"])
@pytest.mark.parametrize("norm", ["token", "sequence", "batch"])
@torch.no_grad()
def test_the_models_sum_and_count_are_the_objectives(build_model, norm, shift):
    """Through all logits and the objective's own reduction, and through the data step and the scoring head."""
    objective = MaskedDiffusion(mask_token_id=MASK, group_size=4, loss_norm=norm, right_shift=shift)
    model = build_model(objective=objective)
    generator = torch.Generator().manual_seed(3)
    batch = {
        "tokens": torch.randint(0, 190, (4, 12), generator=generator),
        "loss_mask": torch.arange(12) < torch.tensor([[12], [3], [7], [0]]),
        "key_mask": torch.arange(12) < torch.tensor([[12], [5], [9], [2]]),
        "sample_index": torch.arange(8, 12),
    }
    step = model.training_loss_reduction.forward(
        *[micro := corrupt_batch(batch, objective, validation=False), model.training_step(micro)]
    )

    noised = objective.corrupt(batch["tokens"], batch["loss_mask"], batch["sample_index"])
    logits_BLV = model(noised.tokens, attention_mask=batch["key_mask"])
    if shift:
        logits_BLV = logits_BLV.roll(1, dims=1)
    nll_BL = F.cross_entropy(logits_BLV.transpose(1, 2), batch["tokens"], reduction="none")
    expected = objective.reduce(nll_BL, noised)
    torch.testing.assert_close(step[0], expected.sum, rtol=1e-5, atol=1e-6)
    assert step[1] == expected.count
    assert noised.masked.sum() > 5

    if not shift:  # The mutated twin: the neighbour's logits.
        wrong = objective.reduce(nll_BL.roll(1, dims=1), noised)
        assert (wrong.sum - step[0]).abs() > 1e-2
