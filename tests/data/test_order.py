"""Orders are permutations by seed, epoch and lengths."""

from functools import partial

import numpy as np
import pytest

from nemo_dllm.collections.diffusion.data.order import EpochOrder, length_grouped_permutation
from nemo_dllm.collections.diffusion.data.packed import epoch_permutation

LENGTHS = np.random.default_rng(0).integers(1, 1000, size=1003)


def test_length_groups():
    order = length_grouped_permutation(LENGTHS, seed=1, epoch=0, group_size=8)
    assert sorted(order.tolist()) == list(range(1003))
    groups = [LENGTHS[order[start : start + 8]] for start in range(0, 1000, 8)]
    spread = np.mean([group.max() - group.min() for group in groups])
    assert spread < 30  # by chance it is about 780
    means = [group.mean() for group in groups]
    assert np.mean(np.abs(np.diff(means))) > 100  # neighbours are not sorted
    for other in ({"seed": 2, "epoch": 0}, {"seed": 1, "epoch": 1}):
        assert order.tolist() != length_grouped_permutation(LENGTHS, group_size=8, **other).tolist()


@pytest.mark.parametrize("group_size", [8, 300, 2000])
def test_length_groups_are_batches_in_every_epoch(group_size):
    """1,003 is no multiple of the size: a group goes on in the next epoch, and the ones behind it keep the grid."""
    epochs = [length_grouped_permutation(LENGTHS, 1, epoch, group_size) for epoch in range(5)]
    assert all(sorted(order.tolist()) == list(range(1003)) for order in epochs)
    consumed = LENGTHS[np.concatenate(epochs)]
    spread = [np.ptp(consumed[start : start + group_size]) for start in range(0, 5015 - group_size, group_size)]
    across = [start // group_size for start in range(1003, 5015, 1003)]
    within = np.delete(spread, [batch for batch in across if batch < len(spread)])
    assert not len(within) or np.mean(within) < {8: 30, 300: 450}[group_size]  # by chance 780 and 990


def test_positions_in_any_sequence():
    order = EpochOrder(7, partial(epoch_permutation, 7, 3))

    def row(index):
        permutation, position = order.at(index)
        return int(permutation[position])

    straight = [row(index) for index in range(28)]
    assert straight == [int(epoch_permutation(7, 3, index // 7)[index % 7]) for index in range(28)]
    assert [row(index) for index in (6, 7, 6, 7, 27, 0)] == [straight[index] for index in (6, 7, 6, 7, 27, 0)]
    assert len(order._kept) <= 2
