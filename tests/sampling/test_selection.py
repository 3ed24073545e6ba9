"""How many positions a step commits, and which. Shape letters: B rows, T canvas positions."""

import pytest
import torch

from nemo_dllm.collections.diffusion.sampling import SamplerConfig
from nemo_dllm.collections.diffusion.sampling.denoise import denoise
from nemo_dllm.collections.diffusion.sampling.noise import RowNoise
from nemo_dllm.collections.diffusion.sampling.remasking import Predictions
from nemo_dllm.collections.diffusion.sampling.selection import Scored, judge, rate, select_commits


def select(probabilities, quota=1, candidates=None, **fields):
    """Positions committed in one row whose positions propose token 0 with these probabilities."""
    given_NV = torch.tensor([[p, 1 - p] for p in probabilities])
    drawn_N = torch.full((len(probabilities),), 0.5, dtype=torch.float64)
    proposed = Predictions(torch.zeros(len(probabilities), dtype=torch.int64), given_NV, lambda: drawn_N)
    places = range(len(probabilities))
    may_be = [place for place in places if candidates is None or candidates[place]]
    scored = Scored.of([may_be], len(probabilities), [places])
    config = SamplerConfig(**fields)
    return select_commits(judge(rate(proposed, config), config), scored, [quota], config)


@pytest.mark.parametrize(
    "factor, probabilities, committed",
    [
        # (n + 1)(1 - c) by place: 2 * 0.1, 3 * 0.2, 4 * 0.5.
        (1.0, [0.8, 0.5, 0.9], [0, 2]),
        (0.5, [0.8, 0.5, 0.9], [2]),
        (0.1, [0.8, 0.5, 0.9], [2]),
        (2.0, [0.8, 0.5, 0.9], [0, 1, 2]),
        # The third place fails, so the fourth is out, though 5 * 0 is little.
        (1.0, [0.95, 0.2, 0.9, 0.15], [0, 2]),
        # Equal confidences: 2 * 0.25, 3 * 0.25 and 4 * 0.25 are in, 5 * 0.25 is not.
        (1.0, [0.75, 0.75, 0.75, 0.75], [0, 1, 2]),
        # The last place fails on its own: it stays.
        (1.0, [0.9, 0.5], [0]),
    ],
)
def test_factor_by_hand(factor, probabilities, committed):
    assert select(probabilities, factor=factor) == committed


def test_positions_that_are_no_candidates_take_no_place():
    assert select([0.99, 0.8, 0.9], candidates=[False, True, True], factor=1.0) == [1, 2]
    assert select([0.99, 0.8, 0.9], candidates=[False, True, True], threshold=0.0) == [1, 2]
    assert select([0.99, 0.8, 0.9], candidates=[False, True, False], quota=3) == [1]


def test_with_steps_a_threshold_commits_at_least_the_schedule():
    assert select([0.9, 0.2, 0.3], quota=2, threshold=0.8) == [0, 2]
    assert select([0.9, 0.85, 0.95], quota=2, threshold=0.8) == [0, 1, 2]
    assert select([0.9, 0.2, 0.3], quota=2, factor=1.0) == [0, 2]


@pytest.mark.parametrize("remasking", ["confidence", "margin", "entropy"])
def test_scores_that_differ_by_rounding_are_equal(remasking):
    """The lowest position of the best ones first, and the next best ones behind all of these."""
    given = [0.75, 0.8999999, 0.9, 0.7500001, 0.9000001]
    committed = [select(given, quota, remasking=remasking) for quota in range(6)]
    assert committed == [[], [1], [1, 2], [1, 2, 4], [0, 1, 2, 4], [0, 1, 2, 3, 4]]
    assert select([0.9, 0.90001], remasking=remasking) == [1]


def test_bounds_are_compared_in_the_precision_of_the_probabilities():
    # In float32 as in decimals, 0.3 is not above 0.3 and 2 * (1 - 0.35) is 1.3; in float64 both fail.
    assert select([0.9, 0.3], threshold=0.3) == [0]
    assert select([0.35, 0.1], quota=0, factor=1.3) == [0]
    assert select([0.9, 0.3], threshold=1e300) == [0]


def test_one_is_committed_whatever_the_bound():
    assert select([0.1, 0.2], threshold=1.5) == [1]
    assert select([0.1, 0.2], factor=1e-6) == [1]
    assert select([0.1, 0.2], quota=0, factor=1e-6) == []


def test_order_at_a_temperature_follows_the_scores():
    rows, scores = 6000, torch.tensor([0.5, 0.1, 0.3])
    scored_BT = torch.ones(rows, 3, dtype=torch.bool)
    noise = RowNoise(0, range(rows), torch.device("cpu"))
    given_NV = torch.stack([scores, 1 - scores], dim=1).repeat(rows, 1)
    proposed = Predictions(torch.zeros(3 * rows, dtype=torch.int64), given_NV, lambda: noise.uniform(scored_BT))
    config = SamplerConfig(remasking_temperature=0.25)
    scored = Scored.of([range(3 * row, 3 * row + 3) for row in range(rows)], 3)
    chosen = select_commits(judge(rate(proposed, config), config), scored, [1] * rows, config)
    draws = torch.bincount(torch.tensor(chosen) % 3)
    expected = (scores / 0.25).softmax(dim=0) * rows
    assert ((draws - expected) ** 2 / expected).sum() < 18.4  # 2 degrees of freedom, 1 in 10,000


def test_a_temperature_next_to_0_keeps_the_order():
    assert select([0.1, 0.3, 0.2], remasking_temperature=1e-300) == [1]


def test_tempered_confidence_loses_the_order(table_model):
    """Probabilities of 1 everywhere at a low temperature: the leftmost position goes first, not the surest."""

    def first_commit(**fields):
        model = table_model({**{i: {1: 0.6} for i in range(5)}, 5: {2: 0.99}})
        canvas_BT = torch.zeros(1, 6, dtype=torch.int64)
        config = SamplerConfig(temperature=0.02, top_p=0.9, seed=0, **fields)
        step = next(denoise(model, canvas_BT, torch.ones(1, 6, dtype=torch.bool), 9, config))
        return step.committed_BT[0].nonzero().flatten().tolist()

    assert first_commit() == [5]
    assert first_commit(tempered_confidence=True) == [0]
