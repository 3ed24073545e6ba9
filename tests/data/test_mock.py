import pytest
import torch

from nemo_dllm.collections.diffusion.data.mock import MockDataset


def test_sample_is_a_function_of_seed_and_index():
    short, long = MockDataset(50, 16, 4, seed=1), MockDataset(50, 16, 100, seed=1)
    for i in (3, 0, 2):
        assert torch.equal(short[i]["tokens"], long[i]["tokens"])
        assert not torch.equal(short[i]["tokens"], MockDataset(50, 16, 4, seed=2)[i]["tokens"])
    assert not torch.equal(short[0]["tokens"], short[1]["tokens"])


def test_form_and_range():
    sample = MockDataset(7, 10_000, 5, seed=0)[4]
    assert (sample["tokens"].dtype, sample["tokens"].shape) == (torch.int64, (10_000,))
    assert sample["tokens"].unique().tolist() == list(range(7))
    assert sample["loss_mask"].dtype == torch.bool and sample["loss_mask"].all()
    assert sample["sample_index"] == 4


@pytest.mark.parametrize("mask_token_id", [0, 3, 6])
def test_mask_token_never_occurs_and_the_others_are_uniform(mask_token_id):
    tokens = MockDataset(7, 60_000, 1, seed=0, mask_token_id=mask_token_id)[0]["tokens"]
    counts = torch.bincount(tokens, minlength=7)
    assert counts[mask_token_id] == 0
    # 10,000 expected, standard deviation 91
    assert (counts.sort().values[1:] - 10_000).abs().max() < 500


def test_errors():
    for mask_token_id in (-1, 7):
        with pytest.raises(ValueError, match=f"mask_token_id={mask_token_id} is outside the vocabulary of 7"):
            MockDataset(7, 4, 2, mask_token_id=mask_token_id)
    for index in (-1, 2):
        with pytest.raises(IndexError, match=f"sample {index} is outside the 2 samples"):
            MockDataset(7, 4, 2)[index]
