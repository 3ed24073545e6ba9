"""Block diffusion by hand: where times change, which logits score a token, and what the settings refuse."""

import dataclasses

import pytest
import torch

from nemo_dllm.collections.diffusion.objectives import BlockDiffusion, MaskedDiffusion

MASK = 7
# Two documents of five and three tokens.
DOCUMENT_BL = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1]])


@pytest.fixture
def block():
    """Builds an objective with mask token 7, blocks of 2 and groups of 16 samples, but for the settings given."""
    return lambda **settings: BlockDiffusion(**({"mask_token_id": MASK, "block_size": 2, "group_size": 16} | settings))


def all_masked(objective, tokens_BL, mask_BL, **given):
    index_B = torch.arange(len(tokens_BL))
    return objective.corrupt(tokens_BL, mask_BL, index_B, time=torch.ones(len(tokens_BL)), **given)


def runs(row_L):
    """Lengths of the runs of equal values."""
    return torch.unique_consecutive(row_L, return_counts=True)[1].tolist()


@pytest.mark.parametrize("sampling", ["antithetic_per_block", "iid_per_block"])
def test_a_time_for_each_block_and_a_short_last_one(block, text, sampling):
    tokens_BL, mask_BL = text(3, 7)
    time_BL = block(time_sampling=sampling).corrupt(tokens_BL, mask_BL, torch.arange(3)).time
    assert [runs(row) for row in time_BL] == 3 * [[2, 2, 2, 1]]


@pytest.mark.parametrize("sampling", ["antithetic", "iid", "per_sequence"])
def test_one_time_for_all_blocks(block, text, sampling):
    time_BL = block(time_sampling=sampling).corrupt(*text(3, 7), torch.arange(3)).time
    assert [runs(row) for row in time_BL] == 3 * [[7]]


@pytest.mark.parametrize(
    "sampling, expected",
    [("antithetic_per_block", [2, 2, 1, 2, 1]), ("iid_per_block", [2, 2, 1, 2, 1]), ("iid", [5, 3])],
)
def test_documents_of_a_row_have_their_own_blocks_and_times(block, text, sampling, expected):
    tokens_BL, mask_BL = text(1, 8)
    noised = block(time_sampling=sampling).corrupt(tokens_BL, mask_BL, torch.tensor([3]), document_BL=DOCUMENT_BL)
    assert runs(noised.time[0]) == expected
    assert noised.position.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]


@pytest.mark.parametrize("per_block, per_sequence", [("antithetic_per_block", "antithetic"), ("iid_per_block", "iid")])
@pytest.mark.parametrize("block_size", [6, 100])
def test_one_block_is_masked_diffusion(block, objective, text, per_block, per_sequence, block_size):
    batch = (*text(5, 6), torch.arange(5))
    for validation in (False, True):
        blocks = block(block_size=block_size, time_sampling=per_block).corrupt(*batch, validation=validation)
        whole = objective(time_sampling=per_sequence).corrupt(*batch, validation=validation)
        assert all(torch.equal(a, b) for a, b in zip(blocks, whole, strict=True))


def test_noise_does_not_depend_on_the_batch(block, text):
    tokens_BL, mask_BL = text(40, 9)
    index_B = torch.arange(40)
    for it in (block(), block(complementary=True), block(time_sampling="iid_per_block")):
        together = it.corrupt(tokens_BL, mask_BL, index_B).masked.view(it.views, 40, 9)
        parts = [it.corrupt(tokens_BL[part], mask_BL[part], part).masked for part in index_B.split(7)]
        apart = torch.cat([part.view(it.views, -1, 9) for part in parts], dim=1)
        assert torch.equal(apart, together)


def test_validation_noise_is_fixed_whatever_training_draws(block, text):
    batch = (*text(8, 9), torch.arange(8))
    first = block().corrupt(*batch, validation=True)
    for settings in ({"time_sampling": "iid"}, {"group_size": None}, {"time_range": (0.4, 0.5)}):
        again = block(**settings).corrupt(*batch, validation=True)
        assert torch.equal(again.masked, first.masked)
        assert torch.equal(again.nll_weight, first.nll_weight)
    assert not torch.equal(block().corrupt(*batch).masked, first.masked)


def test_times_that_are_given(block, text):
    tokens_BL, mask_BL = text(1, 4)
    time_BL = torch.tensor([[0.25, 0.25, 0.5, 0.5]])
    uniforms_BL = torch.tensor([[0.3, 0.2, 0.3, 0.6]])
    noised = block().corrupt(tokens_BL, mask_BL, torch.tensor([0]), time=time_BL, uniforms_BL=uniforms_BL)
    assert noised.masked.tolist() == [[False, True, True, False]]
    assert noised.loss_weight.tolist() == [[0.0, 4.0, 2.0, 0.0]]


def test_logits_of_the_same_position_by_default(block, text):
    tokens_BL, mask_BL = text(1, 5)
    it = block()
    scored = it.score(tokens_BL, all_masked(it, tokens_BL, mask_BL))
    assert scored.position.tolist() == [0, 1, 2, 3, 4]
    assert scored.token.tolist() == tokens_BL[0].tolist()
    assert not it.scores_clean


