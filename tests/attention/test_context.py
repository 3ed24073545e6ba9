"""What one rank of context parallelism computes is its part of the whole, in dense masks and in FlexAttention's."""

import pytest
import torch

from nemo_dllm.collections.diffusion.attention.context import QueryShard, copies, query_shard, take_shard
from nemo_dllm.collections.diffusion.attention.core import eager
from nemo_dllm.collections.diffusion.attention.flex import flex
from nemo_dllm.collections.diffusion.attention.masks import Bidirectional, BlockCausal, NoisyClean, dense_mask

LENGTH, RANKS = 24, 3
KEYS = torch.arange(LENGTH) < torch.tensor([[LENGTH], [10]])
DOCUMENTS = (torch.arange(LENGTH) >= torch.tensor([[7], [16]])).long()
PATTERNS = {
    "documents": Bidirectional(KEYS, DOCUMENTS),
    "block-causal": BlockCausal(4),
    "blocks that shards cut": BlockCausal(5, KEYS),
    "noisy and clean": NoisyClean(4, LENGTH),
    "noisy and clean, documents": NoisyClean(3, LENGTH, KEYS, DOCUMENTS),
    "causal clean half": NoisyClean(4, LENGTH, clean_causal=True),
}


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_shards_are_the_rows_of_the_whole(pattern):
    positions, tokens = copies(pattern) * LENGTH, LENGTH // RANKS
    whole = dense_mask(pattern, positions, positions, torch.device("cpu"))
    for rank in range(RANKS):
        shard = query_shard(pattern, rank, tokens)
        mask = dense_mask(shard, copies(pattern) * tokens, positions, torch.device("cpu"))
        assert torch.equal(mask, take_shard(whole, 2, pattern, rank, RANKS))


@pytest.mark.parametrize("kernel", [eager, flex])
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_kernels_give_a_rank_its_part(pattern, kernel):
    generator = torch.Generator().manual_seed(0)
    positions = copies(pattern) * LENGTH
    query = torch.randn(2, 4, positions, 16, generator=generator)
    key, value = (torch.randn(2, 2, positions, 16, generator=generator) for _ in range(2))
    whole = eager(query, key, value, pattern, 0.25, 0.0)
    for rank in range(RANKS):
        shard = query_shard(pattern, rank, LENGTH // RANKS)
        part = kernel(take_shard(query, 2, pattern, rank, RANKS), key, value, shard, 0.25, 0.0)
        torch.testing.assert_close(part, take_shard(whole, 2, pattern, rank, RANKS), rtol=0, atol=1e-5)


@pytest.mark.parametrize("pattern", [PATTERNS["documents"], PATTERNS["noisy and clean"]], ids=["tensors", "none"])
def test_layers_share_one_shard_and_its_mask(pattern):
    first, second = query_shard(pattern, 1, 8), query_shard(pattern, 1, 8)
    assert isinstance(first, QueryShard)
    assert first is second
    masks = [dense_mask(shard, 8, LENGTH, torch.device("cpu")) for shard in (first, second)]
    assert masks[0] is masks[1]
    assert query_shard(pattern, 2, 8) is not first
