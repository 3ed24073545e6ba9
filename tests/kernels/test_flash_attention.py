"""Attention by ranks against the same spelled out in fp32, on a GPU, or on a CPU with TRITON_INTERPRET=1.

Shape letters: B samples, Q query positions, K key positions, H query heads, G key/value heads, D head size.
"""

import os

import pytest
import torch

pytest.importorskip("triton")

from nemo_dllm.collections.diffusion.attention.cached_keys import CachedKeys
from nemo_dllm.collections.diffusion.attention.masks import BlockCausal, dense_mask
from nemo_dllm.collections.diffusion.attention.ranked import has_ranks, ranked, ranks_of
from nemo_dllm.collections.diffusion.kernels.flash_attention import HIDDEN, Tiling, attend, flash_attention, tile_ranks

INTERPRETED = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")
# The interpreter knows no products of bf16.
WHERE = [
    pytest.param(("cpu", torch.float16), marks=INTERPRETED, id="interpreted"),
    pytest.param(("cuda", torch.float16), marks=pytest.mark.gpu, id="fp16"),
    pytest.param(("cuda", torch.bfloat16), marks=pytest.mark.gpu, id="bf16"),
]
TOLERANCES = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
SMALL = Tiling(rows=16, keys=32, warps=4, stages=2, part=64)
"""So that few keys make many tiles and parts."""


@pytest.fixture(params=WHERE, name="where")
def device_and_dtype(request):
    return request.param


def tensors(where, samples, queries, keys, groups, repeats, size, room=0):
    """Queries as Megatron lays them out, keys and values the first slots of a cache with ``room`` for more."""
    generator = torch.Generator().manual_seed(0)
    query_QBHD = torch.randn(queries, samples, groups * repeats, size, generator=generator)
    key_BSGD, value_BSGD = torch.randn(2, samples, keys + room, groups, size, generator=generator)
    query, key, value = (x.to(*where) for x in (query_QBHD, key_BSGD, value_BSGD))
    return query.permute(1, 2, 0, 3), key[:, :keys].transpose(1, 2), value[:, :keys].transpose(1, 2)


