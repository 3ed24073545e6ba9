import json
from pathlib import Path

import pytest

from nemo_dllm.collections.diffusion.sampling import SCHEDULES, register_schedule, transfer_counts
from nemo_dllm.collections.diffusion.sampling.transfer import cosine_alpha, even_counts, linear_alpha

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/sampling/num_transfer_tokens.json").read_text())
ALPHAS = {"linear": linear_alpha, "cosine": cosine_alpha}


def test_golden_rows():
    assert len(GOLDEN["rows"]) == 468
    for row in GOLDEN["rows"]:
        assert transfer_counts(row["masked"], row["steps"], ALPHAS[row["schedule"]]) == row["transfer"], row


def test_golden_rows_tell_float32_from_float64():
    def in_float64(row):
        return transfer_counts(row["masked"], row["steps"], lambda t: ALPHAS[row["schedule"]](t.double()))

    assert [row for row in GOLDEN["rows"] if in_float64(row) != row["transfer"]]


def test_golden_batches():
    for batch in GOLDEN["batched"]:
        counts = [SCHEDULES[batch["schedule"]](masked, batch["steps"], 99) for masked in batch["masked"]]
        longest = max(map(len, counts))
        assert [row + [0] * (longest - len(row)) for row in counts] == batch["transfer"], batch


@pytest.mark.parametrize(
    "masked, steps, counts",
    [(0, 3, []), (7, 1, [7]), (7, 4, [2, 2, 2, 1]), (10, 3, [3, 3, 4]), (2, 5, [1, 1]), (6, 6, [1] * 6)],
)
def test_linear_counts_by_hand(masked, steps, counts):
    assert transfer_counts(masked, steps) == counts


def test_last_step_takes_what_an_open_ended_schedule_leaves():
    assert transfer_counts(80, 4, alpha=lambda t: 0.5 * (1 - t)) == [10, 10, 10, 50]


@pytest.mark.parametrize(
    "masked, steps, counts",
    # The LLaDA2 sampler's splits, recorded for a block of 4 and one of 32, and LLaDA's 10 in 4.
    [(4, 3, [2, 1, 1]), (4, 32, [1] * 4), (32, 5, [7, 7, 6, 6, 6]), (10, 4, [3, 3, 2, 2]), (5, 1, [5])],
)
def test_even_counts_by_hand(masked, steps, counts):
    assert even_counts(masked, steps) == counts
    assert SCHEDULES["even"](masked, steps, 99) == counts
    assert SCHEDULES["even_block"](99, steps, masked) == counts


def test_registered_schedule():
    try:
        register_schedule("all_at_once", lambda masked, steps, length: [masked])
        assert SCHEDULES["all_at_once"](7, 3, 9) == [7]
    finally:
        SCHEDULES.pop("all_at_once")
