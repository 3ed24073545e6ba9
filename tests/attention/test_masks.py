"""Patterns of attention, torch only. Every boolean mask says True = may attend.

Shape letters: B samples, L tokens of a sample, Q queries, K keys.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nemo_dllm.collections.diffusion.attention.masks import (
    Bidirectional,
    BlockCausal,
    NoisyClean,
    bidirectional_mask,
    dense_mask,
    document_positions,
    sees_all_real_tokens,
    visible_keys,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "attention"
INDEX = json.loads((GOLDEN / "index.json").read_text())
TRAIN_MASKS = load_file(GOLDEN / "bd3lm_train_mask.safetensors")
SAMPLER_MASKS = load_file(GOLDEN / "bd3lm_sampler_mask.safetensors")
PADDED_BL = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 1, 1]])
CPU = torch.device("cpu")


def bits(pattern, length, keys=None):
    """The mask of sample 0 (or of all, where they are alike) as rows of zeros and ones."""
    return dense_mask(pattern, length, keys or length, CPU)[:, 0].int()


def rows(text):
    return torch.tensor([[int(bit) for bit in row] for row in text.split()], dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32, torch.uint8])
def test_every_mask_of_zeros_and_ones_means_the_same(dtype):
    visible_BL = visible_keys(PADDED_BL.to(dtype))
    assert visible_BL.dtype == torch.bool
    assert visible_BL.tolist() == [[True, True, False], [False, True, True], [True, True, True]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "pattern_of",
    [
        visible_keys,
        Bidirectional,
        lambda mask: BlockCausal(2, key_mask_BL=mask),
        lambda mask: NoisyClean(2, 3, key_mask_BL=mask),
    ],
    ids=["normalised", "bidirectional", "block-causal", "noisy and clean"],
)
def test_float_masks_are_refused(dtype, pattern_of):
    """0/1 and 0/-inf are both in use, and mean the opposite at 0."""
    with pytest.raises(ValueError, match=r"key_mask has dtype torch\.\w+, where 0/1 and 0/-inf .* pass a bool mask"):
        pattern_of(PADDED_BL.to(dtype))


def test_a_row_of_pads_sees_all_its_positions_and_only_that_row_does():
    key_mask_BL = torch.tensor([[0, 0, 0], [0, 1, 0]])
    assert visible_keys(key_mask_BL).tolist() == [[True, True, True], [False, True, False]]


def test_normalising_twice_changes_nothing_and_the_callers_mask_stays():
    key_mask_BL = torch.tensor([[0, 0, 0], [0, 1, 1]])
    once_BL = visible_keys(key_mask_BL)
    assert torch.equal(visible_keys(once_BL), once_BL)
    assert key_mask_BL.tolist() == [[0, 0, 0], [0, 1, 1]]


def test_the_attention_mask_hides_keys_not_queries():
    mask_B11K = bidirectional_mask(PADDED_BL.bool())
    assert mask_B11K.shape == (3, 1, 1, 3)
    assert torch.equal(mask_B11K[:, 0, 0], PADDED_BL.bool())


@pytest.mark.parametrize("case", INDEX["train_mask"], ids=lambda case: f"L{case['L']} block{case['block_size']}")
def test_the_training_mask_is_the_references_bit_by_bit(case):
    length, block_size = case["L"], case["block_size"]
    golden_QK = TRAIN_MASKS[f"mask.L{length}.block{block_size}"]
    assert torch.equal(dense_mask(NoisyClean(block_size, length), 2 * length, 2 * length, CPU)[0, 0], golden_QK)
    # Its clean half is the block-causal mask, and the last layer's queries are its first rows.
    clean_QK = golden_QK[length:, length:]
    assert torch.equal(dense_mask(BlockCausal(block_size), length, length, CPU)[0, 0], clean_QK)
    assert torch.equal(dense_mask(NoisyClean(block_size, length), length, 2 * length, CPU)[0, 0], golden_QK[:length])


@pytest.mark.parametrize("case", INDEX["sampler_mask"], ids=lambda case: f"case{case['case']}")
def test_the_mask_of_left_padded_sampling_is_the_references_bit_by_bit(case):
    name = f"case{case['case']}"
    real_BT = SAMPLER_MASKS[f"{name}.x"] != case["pad_token_id"]
    golden_BQK = SAMPLER_MASKS[f"{name}.attention_mask"][:, 0]
    mask_BQK = dense_mask(BlockCausal(case["block_size"], real_BT), case["T"], case["T"], CPU)[:, 0]
    assert torch.equal(mask_BQK[real_BT], golden_BQK[real_BT])
    # There a pad attends to nothing, and what it computes is undefined; here every row has a key.
    assert not golden_BQK[~real_BT].any()
    assert mask_BQK.any(-1).all()
    assert torch.equal(mask_BQK.any(1), torch.ones_like(real_BT))


def test_three_parts_by_hand():
    """Four tokens, blocks of two: noised rows see their block and earlier clean ones, clean rows are block-causal."""
    expected = rows("11000000 11000000 00111100 00111100 00001100 00001100 00001111 00001111")
    assert torch.equal(bits(NoisyClean(2, 4), 8)[0], expected)


def test_a_block_of_one_is_causal_and_a_block_of_all_is_bidirectional():
    assert torch.equal(bits(BlockCausal(1), 9)[0], torch.ones(9, 9).tril().int())
    for block_size in (9, 10, 1000):
        assert torch.equal(bits(BlockCausal(block_size), 9), bits(Bidirectional(), 9))
        noisy, clean = bits(NoisyClean(block_size, 9), 18)[0].split(9)
        assert noisy[:, :9].all() and not noisy[:, 9:].any()
        assert clean[:, 9:].all() and not clean[:, :9].any()


def test_blocks_are_counted_from_the_start_of_each_document():
    document_BL = torch.tensor([[4, 4, 4, 7, 7, 7, 7]])
    assert document_positions(document_BL).tolist() == [[0, 1, 2, 0, 1, 2, 3]]
    expected = rows("1100000 1100000 1110000 0001100 0001100 0001111 0001111")
    assert torch.equal(bits(BlockCausal(2, document_BL=document_BL), 7)[0], expected)
    # Positions that count otherwise, here from 1, move the blocks.
    position_BL = document_positions(document_BL) + 1
    moved = bits(BlockCausal(2, document_BL=document_BL, position_BL=position_BL), 7)[0]
    assert torch.equal(moved, rows("1000000 1110000 1110000 0001000 0001110 0001110 0001111"))


def test_neighbouring_documents_with_one_token_each():
    document_BL = torch.tensor([[0, 1, 2], [5, 5, 0]])
    assert document_positions(document_BL).tolist() == [[0, 0, 0], [0, 1, 0]]
    assert torch.equal(
        bits(Bidirectional(document_BL=document_BL), 3), torch.stack([rows("100 010 001"), rows("110 110 001")])
    )


@pytest.mark.parametrize("lengths", [(3, 4), (5, 1, 6), (8, 2)])
@pytest.mark.parametrize("block_size", [1, 3, 4, 100])
def test_packed_documents_have_the_masks_that_they_have_alone(lengths, block_size):
    total = sum(lengths)
    document_BL = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    for alone_of, packed, halves in (
        (lambda n: Bidirectional(), Bidirectional(document_BL=document_BL), 1),
        (lambda n: BlockCausal(block_size), BlockCausal(block_size, document_BL=document_BL), 1),
        (lambda n: NoisyClean(block_size, n), NoisyClean(block_size, total, document_BL=document_BL), 2),
    ):
        expected = torch.zeros(halves, total, halves, total, dtype=torch.int32)
        start = 0
        for n in lengths:
            place = slice(start, start + n)
            expected[:, place, :, place] = bits(alone_of(n), halves * n)[0].view(halves, n, halves, n)
            start += n
        assert torch.equal(bits(packed, halves * total)[0], expected.view(halves * total, -1))


def test_padding_is_that_of_each_sample():
    """And a pad, which no real token sees, sees itself, so that no row is empty."""
    key_mask_BL = torch.tensor([[1, 1, 1, 0], [0, 0, 1, 1]])
    assert torch.equal(
        bits(BlockCausal(2, key_mask_BL), 4),
        torch.stack([rows("1100 1100 1110 1111"), rows("1000 0100 0011 0011")]),
    )
    noisy_clean = bits(NoisyClean(2, 4, key_mask_BL), 8)
    plain = bits(NoisyClean(2, 4), 8)
    twice_BK = key_mask_BL.repeat(1, 2).int()
    expected = (plain * twice_BK[:, None]) | torch.eye(8, dtype=torch.int32)
    assert torch.equal(noisy_clean, expected)


@pytest.mark.parametrize("block_size", [0, -4])
def test_a_block_without_tokens_is_refused(block_size):
    for pattern_of in (BlockCausal, lambda size: NoisyClean(size, 8)):
        with pytest.raises(ValueError, match=rf"block_size={block_size} is no number of tokens; choose 1 or more"):
            pattern_of(block_size)


def test_only_one_kind_of_pattern_is_a_key_mask():
    assert sees_all_real_tokens(Bidirectional())
    assert sees_all_real_tokens(Bidirectional(PADDED_BL))
    assert not sees_all_real_tokens(Bidirectional(document_BL=PADDED_BL))
    assert not sees_all_real_tokens(BlockCausal(100))


def test_masks_are_built_once_for_all_layers_and_shared_only_where_no_tensor_could_change():
    first = dense_mask(NoisyClean(2, 4), 8, 8, CPU)
    assert dense_mask(NoisyClean(2, 4), 8, 8, CPU) is first
    assert dense_mask(NoisyClean(4, 4), 8, 8, CPU) is not first
    key_mask_BL = PADDED_BL.clone().bool()
    padded = BlockCausal(2, key_mask_BL)
    before = dense_mask(padded, 3, 3, CPU)
    assert dense_mask(padded, 3, 3, CPU) is before
    key_mask_BL[1] = True
    after = dense_mask(BlockCausal(2, key_mask_BL), 3, 3, CPU)
    assert after[1].sum() > before[1].sum()


def test_a_causal_clean_half_by_hand():
    """Two blocks of two tokens: the noised half stays as it is, a clean token sees no later one of its block."""
    expected = rows(
        """
        11000000
        11000000
        00111100
        00111100
        00001000
        00001100
        00001110
        00001111
        """
    )
    assert torch.equal(bits(NoisyClean(2, 4, clean_causal=True), 8)[0], expected)


def test_masks_of_a_validation_serve_training():
    pattern = NoisyClean(3, 7)
    with torch.inference_mode():
        mask = dense_mask(pattern, 14, 14, torch.device("cpu"))
    assert not mask.is_inference()
    assert dense_mask(pattern, 14, 14, torch.device("cpu")) is mask
