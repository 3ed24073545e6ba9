import pytest
import torch

from nemo_dllm.collections.diffusion.objectives import training_times, validation_times
from nemo_dllm.collections.diffusion.objectives.noise import permutation, uniforms

EPSILON = 1e-3


def times(kind, index, *, group_size=None, seed=1234, epsilon=EPSILON):
    """One time per sample."""
    return parts(kind, index, torch.ones_like(index), group_size=group_size, seed=seed, epsilon=epsilon)[:, 0]


def parts(kind, index, parts_B, *, group_size=None, seed=1234, epsilon=EPSILON):
    return training_times(kind, seed, index, parts_B, group_size=group_size, time_range=(epsilon, 1.0))


def validation(seed, rows):
    return validation_times(seed, rows, torch.ones_like(rows), time_range=(EPSILON, 1.0))[:, 0]


def unit(time_B):
    return (time_B.double() - EPSILON) / (1 - EPSILON)


@pytest.mark.parametrize("group_size", [1, 8, 96])
def test_antithetic_times_of_a_group_are_shuffled_even_strata(group_size):
    index = torch.arange(3 * group_size)
    groups = unit(times("antithetic", index, group_size=group_size)).view(3, group_size)
    for group, drawn in enumerate(groups):
        offset = uniforms(1234, torch.tensor([group]), 1, "time").double().squeeze()
        even = (torch.arange(group_size) + offset) / group_size
        torch.testing.assert_close(drawn.sort().values, even, rtol=0, atol=1e-6)
        order = permutation(1234, torch.tensor([group]), group_size, "group")[0]
        assert torch.equal(drawn.argsort(), order.argsort())
    if group_size > 1:
        assert not torch.equal(groups[0].argsort(), groups[1].argsort())


def test_antithetic_times_do_not_depend_on_the_batch():
    index = torch.arange(40)
    together = times("antithetic", index, group_size=16)
    apart = torch.cat([times("antithetic", part, group_size=16) for part in index.split(3)])
    shuffled = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    assert torch.equal(apart, together)
    assert torch.equal(times("antithetic", shuffled, group_size=16), together[shuffled])


def test_antithetic_lowers_the_variance_of_a_batch():
    index = torch.arange(16 * 200)
    spread = {
        kind: times(kind, index, group_size=16).view(200, 16).mean(dim=1).std().item() for kind in ("antithetic", "iid")
    }
    # The mean of 16 uniforms varies by 12**-0.5 / 4; that of the strata by their offset, 12**-0.5 / 16.
    assert spread["iid"] == pytest.approx(12**-0.5 / 4, rel=0.2)
    assert spread["antithetic"] == pytest.approx(12**-0.5 / 16, rel=0.2)


def test_iid_times_are_one_uniform_per_sample():
    index = torch.tensor([5, 0, 901])
    expected = EPSILON + (1 - EPSILON) * uniforms(1234, index, 1, "time")[:, 0]
    torch.testing.assert_close(times("iid", index), expected, rtol=1e-6, atol=0)
    assert torch.equal(times("per_sequence", index), times("iid", index))
    assert torch.equal(times("iid", index, group_size=8), times("iid", index))


@pytest.mark.parametrize("epsilon", [1e-3, 0.3])
@pytest.mark.parametrize("kind", ["antithetic", "iid"])
def test_times_fill_their_range(kind, epsilon):
    drawn = times(kind, torch.arange(4000), group_size=400, epsilon=epsilon)
    assert drawn.dtype == torch.float32
    assert drawn.min() >= torch.tensor(epsilon)
    assert drawn.max() <= 1
    assert drawn.min().item() == pytest.approx(epsilon, abs=2e-3)
    assert drawn.mean().item() == pytest.approx((1 + epsilon) / 2, abs=0.02)


@pytest.mark.parametrize("kind", ["antithetic", "iid"])
def test_seeds_and_epochs_differ(kind):
    first, other_seed = (times(kind, torch.arange(64), group_size=16, seed=seed) for seed in (1, 2))
    second_epoch = times(kind, torch.arange(64, 128), group_size=16, seed=1)
    assert (first != other_seed).all()
    assert (first != second_epoch).all()


def test_validation_times_are_even_fixed_and_their_own():
    rows = torch.arange(50)
    drawn = validation(1234, rows)
    assert drawn.dtype == torch.float32
    assert torch.equal(drawn, torch.cat([validation(1234, part) for part in rows.split(7)]))
    points = unit(drawn).sort().values
    assert torch.diff(points).max() < 2.2 / 50
    assert (drawn != times("iid", rows)).all()
    assert (drawn != validation(1235, rows)).all()


def test_errors():
    with pytest.raises(
        ValueError,
        match=r"time_sampling='antithetic' needs group_size \(the global batch size in samples\), which is None; "
        "set group_size, or an iid time_sampling",
    ):
        times("antithetic", torch.arange(4))
    with pytest.raises(ValueError, match="time_sampling='sobol' is unknown; known: antithetic, antithetic_per_block, "):
        times("sobol", torch.arange(4), group_size=4)
    with pytest.raises(ValueError, match="index=-1 is outside"):
        times("iid", torch.tensor([-1]))


@pytest.mark.parametrize("parts_per_sample", [2, 7])
def test_stratified_parts_fill_the_strata_of_a_group_evenly(parts_per_sample):
    group, index = 5, torch.arange(10)
    parts_B = torch.full_like(index, parts_per_sample)
    drawn = unit(parts("antithetic_per_block", index, parts_B, group_size=group))
    for times_GP in drawn.split(group):
        spacing = torch.diff(times_GP.flatten().sort().values)
        torch.testing.assert_close(spacing, torch.full_like(spacing, 1 / (group * parts_per_sample)), rtol=0, atol=1e-6)
    for times_P in drawn:
        spacing = torch.diff(times_P.sort().values)
        torch.testing.assert_close(spacing, torch.full_like(spacing, 1 / parts_per_sample), rtol=0, atol=1e-6)
    # In an order of its own for each sample.
    assert len({tuple(times_P.argsort().tolist()) for times_P in drawn}) > 1


def test_samples_with_fewer_parts_draw_as_if_alone():
    index, parts_B = torch.arange(3), torch.tensor([4, 1, 3])
    for kind in ("antithetic_per_block", "iid_per_block"):
        together = parts(kind, index, parts_B, group_size=3)
        for row in range(3):
            alone = parts(kind, index[row : row + 1], parts_B[row : row + 1], group_size=3)[0]
            assert torch.equal(together[row, : parts_B[row]], alone)
        # Schedules refuse what is outside, though nobody uses it.
        assert ((together > 0) & (together <= 1)).all()
