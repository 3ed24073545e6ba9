import pytest
import torch

from nemo_dllm.collections.diffusion.sampling import SamplerConfig
from nemo_dllm.collections.diffusion.sampling.noise import RowNoise
from nemo_dllm.collections.diffusion.sampling.token_choice import (
    check_token_ids,
    choose_tokens,
    keep_top_k,
    keep_top_p,
    restrict_logits,
)

NINF = -torch.inf


def draw(logits_NV, seed=0, **fields):
    noise = RowNoise(seed, [0], logits_NV.device)
    one_row = torch.ones(1, len(logits_NV), dtype=torch.bool)
    return choose_tokens(logits_NV, SamplerConfig(**fields), lambda vocabulary: noise.uniform(one_row, vocabulary))


def restrict(logits_NV, mask_id, ordinals=None, **fields):
    ordinals_N = torch.tensor(ordinals or [0] * len(logits_NV))
    return restrict_logits(logits_NV, ordinals_N, mask_id, SamplerConfig(**fields))


def chi_square(tokens_N, probabilities_V):
    expected_V = probabilities_V.double() * len(tokens_N)
    counts_V = torch.bincount(tokens_N, minlength=len(probabilities_V)).double()
    return ((counts_V - expected_V) ** 2 / expected_V).sum().item()


def test_top_k_by_hand():
    logits_NV = torch.tensor([[1.0, 3.0, 2.0, NINF], [0.0, 0.0, -1.0, 5.0]])
    assert keep_top_k(logits_NV, 2).tolist() == [[NINF, 3.0, 2.0, NINF], [0.0, 0.0, NINF, 5.0]]
    assert torch.equal(keep_top_k(logits_NV, 99), logits_NV)


@pytest.mark.parametrize(
    "top_p, kept", [(0.4, [1]), (0.51, [1, 2]), (0.79, [1, 2]), (0.81, [1, 2, 3]), (1.0, [0, 1, 2, 3])]
)
def test_top_p_by_hand(top_p, kept):
    logits_NV = torch.tensor([[0.05, 0.5, 0.3, 0.15]], dtype=torch.float64).log()
    filtered_NV = keep_top_p(logits_NV, top_p)
    assert filtered_NV.isfinite().nonzero()[:, 1].tolist() == kept
    assert torch.equal(filtered_NV[:, kept], logits_NV[:, kept])


def test_forbidden_tokens_and_input_left_alone():
    logits_NV = torch.zeros(2, 5, dtype=torch.bfloat16)
    allowed_NV = restrict(logits_NV, 4, suppress_token_ids=(0, 1))
    assert allowed_NV.dtype == torch.float32
    assert allowed_NV[1].tolist() == [NINF, NINF, 0, 0, NINF]
    assert logits_NV.isfinite().all()


@pytest.mark.parametrize(
    "mask_id, fields, message",
    [
        (5, {}, "mask_token_id: 5 is outside the model's vocabulary of 5; choose an id from 0 to 4"),
        (-1, {}, "mask_token_id: -1 is outside"),
        (4, {"suppress_token_ids": (1, 7)}, "suppress_token_ids: 7 is outside the model's vocabulary of 5"),
        (4, {"begin_suppress_token_ids": (9,)}, "begin_suppress_token_ids: 9 is outside"),
        (4, {"stop_token_ids": (8,)}, "stop_token_ids: 8 is outside"),
        (4, {"eos_token_id": 6}, "eos_token_id: 6 is outside"),
        (
            4,
            {"suppress_token_ids": (0, 1, 2), "begin_suppress_token_ids": (3,)},
            "are the whole vocabulary of 5; leave",
        ),
    ],
)
def test_ids_outside_the_vocabulary(mask_id, fields, message):
    with pytest.raises(ValueError, match=message):
        check_token_ids(SamplerConfig(**fields), mask_id, 5)


def test_first_tokens_have_rules_of_their_own():
    fields = {"begin_suppress_token_ids": (1,), "eos_token_id": 0, "stop_token_ids": (2,), "min_new_tokens": 2}
    allowed_NV = restrict(torch.zeros(3, 5), 4, ordinals=[0, 1, 2], eos_penalty=1.5, **fields)
    assert allowed_NV.tolist() == [[NINF, NINF, NINF, 0, NINF], [NINF, 0, NINF, 0, NINF], [-1.5, 0, 0, 0, NINF]]


def test_temperature_zero_takes_the_lowest_id_among_equals():
    assert draw(torch.tensor([[1.0, 4.0, 4.0], [2.0, 2.0, 2.0]])).tolist() == [1, 0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_tempered_distribution(temperature):
    logits_V = torch.tensor([0.3, -1.2, 1.1, 0.0, 2.0])
    tokens_N = draw(logits_V.expand(100_000, 5), temperature=temperature)
    # 23.5 is the chi-square value with 4 degrees of freedom that chance exceeds once in 10,000.
    assert chi_square(tokens_N, (logits_V / temperature).softmax(0)) < 23.5
    assert chi_square(tokens_N, (logits_V / (1.05 * temperature)).softmax(0)) > 23.5


def test_draws_under_top_k_and_top_p_renormalise():
    probabilities_V = torch.tensor([0.4, 0.1, 0.3, 0.15, 0.05])
    logits_NV = probabilities_V.log().expand(100_000, 5)
    for fields in ({"top_k": 3}, {"top_p": 0.8}):
        tokens_N = draw(logits_NV, temperature=1.0, **fields)
        counts = torch.bincount(tokens_N, minlength=5)
        assert counts[1] == counts[4] == 0
        kept = torch.tensor([0, 2, 3])
        expected = probabilities_V[kept].double() / 0.85 * 100_000
        assert ((counts[kept] - expected) ** 2 / expected).sum() < 18.4  # 2 degrees of freedom, 1 in 10,000


def test_top_p_follows_temperature():
    logits_NV = torch.tensor([0.5, 0.3, 0.2]).log().expand(2000, 3)
    assert set(draw(logits_NV, temperature=1.0, top_p=0.6).tolist()) == {0, 1}
    assert set(draw(logits_NV, temperature=0.2, top_p=0.6).tolist()) == {0}


def test_large_bfloat16_logits():
    generator = torch.Generator().manual_seed(1)
    logits_NV = (300 * torch.rand(200, 1000, generator=generator) - 150).bfloat16()
    logits_NV[torch.arange(200), torch.arange(200)] = 152.0
    allowed_NV = restrict(logits_NV, 999)
    assert torch.equal(draw(allowed_NV, temperature=1e-3), torch.arange(200))
    hot_N = draw(allowed_NV, temperature=1.0)
    assert (logits_NV[torch.arange(200), hot_N] > 120).all()
    assert (hot_N != 999).all()
