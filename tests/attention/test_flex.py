"""FlexAttention against the dense mask, forward on the CPU; compiled, and backward, in test_flex_cuda.py.

Shape letters: B samples, L tokens of a sample, Q query positions, K key positions.
"""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from nemo_dllm.collections.diffusion.attention import flex
from nemo_dllm.collections.diffusion.attention.masks import (
    Bidirectional,
    BlockCausal,
    NoisyClean,
    dense_mask,
    num_samples,
)

CPU = torch.device("cpu")
# Warns, rightly, that without compilation it is slow.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def patterns(length, block_size):
    """By name, a pattern and the positions of its input; three samples where they differ."""
    generator = torch.Generator().manual_seed(length)
    kept_B1 = torch.tensor([[length], [length // 2 + 1], [1]])
    index_L = torch.arange(length)
    documents = {"document_BL": (torch.rand(3, length, generator=generator) < 0.1).long().cumsum(1)}
    right = {"key_mask_BL": index_L < kept_B1}
    left = {"key_mask_BL": index_L >= length - kept_B1}
    return {
        "noisy and clean": (NoisyClean(block_size, length), 2 * length),
        "noisy and clean, padded": (NoisyClean(block_size, length, **right), 2 * length),
        "noisy and clean, packed": (NoisyClean(block_size, length, **documents), 2 * length),
        "noisy and clean, packed and padded": (NoisyClean(block_size, length, **documents, **right), 2 * length),
        "noisy and causal clean, padded": (NoisyClean(block_size, length, **right, clean_causal=True), 2 * length),
        "block-causal": (BlockCausal(block_size), length),
        "block-causal, padded": (BlockCausal(block_size, **left), length),
        "block-causal, packed": (BlockCausal(block_size, **documents), length),
        "causal": (BlockCausal(1), length),
        "bidirectional": (Bidirectional(), length),
        "bidirectional, packed": (Bidirectional(**documents), length),
    }


NAMES = list(patterns(8, 4))
# Lengths on and off the grid of blocks and of the kernel's tiles, most of them less than one tile.
SIZES = [(10, 4), (130, 32), (8, 4), (5, 1), (12, 12), (128, 8)]
CASES = [(name, *size) for size in SIZES[:2] for name in NAMES] + [
    ("noisy and clean, padded", *size) for size in SIZES[2:]
]


@pytest.mark.parametrize("name, length, block_size", CASES, ids=lambda value: str(value))
@torch.no_grad()
def test_it_equals_the_dense_mask(name, length, block_size):
    pattern, positions = patterns(length, block_size)[name]
    key, value = random(3, 2, positions, 16, seed=1), random(3, 2, positions, 16, seed=2)
    # All queries, and those of the noised half alone.
    for queries in {positions, length}:
        query = random(3, 4, queries, 16)
        context = flex.flex(query, key, value, pattern, 0.3, 0.0)
        mask = dense_mask(pattern, queries, positions, CPU)
        expected = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True)
        torch.testing.assert_close(context, expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_another_pattern_would_be_noticed():
    """The mutated twin: a neighbouring block size, no padding, one document."""
    key, value, query = random(3, 2, 260, 16, seed=1), random(3, 2, 260, 16, seed=2), random(3, 4, 260, 16)
    named = {name: pattern for name, (pattern, _) in patterns(130, 32).items()}
    for name, wrong in (
        ("noisy and clean", NoisyClean(33, 130)),
        ("noisy and clean, padded", NoisyClean(32, 130)),
        ("noisy and clean, packed", NoisyClean(32, 130)),
        (
            "noisy and clean, packed",
            Bidirectional(document_BL=named["noisy and clean, packed"].document_BL.repeat(1, 2)),
        ),
    ):
        context = flex.flex(query, key, value, named[name], 0.3, 0.0)
        assert (flex.flex(query, key, value, wrong, 0.3, 0.0) - context).abs().max() > 1e-2


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length, block_size", [(130, 32), (200, 8)], ids=lambda value: str(value))
@pytest.mark.parametrize("entries", [1, 2**24], ids=["row of tiles by row", "all at once"])
def test_the_tiles_are_those_of_a_dense_mask(monkeypatch, name, length, block_size, entries):
    """Torch's own way makes the whole mask first; counting it in parts must give the same lists."""
    monkeypatch.setattr(flex, "_ENTRIES", entries)
    pattern, positions = patterns(length, block_size)[name]
    mask = flex.block_mask.__wrapped__(pattern, length, positions, CPU)
    expected = create_block_mask(mask.mask_mod, num_samples(pattern), None, length, positions, device="cpu")
    assert mask.seq_lengths == (length, positions)
    for kind in ("kv", "full_kv", "q", "full_q"):
        counts, indices = getattr(mask, f"{kind}_num_blocks"), getattr(mask, f"{kind}_indices")
        assert torch.equal(counts, getattr(expected, f"{kind}_num_blocks"))
        listed = torch.arange(indices.size(-1)) < counts[..., None]
        assert torch.equal(indices[listed], getattr(expected, f"{kind}_indices")[listed])


def test_only_the_allowed_quarter_is_computed():
    """[x_t | x_0] of 16 tiles each: the diagonal of noised tiles, and two triangles of clean ones."""
    mask = flex.block_mask(NoisyClean(128, 2048), 4096, 4096, CPU)
    noisy_diagonal, before, up_to = 16, 16 * 15 // 2, 16 * 17 // 2
    assert mask.full_kv_num_blocks.sum() == noisy_diagonal + before + up_to
    assert mask.kv_num_blocks.sum() == 0
    # With smaller blocks, tiles on the three diagonals hold both allowed pairs and others.
    mask = flex.block_mask(NoisyClean(32, 2048), 4096, 4096, CPU)
    assert mask.full_kv_num_blocks.sum() == before * 2
    assert mask.kv_num_blocks.sum() == 3 * 16


def test_masks_are_shared_where_no_tensor_could_change_and_die_with_their_pattern_elsewhere():
    assert flex.block_mask(NoisyClean(4, 9), 18, 18, CPU) is flex.block_mask(NoisyClean(4, 9), 18, 18, CPU)
    pattern = NoisyClean(4, 9, key_mask_BL=torch.ones(2, 9, dtype=torch.bool))
    mask = flex.block_mask(pattern, 18, 18, CPU)
    assert flex.block_mask(pattern, 18, 18, CPU) is mask
    gone = weakref.ref(mask)
    gc.disable()
    try:
        del mask, pattern
        assert gone() is None
    finally:
        gc.enable()


def test_a_training_run_compiles_once_for_each_shape():
    """New padding and new documents are new data, not new code. This traces as on a GPU, without code generation."""
    compiled = []

    def count(graph, inputs):
        compiled.append(graph)
        return graph

    attend = torch.compile(flex_attention, backend=count, dynamic=False, fullgraph=True)
    torch._dynamo.reset()
    for step in range(3):
        key_mask_BL = random(2, 50, seed=step) > 0
        document_BL = (random(2, 50, seed=10 + step) > 1).long().cumsum(1)
        for pattern in (NoisyClean(4, 50), NoisyClean(4, 50, key_mask_BL, document_BL)):
            for queries in (100, 50):
                query, key, value = random(2, 4, queries, 16), random(2, 2, 100, 16), random(2, 2, 100, 16)
                mask = flex.block_mask(pattern, queries, 100, CPU)
                context = attend(query, key, value, block_mask=mask, enable_gqa=True)
                dense = dense_mask(pattern, queries, 100, CPU)
                expected = F.scaled_dot_product_attention(query, key, value, attn_mask=dense, enable_gqa=True)
                torch.testing.assert_close(context, expected, rtol=0, atol=1e-5)
    assert len(compiled) == 4


def test_dropout_is_refused():
    query = key = value = random(1, 1, 4, 16)
    with pytest.raises(ValueError, match=r"attention_dropout=0.1 is not supported by FlexAttention; set .*='sdpa'"):
        flex.flex(query, key, value, BlockCausal(2), 1.0, 0.1)
