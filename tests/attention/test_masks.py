"""Key masks, torch only. Every boolean mask says True = may attend."""

import pytest
import torch

from nemo_dllm.collections.diffusion.attention.masks import bidirectional_mask, visible_keys

PADDED_BL = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 1, 1]])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32, torch.uint8])
def test_every_mask_of_zeros_and_ones_means_the_same(dtype):
    visible_BL = visible_keys(PADDED_BL.to(dtype))
    assert visible_BL.dtype == torch.bool
    assert visible_BL.tolist() == [[True, True, False], [False, True, True], [True, True, True]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_float_masks_are_refused(dtype):
    """0/1 and 0/-inf are both in use, and mean the opposite at 0."""
    with pytest.raises(ValueError, match=r"key_mask has dtype torch\.\w+, where 0/1 and 0/-inf .* pass a bool mask"):
        visible_keys(PADDED_BL.to(dtype))


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