def spelled_out(query, key, value, allowed_BQK, scale):
    """In fp32; 0 for a query that sees nothing."""
    repeats = query.size(1) // key.size(1)
    key, value = (x.float().repeat_interleave(repeats, dim=1) for x in (key, value))
    scores = query.float() @ key.transpose(-2, -1) * scale
    scores = scores.masked_fill(~allowed_BQK[:, None], -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ value


def assert_close(ours, expected, dtype):
    assert ours.dtype == dtype
    assert (ours.float() - expected).abs().max() <= TOLERANCES[dtype] * expected.abs().max()


# B, Q, K, G, R, D
SHAPES = {
    "a block of one row": (1, 4, 150, 2, 4, 128),
    "one key": (2, 3, 1, 2, 2, 64),
    "one query": (3, 1, 65, 1, 1, 64),
    "no groups": (2, 40, 70, 3, 1, 64),
    "five heads of a group": (2, 13, 64, 2, 5, 96),
    "seven heads of a group": (1, 10, 129, 1, 7, 128),
    "eight heads of a group": (2, 9, 100, 1, 8, 64),
    "more than one tile of queries": (2, 150, 150, 1, 2, 64),
    "head sizes off the powers of two": (1, 20, 33, 2, 3, 80),
    "small heads": (2, 20, 90, 2, 2, 8),
    "large heads": (1, 5, 70, 1, 2, 256),
}


@pytest.mark.parametrize("tiling", [None, SMALL], ids=["chosen", "small tiles, parts"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_any_ranks_by_the_spelled_out_form(where, shape, tiling):
    """Ranks without an order, among which some queries see nothing; and none."""
    query, key, value = tensors(where, *shape, room=3)
    generator = torch.Generator().manual_seed(1)
    query_BQ = torch.randint(-1, 6, (shape[0], shape[1]), generator=generator, dtype=torch.int32)
    key_BK = torch.randint(0, 9, (shape[0], shape[2]), generator=generator, dtype=torch.int32)
    key_BK[key_BK == 8] = HIDDEN
    query_BQ, key_BK = query_BQ.to(where[0]), key_BK.to(where[0])
    allowed_BQK = key_BK[:, None] <= query_BQ[:, :, None]
    for by_rank in (True, False):
        if tiling is None:
            ours = flash_attention(query, key, value, tile_ranks(query_BQ, key_BK) if by_rank else None, 0.2)
        else:
            ranks = tile_ranks(query_BQ, key_BK, tiling.keys) if by_rank else None
            ours = attend(query, key, value, ranks, 0.2, tiling)
        allowed = allowed_BQK if by_rank else torch.ones_like(allowed_BQK)
        assert_close(ours, spelled_out(query, key, value, allowed, 0.2), where[1])
    # Joining heads for the projection that follows costs no copy.
    assert ours.permute(2, 0, 1, 3).is_contiguous()


@pytest.mark.parametrize("block", [1, 4, 32, 1000])
@pytest.mark.parametrize("mask", ["no mask", "right padding", "left padding", "ragged", "positions"])
def test_block_causal_is_the_dense_mask_on_real_tokens(where, block, mask):
    keys = 140
    query, key, value = tensors(where, 3, keys, keys, 1, 2, 64)
    index_K = torch.arange(keys)
    masks = {
        "right padding": index_K < torch.tensor([[140], [100], [1]]),
        "left padding": index_K >= torch.tensor([[0], [100], [139]]),
        "ragged": torch.rand(3, keys, generator=torch.Generator().manual_seed(2)) < 0.5,
    }
    real_BK = masks.get(mask, torch.ones(3, keys, dtype=torch.bool)).to(where[0])
    position_BK = (index_K + 2).expand(3, -1).to(where[0]) if mask == "positions" else None
    pattern = BlockCausal(block, real_BK if mask in masks else None, position_BL=position_BK)
    for queries in (keys, 50):
        ours = ranked(query[:, :, :queries], key, value, pattern, 0.125)
        allowed_BQK = dense_mask(pattern, queries, keys, query.device)[:, 0].expand(3, -1, -1)
        expected = spelled_out(query[:, :, :queries], key, value, allowed_BQK, 0.125)
        assert ours.isfinite().all()
        read = real_BK[:, None, :queries, None]
        assert_close(ours * read, expected * read, where[1])


@pytest.mark.parametrize("block", [1, 4, 32, 1000])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_ranks_are_the_predicate_bit_for_bit(block, device):
    """On real tokens; padding may differ."""
    real_BK = (torch.rand(3, 90, generator=torch.Generator().manual_seed(0)) < 0.6).to(device)
    position_BK = torch.randint(0, 90, (3, 90), generator=torch.Generator().manual_seed(1)).to(device)
    for given in ({}, {"key_mask_BL": real_BK}, {"position_BL": position_BK}):
        pattern = BlockCausal(block, **given)
        ranks = ranks_of(pattern, 70, 90, real_BK.device)
        allowed_BQK = ranks.key_BK[:, None, :90] <= ranks.query_BQ[:, :, None]
        rows = torch.ones_like(real_BK) if "key_mask_BL" not in given else real_BK
        expected_BQK = dense_mask(pattern, 70, 90, real_BK.device)[:, 0].expand(3, -1, -1)
        assert torch.equal(allowed_BQK.expand(3, -1, -1)[rows[:, :70]], expected_BQK[rows[:, :70]])
        assert (ranks.key_BK[:, 90:] == HIDDEN).all()
        assert ranks_of(pattern, 70, 90, real_BK.device) is ranks


def seeing(visible_B1K):
    """Cached keys of which all queries of a row see the same."""
    hidden_BK = ~visible_B1K[:, 0]
    ranks_B1 = torch.zeros(len(hidden_BK), 1, dtype=torch.int32, device=hidden_BK.device)
    return CachedKeys((ranks_B1, HIDDEN * hidden_BK.int()), lambda *_: None)


@pytest.mark.parametrize("masked", [True, False])
def test_cached_keys(where, masked):
    query, key, value = tensors(where, 3, 4, 131, 2, 4, 128, room=9)
    visible_B1K = torch.rand(3, 1, 131, generator=torch.Generator().manual_seed(0)) < 0.5
    visible_B1K[1, :, 70:] = False
    visible_B1K[..., 0] = True
    visible_B1K = visible_B1K.to(where[0])
    pattern = seeing(visible_B1K) if masked else CachedKeys(None, lambda *_: None)
    allowed_BQK = (visible_B1K if masked else torch.ones_like(visible_B1K)).expand(-1, 4, -1)
    expected = spelled_out(query, key, value, allowed_BQK, 0.1)
    assert_close(ranked(query, key, value, pattern, 0.1), expected, where[1])


@pytest.mark.parametrize("tiling", [SMALL, SMALL._replace(part=2**20)], ids=["parts", "one part"])
def test_a_row_alone_is_bitwise_what_it_is_in_a_batch_with_longer_rows(where, tiling):
    samples, longest = 3, 300
    query, key, value = tensors(where, samples, 4, longest, 2, 4, 64)
    for row, length in enumerate((300, 37, 130)):
        key_BK = torch.zeros(samples, longest, dtype=torch.int32, device=where[0])
        key_BK[row, length:] = HIDDEN
        key_BK[row, 3] = HIDDEN
        query_BQ = torch.zeros(samples, 4, dtype=torch.int32, device=where[0])
        together = attend(query, key, value, tile_ranks(query_BQ, key_BK, tiling.keys), 0.2, tiling)
        one = slice(row, row + 1)
        ranks = tile_ranks(query_BQ[one], key_BK[one, :length], tiling.keys)
        alone = attend(query[one], key[one, :, :length], value[one, :, :length], ranks, 0.2, tiling)
        assert torch.equal(alone, together[one])


def test_keys_that_nobody_sees_are_not_read(where):
    """Whole tiles of them, before, between and behind."""
    query, key, value = tensors(where, 1, 40, 256, 1, 1, 64)
    key_BK = torch.arange(256, dtype=torch.int32, device=where[0])[None].clone()
    key_BK[:, :64] = HIDDEN
    query_BQ = torch.arange(64, 104, dtype=torch.int32, device=where[0])[None]
    allowed_BQK = key_BK[:, None] <= query_BQ[:, :, None]
    expected = spelled_out(query, key, value, allowed_BQK, 0.1)
    for hidden in (key, value):
        hidden[:, :, :64] = torch.nan
        hidden[:, :, 128:] = torch.nan
    assert_close(flash_attention(query, key, value, tile_ranks(query_BQ, key_BK), 0.1), expected, where[1])


@pytest.mark.gpu
def test_offsets_beyond_32_bits():
    samples, slots = 3, 2**20
    key = torch.zeros(samples, slots, 8, 128, dtype=torch.float16, device="cuda")
    key[2, slots - 300 :].normal_()
    query = torch.randn(4, samples, 32, 128, dtype=torch.float16, device="cuda").permute(1, 2, 0, 3)
    visible_B1K = torch.arange(slots, device="cuda").expand(samples, 1, -1) >= slots - 300
    key = key.transpose(1, 2)
    ours = ranked(query, key, key, seeing(visible_B1K), 0.1)
    last = key[:, :, slots - 300 :]
    expected = spelled_out(query, last, last, torch.ones(samples, 4, 300, dtype=torch.bool, device="cuda"), 0.1)
    assert_close(ours, expected, torch.float16)


@pytest.mark.gpu
@pytest.mark.nemo
@pytest.mark.parametrize("kind", ["block-causal", "cache"])
def test_generation_takes_it_and_can_be_recorded(kind):
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from nemo_dllm.collections.diffusion.attention.core import PatternAttention, eager, flex

    config = TransformerConfig(num_layers=1, hidden_size=512, num_attention_heads=8, num_query_groups=2)
    attention = PatternAttention(config, 1, AttnMaskType.no_mask, "self", patterned=flex).eval()
    where = ("cuda", torch.bfloat16)
    queries = 200 if kind == "block-causal" else 4
    query, key, value = (x.permute(2, 0, 1, 3) for x in tensors(where, 2, queries, 200, 2, 4, 64))
    visible_BK = torch.arange(200, device="cuda") < torch.tensor([[200], [150]], device="cuda")

    def pattern():
        if kind == "cache":
            return seeing(visible_BK[:, None])
        return BlockCausal(4, visible_BK)

    with torch.no_grad():
        made = pattern()
        ours = attention(query, key, value, made)
        assert [built[0].__name__ for built in made.built] == ["ranks_of"]
        attention.patterned = eager
        expected = attention(query, key, value, pattern())
        attention.patterned = flex
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recorded = attention(query, key, value, pattern())
        graph.replay()
    read = visible_BK.t()[:, :, None] if kind == "block-causal" else 1
    assert_close(ours * read, (expected * read).float(), torch.bfloat16)
    assert torch.equal(recorded, ours)


def test_a_prompt_that_is_encoded_behind_what_the_cache_holds(where):
    """A rank for each query."""
    queries, keys = 70, 131
    query, key, value = tensors(where, 2, queries, keys, 2, 2, 64, room=9)
    ranks_BL = (torch.arange(queries) // 4).int().expand(2, -1).to(where[0])
    key_ranks_BK = torch.full((2, keys), HIDDEN, dtype=torch.int32, device=where[0])
    key_ranks_BK[:, :40] = -(2**31)
    key_ranks_BK[0, 40:110] = ranks_BL[0]
    key_ranks_BK[1, 30:90] = ranks_BL[1, :60]
    allowed_BQK = key_ranks_BK[:, None] <= ranks_BL[:, :, None]
    expected = spelled_out(query, key, value, allowed_BQK, 0.1)
    pattern = CachedKeys((ranks_BL, key_ranks_BK), lambda *_: None)
    assert_close(ranked(query, key, value, pattern, 0.1), expected, where[1])


def test_what_has_no_ranks():
    """Documents are left to torch's kernels."""
    assert has_ranks(CachedKeys(None, lambda *_: None))
    assert has_ranks(BlockCausal(3)) and has_ranks(BlockCausal(3, position_BL=torch.zeros(1, 7, dtype=torch.int64)))
    assert not has_ranks(BlockCausal(3, document_BL=torch.zeros(1, 7, dtype=torch.int64)))
