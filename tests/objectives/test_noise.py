import time

import numpy as np
import pytest
import torch

from nemo_dllm.collections.diffusion.objectives.noise import STREAMS, even_spread, permutation, uniforms

INDEX = torch.tensor([0, 1, 7, 123_456_789_012])


def philox_4x64_10(counter, key):
    """Four words of Philox4x64-10, written from Salmon et al. 2011 in python integers."""
    x, k = list(counter), list(key)
    for _ in range(10):
        left, right = x[0] * 0xD2E7470EE14C6C93, x[2] * 0xCA5A826395121157
        x = [
            (right >> 64) ^ x[1] ^ k[0],
            right % 2**64,
            (left >> 64) ^ x[3] ^ k[1],
            left % 2**64,
        ]
        k = [(k[0] + 0x9E3779B97F4A7C15) % 2**64, (k[1] + 0xBB67AE8584CAA73B) % 2**64]
    return x


def words(seed, index, length, stream):
    blocks = (philox_4x64_10((1 + block, 0, 0, STREAMS[stream]), (seed, index)) for block in range(-(-length // 4)))
    return [word for block in blocks for word in block][:length]


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("seed", [0, 1234, 2**64 - 1])
def test_uniforms_are_the_published_generator(seed, stream):
    drawn = uniforms(seed, INDEX, 11, stream)
    expected = [[(word >> 40) / 2**24 for word in words(seed, i, 11, stream)] for i in INDEX.tolist()]
    assert drawn.dtype == torch.float32
    assert drawn.tolist() == expected


def test_permutation_orders_the_same_words():
    drawn = permutation(5, torch.tensor([3, 4]), 9, "group")
    assert drawn.dtype == torch.int64
    assert drawn.tolist() == [sorted(range(9), key=words(5, group, 9, "group").__getitem__) for group in (3, 4)]
    assert sorted(drawn[0].tolist()) == list(range(9))
    assert drawn[0].tolist() != drawn[1].tolist()


def test_permutations_reach_every_place_equally_often():
    first = permutation(1, torch.arange(6000), 6, "group")[:, 0]
    # 1,000 expected each, standard deviation 29
    assert first.bincount(minlength=6).sub(1000).abs().max() < 5 * 29


def test_a_draw_depends_on_nothing_else():
    together = uniforms(7, INDEX, 32, "mask")
    np.random.seed(99)
    torch.manual_seed(99)
    before = np.random.get_state()[1].copy(), torch.get_rng_state()
    for row, index in enumerate(INDEX):
        assert torch.equal(uniforms(7, index[None], 32, "mask")[0], together[row])
    assert torch.equal(uniforms(7, INDEX.flip(0), 32, "mask"), together.flip(0))
    assert torch.equal(uniforms(7, INDEX, 5, "mask"), together[:, :5])
    assert (np.random.get_state()[1] == before[0]).all()
    assert torch.equal(torch.get_rng_state(), before[1])


def test_seeds_samples_and_streams_are_independent():
    draws = torch.cat(
        [uniforms(seed, torch.arange(4), 20_000, stream) for seed in (1, 2) for stream in STREAMS]
    ).double()
    correlation = torch.corrcoef(draws) - torch.eye(len(draws))
    # standard deviation of a correlation of 20,000 draws: 0.0071
    assert correlation.abs().max() < 0.04


def test_uniforms_are_uniform():
    draws = uniforms(3, torch.arange(50), 20_000, "mask")
    assert (draws >= 0).all()
    assert (draws < 1).all()
    assert (draws * 2**24 == (draws * 2**24).round()).all()
    counts = (draws * 100).long().flatten().bincount(minlength=100)
    # chi-square with 99 degrees of freedom: mean 99, standard deviation 14
    assert ((counts - 10_000.0) ** 2 / 10_000).sum() < 99 + 5 * 14


def test_even_spread_leaves_no_gap_at_any_length():
    for count in (10, 100, 777):
        points = even_spread(11, torch.arange(count), "validation_time").sort().values
        gaps = torch.diff(points, append=points[:1] + 1)
        # The three gap lengths of this sequence are at most about 2 / count.
        assert gaps.max() < 2.2 / count
    together = even_spread(11, torch.arange(9), "validation_time")
    assert torch.equal(even_spread(11, torch.tensor([5]), "validation_time"), together[5:6])


def test_even_spread_of_one_index_is_uniform_over_seeds():
    points = torch.cat([even_spread(seed, torch.tensor([3]), "validation_time") for seed in range(2000)])
    # standard deviation of the mean of 2,000 uniforms: 0.0065
    assert points.mean().item() == pytest.approx(0.5, abs=0.03)
    assert points.std().item() == pytest.approx(12**-0.5, abs=0.02)


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: uniforms(-1, INDEX, 4, "mask"), r"seed=-1 is outside \[0, 2\*\*64\)"),
        (lambda: uniforms(2**64, INDEX, 4, "mask"), "seed=18446744073709551616 is outside"),
        (lambda: uniforms(1, torch.tensor([3, -2]), 4, "mask"), r"index=-2 is outside \[0, 2\*\*64\)"),
        (lambda: permutation(1, torch.tensor([-1]), 4, "group"), "index=-1 is outside"),
        (lambda: even_spread(1, torch.tensor([-5]), "validation_time"), "index=-5 is outside"),
        (
            lambda: uniforms(1, INDEX, 4, "dropout"),
            "stream='dropout' is unknown; known: group, mask, part, time, validation_mask, validation_part, val",
        ),
    ],
)
def test_errors(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()


def test_a_batch_is_drawn_in_a_few_hundred_microseconds():
    index = torch.arange(16)
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        uniforms(1, index, 2048, "mask")
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 3e-3
