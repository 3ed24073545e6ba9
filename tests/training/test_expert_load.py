import math

import pytest
import torch

pytestmark = pytest.mark.nemo

MASKED, VISIBLE, CLEAN = 3, 2, 1


@pytest.fixture(scope="module")
def load_metrics():
    from nemo_dllm.collections.diffusion.training.expert_load import load_metrics

    return load_metrics


def test_load_by_hand(load_metrics):
    load_NCE = torch.zeros(3, 4, 2)
    load_NCE[0, MASKED], load_NCE[2, MASKED] = torch.tensor([3.0, 1.0]), torch.tensor([4.0, 0.0])
    load_NCE[0, VISIBLE] = load_NCE[2, VISIBLE] = torch.tensor([5.0, 5.0])
    metrics = load_metrics(load_NCE, num_groups=1)
    # The middle layer is dense; no clean copy.
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(2)
    assert metrics == {
        "train/experts/layers_1-3/masked_max": pytest.approx((1.5 + 2) / 2),
        "train/experts/layers_1-3/masked_min": pytest.approx((0.5 + 0) / 2),
        "train/experts/layers_1-3/masked_entropy": pytest.approx(entropy / 2),
        "train/experts/layers_1-3/unmasked_max": pytest.approx(1),
        "train/experts/layers_1-3/unmasked_min": pytest.approx(1),
        "train/experts/layers_1-3/unmasked_entropy": pytest.approx(1),
    }


def test_layers_go_together_in_runs(load_metrics):
    load_NCE = torch.zeros(10, 4, 2)
    load_NCE[1:, CLEAN] = 1.0
    names = {name.split("/")[2] for name in load_metrics(load_NCE)}
    assert names == {"layers_2-4", "layers_5-6", "layers_7-8", "layers_9-10"}


def test_nothing_routed_no_metrics(load_metrics):
    assert load_metrics(torch.zeros(4, 4, 8)) == {}
