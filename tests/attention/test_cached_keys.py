"""Attention of a few queries to the keys of a cache."""

import pytest
import torch

from nemo_dllm.collections.diffusion.attention.cached_keys import CachedKeys
from nemo_dllm.collections.diffusion.attention.core import eager, sdpa


@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("queries_of_mask", [1, 3])
def test_heads_of_a_group_share_their_keys(heads, queries_of_mask):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(4, 3, heads, 8, generator=generator).permute(0, 2, 1, 3)
    key, value = torch.randn(2, 4, 2, 11, 8, generator=generator)
    visible = torch.rand(4, queries_of_mask, 11, generator=generator) < 0.5
    visible[..., 0] = True
    pattern = CachedKeys(visible, lambda *_: None)
    expected = eager(query, key, value, pattern, 0.3, 0.0)
    torch.testing.assert_close(sdpa(query, key, value, pattern, 0.3, 0.0), expected, atol=1e-6, rtol=0)
    # A mask that is not read would show.
    hidden = CachedKeys(~visible | (torch.arange(11) == 1), lambda *_: None)
    assert (sdpa(query, key, value, hidden, 0.3, 0.0) - expected).abs().max() > 0.1
