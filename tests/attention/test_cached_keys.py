"""Attention of a few queries to the keys of a cache."""

import weakref

import pytest
import torch

from nemo_dllm.collections.diffusion.attention.cached_keys import CachedKeys, cached_mask
from nemo_dllm.collections.diffusion.attention.core import eager, sdpa


@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("queries_of_mask", [1, 3])
def test_heads_of_a_group_share_their_keys(heads, queries_of_mask):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(4, 3, heads, 8, generator=generator).permute(0, 2, 1, 3)
    key, value = torch.randn(2, 4, 2, 11, 8, generator=generator)
    key_ranks_BK = torch.randint(0, 9, (4, 11), generator=generator)
    key_ranks_BK[:, 3] = 0
    ranks_BL = torch.randint(0, 9, (4, queries_of_mask), generator=generator)
    pattern = CachedKeys((ranks_BL, key_ranks_BK), lambda *_: None)
    assert torch.equal(cached_mask(pattern), key_ranks_BK[:, None] <= ranks_BL[..., None])
    expected = eager(query, key, value, pattern, 0.3, 0.0)
    torch.testing.assert_close(sdpa(query, key, value, pattern, 0.3, 0.0), expected, atol=1e-6, rtol=0)
    # A mask that is not read would show.
    hidden = CachedKeys((8 - ranks_BL, 8 - key_ranks_BK), lambda *_: None)
    assert (sdpa(query, key, value, hidden, 0.3, 0.0) - expected).abs().max() > 0.1


def test_what_sees_nothing_sees_everything():
    pattern = CachedKeys((torch.tensor([[0, 5]]), torch.tensor([[3, 9]])), lambda *_: None)
    assert cached_mask(pattern).tolist() == [[[True, True], [True, False]]]
    assert cached_mask(CachedKeys(None, lambda *_: None)) is None


def test_a_pass_is_gone_with_its_cache():
    """What is made of a pass lives as long as the pass, with whose cache it would otherwise stay."""

    class Cache:
        def exchange(self, *_): ...

    for ranks in (None, (torch.zeros(1, 1), torch.zeros(1, 3))):
        cache = Cache()
        pattern, kept = CachedKeys(ranks, cache.exchange), weakref.ref(cache)
        assert cached_mask(pattern) is cached_mask(pattern)
        del cache, pattern
        assert kept() is None
