"""Packs against hand-made cases, bounds and invariances."""

import numpy as np
import pytest

from nemo_dllm.collections.diffusion.data.packing import pack_by_length


def rows_of(packs):
    return [packs.row(row).tolist() for row in range(len(packs.ends))]


def test_by_hand():
    # Longest first: 7, 6 and 5 open rows, 3 fills the one of the 7, 2 and 1 go to the 6, where less room is left.
    packs = pack_by_length([3, 7, 1, 6, 2, 5], 10)
    assert rows_of(packs) == [[1, 0], [3, 4, 2], [5]]
    assert rows_of(pack_by_length([4, 4, 4], 4)) == [[0], [1], [2]]
    assert rows_of(pack_by_length([], 4)) == []


@pytest.mark.parametrize("seed", [None, (1, 0), (1, 1)])
def test_every_sample_once_and_no_row_too_full(seed):
    lengths = np.random.default_rng(0).integers(1, 101, size=2000)
    packs = pack_by_length(lengths, 100, seed)
    assert sorted(packs.members.tolist()) == list(range(2000))
    totals = [int(lengths[row].sum()) for row in rows_of(packs)]
    assert max(totals) <= 100
    fewest = -(-int(lengths.sum()) // 100)
    assert fewest <= len(totals) <= 1.05 * fewest


def test_short_samples_leave_next_to_no_waste():
    lengths = np.random.default_rng(0).integers(60, 600, size=5000)
    assert lengths.sum() > 0.97 * 2048 * len(pack_by_length(lengths, 2048, (1, 0)).ends)


def test_seed():
    lengths = np.random.default_rng(0).integers(1, 101, size=500)
    before = np.random.get_state()[1].tolist()
    first, same, other = (rows_of(pack_by_length(lengths, 100, seed)) for seed in ((1, 0), (1, 0), (1, 1)))
    assert first == same != other
    assert len(first) == len(other) == len(pack_by_length(lengths, 100).ends)
    assert np.random.get_state()[1].tolist() == before


@pytest.mark.parametrize("length", [0, 11])
def test_lengths_that_do_not_fit(length):
    with pytest.raises(ValueError, match=f"sample 1 has {length} tokens, a row holds 1 to 10"):
        pack_by_length([3, length], 10)
