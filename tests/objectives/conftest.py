import pytest
import torch

from nemo_dllm.collections.diffusion.objectives import MaskedDiffusion

MASK = 7


@pytest.fixture
def objective():
    """Builds an objective with mask token 7 and groups of 16 samples, but for the settings given."""
    return lambda **settings: MaskedDiffusion(**({"mask_token_id": MASK, "group_size": 16} | settings))


@pytest.fixture
def text():
    """Builds int64 tokens [rows, length] without the mask id, and a bool loss mask that is true everywhere."""

    def build(rows, length, first_id=100):
        tokens_BL = first_id + torch.arange(rows * length).view(rows, length)
        return tokens_BL, torch.ones(rows, length, dtype=torch.bool)

    return build
