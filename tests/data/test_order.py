"""Orders are permutations by seed, epoch and lengths."""

from functools import partial

import numpy as np

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


def test_positions_in_any_sequence():
    order = EpochOrder(7, partial(epoch_permutation, 7, 3))

    def row(index):
        permutation, position = order.at(index)
        return int(permutation[position])

    straight = [row(index) for index in range(28)]
    assert straight == [int(epoch_permutation(7, 3, index // 7)[index % 7]) for index in range(28)]
    assert [row(index) for index in (6, 7, 6, 7, 27, 0)] == [straight[index] for index in (6, 7, 6, 7, 27, 0)]
    assert len(order._kept) <= 2
