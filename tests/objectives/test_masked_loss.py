import math

import pytest
import torch
from torch.nn.functional import cross_entropy, pad

from nemo_dllm.collections.diffusion.objectives import LossSum, PolynomialSchedule, get_schedule

SCHEDULES = ["linear", "cosine", "polynomial", "geometric"]


@pytest.mark.parametrize("norm", ["token", "sequence", "batch"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_uniform_logits_cost_ln_v(objective, text, schedule, norm):
    rows, length = 20_000, 16
    tokens_BL, mask_BL = text(rows, length)
    it = objective(schedule=schedule, loss_norm=norm, group_size=rows, time_epsilon=1e-4)
    corruption = it.corrupt(tokens_BL, mask_BL, torch.arange(rows))
    loss = it.reduce(torch.full((rows, length), math.log(50)), corruption).mean.item()
    expected = math.log(50) * (length if norm == "batch" else 1)
    assert loss == pytest.approx(expected, rel=0.01)
    # Dividing a weighted sum by the masked tokens weighs twice.
    assert loss * (corruption.count / corruption.masked.sum()).item() != pytest.approx(expected, rel=0.2)


def test_more_padding_changes_nothing_under_token_norm(objective, text):
    tokens_BL, mask_BL = text(64, 12)
    padded = pad(tokens_BL, (0, 12)), pad(mask_BL, (0, 12))
    it, index = objective(), torch.arange(64)
    nll_BL = torch.rand(64, 24)
    short = it.reduce(nll_BL[:, :12], it.corrupt(tokens_BL, mask_BL, index))
    long = it.reduce(nll_BL, it.corrupt(*padded, index))
    torch.testing.assert_close(long, short, rtol=1e-6, atol=0)


def test_hand_computed_losses(objective, text):
    # Row 0: t = 1/2, weight 2, four maskable, two masked. Row 1: t = 1/4, weight 4, two maskable, one masked.
    time_B = torch.tensor([0.5, 0.25])
    uniforms_BL = torch.tensor([[0.1, 0.9, 0.4, 0.6], [0.2, 0.8, 0.0, 0.0]])
    mask_BL = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    nll_BL = torch.tensor([[1.0, 50.0, 2.0, 50.0], [3.0, 50.0, 50.0, 50.0]])
    index = torch.arange(2)

    def loss(**settings):
        it = objective(**settings)
        corruption = it.corrupt(text(2, 4)[0], mask_BL, index, time=time_B, uniforms_BL=uniforms_BL)
        return it.reduce(nll_BL, corruption)

    def approximately(total, count):
        return pytest.approx(total), count

    assert loss(loss_norm="token") == approximately(2 * 3 + 4 * 3, 6)
    assert loss(loss_norm="batch") == approximately(2 * 3 + 4 * 3, 2)
    assert loss(loss_norm="sequence") == approximately(2 * 3 / 4 + 4 * 3 / 2, 2)
    assert loss(loss_weight="uniform") == approximately(3 + 3, 6)
    assert loss(loss_weight="uniform", loss_norm="sequence") == approximately(3 / 4 + 3 / 2, 2)
    assert loss(weight_epsilon=0.5) == approximately(3 / (0.5 + 0.5) + 3 / (0.25 + 0.5), 6)
    assert loss(schedule="polynomial") == approximately(2 / 0.5 * 1, 6)  # rates 1/4 and 1/16 mask one token
    assert loss(schedule=PolynomialSchedule(1.0)) == loss()
    assert loss(loss_norm="token").mean.item() == pytest.approx(3.0)


def test_nll_weight_is_the_bound_per_token_whatever_the_loss(objective, text):
    tokens_BL, mask_BL = text(8, 32)
    bound = objective().corrupt(tokens_BL, mask_BL, torch.arange(8))
    other = objective(loss_weight="uniform", loss_norm="sequence").corrupt(tokens_BL, mask_BL, torch.arange(8))
    weight_BL = get_schedule("linear").weight(bound.time)
    assert torch.equal(bound.nll_weight, bound.loss_weight)
    assert torch.equal(bound.nll_weight, torch.where(bound.masked, weight_BL, 0.0))
    assert torch.equal(other.nll_weight, bound.nll_weight)
    assert torch.equal(other.loss_weight, other.masked / 32)


def test_sums_and_counts_add_over_micro_batches(objective, text):
    tokens_BL, mask_BL = text(12, 10)
    mask_BL[3], mask_BL[5, 4:] = False, False
    nll_BL, index = torch.rand(12, 10), torch.arange(12)
    for norm in ("token", "sequence", "batch"):
        it = objective(loss_norm=norm)
        whole = it.reduce(nll_BL, it.corrupt(tokens_BL, mask_BL, index))
        parts = [it.reduce(nll_BL[part], it.corrupt(tokens_BL[part], mask_BL[part], part)) for part in index.split(5)]
        total = LossSum(sum(part.sum for part in parts), sum(part.count for part in parts))
        torch.testing.assert_close(total, whole, rtol=1e-6, atol=0)


def test_right_shift_scores_the_logits_of_the_left_neighbour(objective, text):
    tokens_BL, mask_BL = text(3, 6, first_id=10)
    vocabulary = 40
    next_token_BL = tokens_BL.roll(-1, dims=1)
    logits_BLV = 30.0 * torch.nn.functional.one_hot(next_token_BL, vocabulary)  # position i knows token i + 1

    def loss(right_shift):
        it = objective(right_shift=right_shift)
        corruption = it.corrupt(tokens_BL, mask_BL, torch.arange(3), time=torch.ones(3))
        row_B, position_B = corruption.masked.nonzero(as_tuple=True)
        nll_BL = torch.zeros(3, 6)
        logits = logits_BLV[row_B, position_B - it.shift]
        nll_BL[row_B, position_B] = cross_entropy(logits, tokens_BL[row_B, position_B], reduction="none")
        return it.reduce(nll_BL, corruption).mean.item()

    assert loss(right_shift=True) == pytest.approx(0, abs=1e-6)
    assert loss(right_shift=False) > 10


@pytest.mark.parametrize("norm", ["token", "sequence", "batch"])
def test_a_batch_without_targets_costs_nothing(objective, text, norm):
    tokens_BL, mask_BL = text(2, 5)
    it = objective(loss_norm=norm, force_mask=True)
    corruption = it.corrupt(tokens_BL, torch.zeros_like(mask_BL), torch.arange(2))
    logits_BLV = torch.randn(2, 5, 20, requires_grad=True)
    nll_BL = cross_entropy(logits_BLV.transpose(1, 2), tokens_BL % 20, reduction="none")
    loss = it.reduce(nll_BL, corruption)
    loss.mean.backward()
    assert loss.sum == 0
    assert loss.count == (0 if norm == "token" else 2)
    assert loss.mean == 0
    assert torch.equal(logits_BLV.grad, torch.zeros_like(logits_BLV))


def test_one_row_without_targets_leaves_the_other_alone_under_token_norm(objective, text):
    tokens_BL, mask_BL = text(2, 5)
    mask_BL[1] = False
    it, nll_BL = objective(), torch.rand(2, 5)
    both = it.reduce(nll_BL, it.corrupt(tokens_BL, mask_BL, torch.arange(2)))
    alone = it.reduce(nll_BL[:1], it.corrupt(tokens_BL[:1], mask_BL[:1], torch.arange(1)))
    assert both.mean == alone.mean


def test_infinite_values_at_positions_that_do_not_count(objective, text):
    tokens_BL, mask_BL = text(1, 4)
    it = objective()
    noise = {"time": torch.tensor([0.5]), "uniforms_BL": torch.tensor([[0.1, 0.9, 0.9, 0.9]])}
    corruption = it.corrupt(tokens_BL, mask_BL, torch.tensor([0]), **noise)
    nll_BL = torch.tensor([[1.0, math.inf, math.nan, 5.0]], requires_grad=True)
    loss = it.reduce(nll_BL, corruption)
    loss.sum.backward()
    assert loss == (2.0, 4)
    assert nll_BL.grad.tolist() == [[2.0, 0.0, 0.0, 0.0]]
