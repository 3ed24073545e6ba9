import json
import math
from itertools import islice
from pathlib import Path

import pytest
import torch

from nemo_dllm.collections.diffusion.sampling import linear_alpha, transfer_counts
from nemo_dllm.collections.diffusion.sampling.blocks import block_indices
from nemo_dllm.collections.diffusion.sampling.transfer import commit_quotas

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/sampling/num_transfer_tokens.json").read_text())
ALPHAS = {"linear": linear_alpha, "cosine": lambda t: 1 - torch.cos(math.pi / 2 * (1 - t))}


def test_golden_rows():
    assert len(GOLDEN["rows"]) == 468
    for row in GOLDEN["rows"]:
        assert transfer_counts(row["masked"], row["steps"], ALPHAS[row["schedule"]]) == row["transfer"], row


def test_golden_rows_tell_float32_from_float64():
    in_float64 = {"linear": lambda t: 1 - t.double(), "cosine": lambda t: 1 - torch.cos(math.pi / 2 * (1 - t.double()))}
    differing = [
        row
        for row in GOLDEN["rows"]
        if transfer_counts(row["masked"], row["steps"], in_float64[row["schedule"]]) != row["transfer"]
    ]
    assert differing


def test_golden_batches():
    for batch in GOLDEN["batched"]:
        masked_B = torch.tensor(batch["masked"])
        holes_BT = torch.arange(int(masked_B.max())) < masked_B[:, None]
        quotas = commit_quotas(holes_BT, block_indices(holes_BT, None), batch["steps"], ALPHAS[batch["schedule"]])
        assert torch.stack(list(quotas), dim=1).tolist() == batch["transfer"], batch


@pytest.mark.parametrize(
    "masked, steps, counts",
    [(0, 3, []), (7, 1, [7]), (7, 4, [2, 2, 2, 1]), (10, 3, [3, 3, 4]), (2, 5, [1, 1]), (6, 6, [1] * 6)],
)
def test_linear_counts_by_hand(masked, steps, counts):
    assert transfer_counts(masked, steps) == counts


def test_last_step_takes_what_an_open_ended_schedule_leaves():
    assert transfer_counts(80, 4, alpha=lambda t: 0.5 * (1 - t)) == [10, 10, 10, 50]


def test_blocks_share_the_steps_of_their_row_rounded_up():
    holes_BT = torch.tensor([[False] + [True] * 7, [True, True] + [False] * 6])
    blocks_BT = block_indices(holes_BT, 3)
    assert blocks_BT.tolist() == [[-1, 0, 0, 0, 1, 1, 1, 2], [0, 0, 0, 1, 1, 1, 2, 2]]
    quotas = commit_quotas(holes_BT, blocks_BT, 4, linear_alpha)
    # Row 0: ceil(4 / 3) = 2 steps for blocks of 3, 3 and 1 holes. Row 1: 4 steps for the 2 holes of its only block.
    assert torch.stack(list(quotas), dim=1).tolist() == [[2, 1, 2, 1, 1], [1, 1, 0, 0, 0]]


def test_without_steps_every_pass_commits_one_per_row():
    holes_BT = torch.ones(2, 5, dtype=torch.bool)
    quotas = commit_quotas(holes_BT, block_indices(holes_BT, None), None, linear_alpha)
    assert [quota_B.tolist() for quota_B in islice(quotas, 9)] == [[1, 1]] * 9
