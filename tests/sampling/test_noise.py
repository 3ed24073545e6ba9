import torch

from nemo_dllm.collections.diffusion.sampling.noise import GlobalNoise, RowNoise, gumbel, row_seed

CPU = torch.device("cpu")


def positions(counts):
    """As many True per row as asked for, at the end of each row."""
    longest = max(counts)
    return torch.tensor([[False] * (longest - count) + [True] * count for count in counts])


def test_seeds_of_rows_and_runs_do_not_collide():
    seeds = {row_seed(seed, row) for seed in range(-50, 50) for row in range(50)}
    assert len(seeds) == 5000
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    # The CPU generator keeps 32 bits only.
    assert len({seed & 0xFFFFFFFF for seed in seeds}) > 4990


def test_a_row_draws_the_same_whatever_its_neighbours_draw():
    batched = RowNoise(3, [0, 1, 2], CPU)
    alone = RowNoise(3, [1], CPU)
    for counts in [(4, 2, 1), (0, 3, 5), (9, 1, 0)]:
        drawn = batched.uniform(positions(counts), 7)
        assert drawn.shape == (sum(counts), 7) and drawn.dtype == torch.float64
        assert torch.equal(drawn[counts[0] : counts[0] + counts[1]], alone.uniform(positions([counts[1]]), 7))


def test_seeds_of_requests_that_share_a_batch():
    together = RowNoise([5, 6], [0, 2], CPU).uniform(positions([3, 3]))
    assert torch.equal(together[:3], RowNoise(5, [0], CPU).uniform(positions([3])))
    assert torch.equal(together[3:], RowNoise(6, [2], CPU).uniform(positions([3])))


def test_global_noise_is_that_of_the_whole_grid():
    torch.manual_seed(1)
    grid = torch.rand(2, 3, 4, dtype=torch.float64), torch.rand(2, 3)
    torch.manual_seed(1)
    chosen = torch.tensor([[True, False, False], [False, True, True]])
    assert torch.equal(GlobalNoise().uniform(chosen, 4), grid[0][chosen])
    assert torch.equal(GlobalNoise().uniform(chosen), grid[1][chosen])


def test_without_a_seed_the_global_generator_decides():
    def draw():
        return RowNoise(None, [0], CPU).uniform(positions([3]))

    torch.manual_seed(5)
    first, second = draw(), draw()
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    assert torch.equal(draw(), first)


def test_gumbel_is_finite_at_both_ends_and_has_the_right_mean():
    ends = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert gumbel(ends).isfinite().all()
    # The mean of the distribution is the Euler-Mascheroni constant, its standard deviation pi / sqrt(6) = 1.28.
    assert (
        abs(gumbel(RowNoise(0, [0], CPU).uniform(positions([200_000]))).mean().item() - 0.57722)
        < 4 * 1.2825 / 200_000**0.5
    )
