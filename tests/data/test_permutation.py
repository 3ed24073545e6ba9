"""Permutations and blends that are computed, against what any table would have to fulfil."""

import itertools

import numpy as np
import pytest

from nemo_dllm.collections.diffusion.data.permutation import Blend, permuted


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 64, 65, 1000])
def test_every_element_once(size):
    assert sorted(permuted(index, size, (1, 0)) for index in range(size)) == list(range(size))


def test_seeds_give_other_orders_that_look_random():
    orders = {seed: [permuted(index, 1000, seed) for index in range(1000)] for seed in ((1, 0), (1, 1), (2, 0))}
    for one, other in itertools.combinations(orders.values(), 2):
        # Two random permutations have one common place on average.
        assert sum(a == b for a, b in zip(one, other, strict=True)) < 8
    for order in orders.values():
        assert abs(np.corrcoef(order, range(1000))[0, 1]) < 0.1
        assert sum(b == a + 1 for a, b in itertools.pairwise(order)) < 8
    # Where an element goes is uniform over seeds: 2,000 draws over 10 places, five standard deviations.
    counts = np.bincount([permuted(3, 10, (seed,)) for seed in range(2000)], minlength=10)
    assert np.abs(counts - 200).max() < 5 * np.sqrt(2000 * 0.1 * 0.9)


def test_large_sizes_need_no_table():
    size = 10**15 + 7
    found = {permuted(index, size, (1, 0)) for index in range(200)}
    assert len(found) == 200 and min(found) >= 0 and max(found) < size


@pytest.mark.parametrize("weights", [[1], [1, 1], [3, 1], [0.7, 0.2, 0.1], [1e-3, 1.0], [1, 1e9, 7]])
def test_shares_hold_at_every_length(weights):
    blend = Blend(weights)
    seen = [0] * len(weights)
    for index in range(3000):
        place = blend.place(index)
        assert place.position == seen[place.source]
        seen[place.source] += 1
        assert blend.counts(index + 1) == seen
        expected = np.array(weights) / sum(weights) * (index + 1)
        assert np.abs(seen - expected).max() <= len(weights)


@pytest.mark.parametrize("weights", [[], [0.0, 1.0], [-1.0], [float("nan")], ["1", "2"], [[1]], 1, "1", {"a": 1}])
def test_weights_must_be_positive(weights):
    with pytest.raises(ValueError, match=r"weights=.* must be positive numbers; leave out what has no weight"):
        Blend(weights)