def test_a_shifted_block_starts_from_the_clean_prefix_or_from_the_noised_row(block, text):
    """Length 5, blocks of 2: tokens 2 and 4 start a block; logits from 5 on are those of the clean copy."""
    tokens_BL, mask_BL = text(1, 5)
    for start, expected in (("clean_prefix", [0, 5 + 1, 2, 5 + 3]), ("reference", [0, 1, 2, 3])):
        it = block(right_shift=True, block_start=start)
        scored = it.score(tokens_BL, all_masked(it, tokens_BL, mask_BL))
        assert scored.token.tolist() == tokens_BL[0, 1:].tolist()
        assert scored.position.tolist() == expected
        assert it.scores_clean == (start == "clean_prefix")
        assert not it.causal_clean


def test_the_first_token_of_each_document_has_no_left_neighbour(block, text):
    tokens_BL, mask_BL = text(1, 8)
    it = block(right_shift=True)
    noised = all_masked(it, tokens_BL, mask_BL, document_BL=DOCUMENT_BL)
    assert noised.masked.int().tolist() == [[0, 1, 1, 1, 1, 0, 1, 1]]
    # Blocks of 2 start at 2 and 4 of the first document and at 2 of the second, position 7 of the row.
    assert it.score(tokens_BL, noised).position.tolist() == [0, 8 + 1, 2, 8 + 3, 5, 8 + 6]


def test_the_next_token_loss_reads_the_clean_copy(block, text):
    tokens_BL, mask_BL = text(1, 8)
    mask_BL[0, 2] = False
    it = block(ar_loss_weight=0.5)
    assert it.causal_clean
    assert it.scores_clean
    noised = it.corrupt(
        tokens_BL, mask_BL, torch.tensor([0]), document_BL=DOCUMENT_BL, time=torch.tensor([0.5]),
        uniforms_BL=torch.tensor([[0.1] + [0.9] * 7]),
    )  # fmt: skip
    scored = it.score(tokens_BL, noised)
    # One masked token of weight 2; then tokens 1, 3, 4 and 6, 7 from their left neighbours in the same document.
    assert scored.position.tolist() == [0] + [8 + i for i in (0, 2, 3, 5, 6)]
    assert scored.token.tolist() == tokens_BL[0, [0, 1, 3, 4, 6, 7]].tolist()
    assert scored.loss_weight.tolist() == [2.0] + 5 * [0.5]
    assert scored.nll_weight.tolist() == [2.0] + 5 * [0.0]
    assert scored.time.tolist() == [0.5] + 5 * [0.0]
    assert noised.count == 7


def test_the_next_token_loss_follows_the_norm_and_is_taken_once_of_a_pair(block, text):
    tokens_BL, mask_BL = text(2, 4)
    mask_BL[1, 2:] = False
    it = block(ar_loss_weight=1.0, loss_norm="sequence", complementary=True)
    scored = it.score(tokens_BL, all_masked(it, tokens_BL, mask_BL))
    clean = scored.time == 0
    assert scored.row[clean].tolist() == [0, 0, 0, 1]
    assert scored.loss_weight[clean].tolist() == [0.25, 0.25, 0.25, 0.5]


def test_settings_survive_a_round_trip_as_plain_values(block):
    it = block(time_range=(0.3, 0.8), complementary=True, block_start="reference", ar_loss_weight=0.1)
    assert BlockDiffusion(**dataclasses.asdict(it)) == it
    assert (it.block_size, MaskedDiffusion().block_size) == (2, None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 0}, "block_size=0 must be at least 1; 4 and 32 are usual"),
        ({"block_size": None}, "block_size=None must be a whole number"),
        ({"block_size": "4"}, "block_size='4' must be a whole number"),
        ({"block_size": 4.5}, "block_size=4.5 must be a whole number"),
        ({"block_size": True}, "block_size=True must be a whole number"),
        ({"ar_loss_weight": None}, "ar_loss_weight=None must be a number"),
        ({"ar_loss_weight": float("inf")}, "ar_loss_weight=inf must not be negative; .* infinity none"),
        ({"block_start": "noisy"}, "block_start='noisy' is unknown; known: clean_prefix, reference"),
        ({"ar_loss_weight": -0.5}, "ar_loss_weight=-0.5 must not be negative; 0 is no next-token loss"),
        ({"time_sampling": "sobol"}, "known: antithetic, antithetic_per_block, iid, iid_per_block, per_sequence"),
        ({"time_range": (0.8, 0.3)}, r"time_range=\(0.8, 0.3\) must be \(low, high\) with 0 < low < high <= 1"),
        ({"time_range": (0.0, 0.5)}, r"time_range=\(0.0, 0.5\) must be"),
        ({"schedule": "quadratic"}, "schedule='quadratic' is unknown"),
    ],
)
def test_errors_of_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        BlockDiffusion(**settings)


def test_masked_diffusion_has_no_times_per_block():
    with pytest.raises(ValueError, match="time_sampling='iid_per_block' is unknown; known: antithetic, iid, per_seq"):
        MaskedDiffusion(time_sampling="iid_per_block")


def test_stratified_blocks_need_the_group(block, text):
    with pytest.raises(ValueError, match="time_sampling='antithetic_per_block' needs group_size"):
        block(group_size=None).corrupt(*text(2, 4), torch.arange(2))
