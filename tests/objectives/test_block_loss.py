"""What uniform logits cost, ln V in every setting, and complementary masks."""

import dataclasses
import math

import pytest
import torch

from nemo_dllm.collections.diffusion.objectives import BlockDiffusion, MaskedDiffusion, get_schedule

VOCABULARY = 50
SCHEDULES = ["linear", "cosine", "polynomial", "geometric"]


def loss_of(objective, rows, length, loss_mask_BL=None, **noise):
    """Loss under uniform logits and the bound in nats per token."""
    tokens_BL = torch.arange(rows * length).view(rows, length) + 100
    if loss_mask_BL is None:
        loss_mask_BL = torch.ones(rows, length, dtype=torch.bool)
    noised = objective.corrupt(tokens_BL, loss_mask_BL, torch.arange(rows), **noise)
    scored = objective.score(tokens_BL, noised)
    nll = math.log(VOCABULARY)
    bound = (nll * scored.nll_weight).sum() / (noised.maskable.sum() / objective.views)
    return ((nll * scored.loss_weight).sum() / noised.count).item(), bound.item()


@pytest.mark.parametrize(
    "changes",
    [{}, {"complementary": True}, {"time_range": (0.3, 0.8)}, {"complementary": True, "time_range": (0.3, 1.0)}],
    ids=str,
)
@pytest.mark.parametrize("sampling", ["antithetic_per_block", "iid_per_block", "antithetic"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_uniform_logits_cost_ln_v(schedule, sampling, changes):
    rows = 4000
    it = BlockDiffusion(
        mask_token_id=7, block_size=5, schedule=schedule, time_sampling=sampling, group_size=rows, **changes
    )
    loss, bound = loss_of(it, rows, 23)
    # Up to time_epsilon, and the variance of rare, heavy masks.
    assert loss == pytest.approx(math.log(VOCABULARY), rel=0.03)
    assert bound == pytest.approx(math.log(VOCABULARY), rel=0.03)


@pytest.mark.parametrize("norm, scale", [("token", 1), ("sequence", 1), ("batch", 8)])
def test_norms(norm, scale):
    it = BlockDiffusion(mask_token_id=7, block_size=4, loss_norm=norm, group_size=4000)
    assert loss_of(it, 4000, 8)[0] == pytest.approx(scale * math.log(VOCABULARY), rel=0.02)


def test_clipping_by_another_scale_would_be_noticed():
    """Without it a cosine schedule costs (alpha(low) - alpha(high)) / (high - low) as much."""
    cosine = get_schedule("cosine")
    assert (cosine.alpha(0.3) - cosine.alpha(0.8)) / 0.5 == pytest.approx(0.994, abs=1e-3)
    assert (cosine.alpha(0.05) - cosine.alpha(0.3)) / 0.25 > 1.3
    it = BlockDiffusion(mask_token_id=7, block_size=4, schedule="cosine", time_range=(0.05, 0.3), group_size=4000)
    assert loss_of(it, 4000, 16)[0] == pytest.approx(math.log(VOCABULARY), rel=0.03)


def test_clipped_times_fill_their_range():
    for sampling in ("antithetic_per_block", "iid_per_block", "antithetic", "iid"):
        it = BlockDiffusion(mask_token_id=7, time_sampling=sampling, time_range=(0.3, 0.8), group_size=100)
        time_BP = it.draw_times(torch.arange(1000), torch.full((1000,), 6))
        assert 0.3 <= time_BP.min() < 0.31
        assert 0.79 < time_BP.max() <= 0.8
        late = dataclasses.replace(it, time_range=(0.3, 1.0), complementary=True)
        # The complement of what is all masked weighs without bound.
        assert late.draw_times(torch.arange(1000), torch.full((1000,), 6)).max() <= 0.999
        whole = it.draw_times(torch.arange(1000), torch.full((1000,), 6), validation=True)
        assert whole.min() < 0.01
        assert whole.max() > 0.99


@pytest.mark.parametrize("of", [BlockDiffusion, MaskedDiffusion])
def test_a_pair_shows_and_scores_every_supervised_token_once(of):
    tokens_BL = torch.arange(60).view(4, 15) + 100
    loss_mask_BL = (torch.arange(15) >= 3) & (torch.arange(15) < torch.tensor([[15], [10], [4], [3]]))
    it = of(mask_token_id=7, complementary=True, time_sampling="iid")
    noised = it.corrupt(tokens_BL, loss_mask_BL, torch.arange(4))
    first_BL, second_BL = noised.masked.view(2, 4, 15)
    assert not (first_BL & second_BL).any()
    assert torch.equal(first_BL | second_BL, loss_mask_BL)
    assert torch.equal(noised.tokens == 7, noised.masked)
    assert torch.equal(noised.tokens.view(2, 4, 15)[:, ~loss_mask_BL], tokens_BL[~loss_mask_BL].expand(2, -1))
    assert noised.count == loss_mask_BL.sum()
    scored = it.score(tokens_BL, noised)
    assert sorted(scored.token.tolist()) == tokens_BL[loss_mask_BL].tolist()
    assert torch.equal(noised.tokens[scored.row, scored.position], torch.full_like(scored.token, 7))


@pytest.mark.parametrize("norm, expected", [("token", 1.0), ("sequence", 1.0), ("batch", 6.5)])
def test_unweighted_pairs_cost_exactly_ln_v(norm, expected):
    """Every draw: each of the 9 and 4 supervised tokens is scored once with weight 1."""
    loss_mask_BL = torch.arange(10) >= torch.tensor([[1], [6]])
    it = BlockDiffusion(
        mask_token_id=7, block_size=4, loss_weight="uniform", loss_norm=norm, complementary=True, group_size=2
    )
    for _ in range(3):
        loss, _ = loss_of(it, 2, 10, loss_mask_BL)
        assert loss == pytest.approx(expected * math.log(VOCABULARY), rel=1e-6)
        it.seed += 1


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_both_views_of_a_pair_are_weighted_by_their_own_mask_rates(schedule):
    it = BlockDiffusion(mask_token_id=7, block_size=2, schedule=schedule, complementary=True)
    tokens_BL, loss_mask_BL = torch.full((1, 2), 100), torch.ones(1, 2, dtype=torch.bool)
    noise = {"time": torch.tensor([0.3]), "uniforms_BL": torch.tensor([[0.0, 0.999999]])}
    noised = it.corrupt(tokens_BL, loss_mask_BL, torch.tensor([0]), **noise)
    assert noised.masked.tolist() == [[True, False], [False, True]]
    alpha, slope = get_schedule(schedule).alpha(0.3), get_schedule(schedule).alpha_derivative(0.3)
    weights = [-slope / (1 - alpha) / 2, -slope / alpha / 2]
    assert noised.loss_weight[noised.masked].tolist() == pytest.approx(weights, rel=1e-4)
    assert torch.equal(noised.nll_weight, noised.loss_weight)
    assert noised.time[0].tolist() == pytest.approx([0.3, 0.3])
    # The second view looks like one drawn at the time of its own mask rate.
    assert get_schedule(schedule).mask_rate(noised.time[1]).tolist() == pytest.approx([alpha, alpha], abs=1e-4)


def test_an_added_next_token_loss_adds_its_share_of_ln_v():
    """10 tokens, of which 9 have a left neighbour."""
    it = BlockDiffusion(mask_token_id=7, loss_weight="uniform", complementary=True, ar_loss_weight=0.5, group_size=2)
    loss, bound = loss_of(it, 2, 10)
    assert loss == pytest.approx((1 + 0.5 * 9 / 10) * math.log(VOCABULARY), rel=1e-6)
    plain = BlockDiffusion(mask_token_id=7, loss_weight="uniform", complementary=True, group_size=2)
    assert bound == pytest.approx(loss_of(plain, 2, 10)[1], rel=1e-6)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_time_of_a_mask_rate(name):
    schedule, time_T = get_schedule(name), torch.linspace(0.01, 0.99, 33)
    rate_T = schedule.mask_rate(time_T)
    torch.testing.assert_close(schedule.mask_rate(schedule.time_of_mask_rate(rate_T)), rate_T, rtol=1e-4, atol=1e-6)
