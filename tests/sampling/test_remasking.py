import math

import pytest
import torch

from nemo_dllm.collections.diffusion.sampling import (
    REMASKING_POLICIES,
    Predictions,
    SamplerConfig,
    generate,
    register_remasking,
)
from nemo_dllm.collections.diffusion.sampling.denoise import denoise


def predictions(probabilities, tokens):
    return Predictions(torch.tensor(tokens), torch.tensor(probabilities), lambda: torch.tensor([0.25, 0.75]))


def test_scores_by_hand():
    proposed = predictions([[0.5, 0.25, 0.25, 0.0], [0.0, 1.0, 0.0, 0.0]], [1, 1])
    scores = {name: policy(proposed).tolist() for name, policy in REMASKING_POLICIES.items()}
    assert scores["confidence"] == [0.25, 1.0]
    assert scores["margin"] == [0.25, 1.0]
    assert scores["entropy"] == pytest.approx([-1.5 * math.log(2), 0.0])
    assert scores["random"] == [0.25, 0.75]


def order_of_commits(model, length, **fields):
    config = SamplerConfig(max_new_tokens=length, **fields)
    canvas_BT = torch.zeros(1, length, dtype=torch.int64)
    steps = denoise(model, canvas_BT, torch.ones(1, length, dtype=torch.bool), model.mask_id, config)
    return [step.committed_BT[0].nonzero().flatten().tolist() for step in steps]


@pytest.mark.parametrize(
    "remasking, order",
    # Best and margin of position 0: 0.45, 0.01; 1: 0.40, 0.30 with a flat rest; 2: 0.42, 0.
    [("confidence", [[0], [2], [1]]), ("margin", [[1], [0], [2]]), ("entropy", [[2], [0], [1]])],
)
def test_policies_order_commits(table_model, remasking, order):
    model = table_model({0: {1: 0.45, 2: 0.44}, 1: {1: 0.40, 2: 0.10}, 2: {1: 0.42, 2: 0.42, 3: 0.16}})
    assert order_of_commits(model, 3, remasking=remasking) == order


def test_random_order_depends_on_the_seed_only(table_model):
    model = table_model({})
    orders = [order_of_commits(model, 12, remasking="random", seed=seed) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(sum(orders[0], [])) == list(range(12)) != sum(orders[0], [])


@pytest.mark.parametrize(
    "fields", [{}, {"temperature": 0.1, "top_p": 0.9, "seed": 0}, {"temperature": 0.1, "top_k": 1}]
)
def test_confidence_is_that_of_the_untempered_model(table_model, fields):
    model = table_model({**{i: {1: 0.6} for i in range(5)}, 5: {2: 0.99}})
    assert order_of_commits(model, 6, **fields)[0] == [5]


def test_equal_scores_go_to_the_lowest_position(table_model):
    model = table_model({i: {1: 0.7} for i in range(40)})
    assert order_of_commits(model, 40, steps=20) == [[2 * i, 2 * i + 1] for i in range(20)]


def test_registered_policy(table_model):
    try:

        @register_remasking("rightmost")
        def rightmost(proposed):
            return torch.arange(len(proposed.tokens_N)).float()

        model = table_model({})
        assert order_of_commits(model, 4, remasking="rightmost") == [[3], [2], [1], [0]]
        assert generate(model, [[1]], SamplerConfig(4, remasking="rightmost"), mask_token_id=9).steps == 4
    finally:
        REMASKING_POLICIES.pop("rightmost")


def test_a_policy_that_knows_no_order_is_named(table_model):
    try:

        @register_remasking("lost")
        def lost(proposed):
            return torch.full((len(proposed.tokens_N),), float("nan"))

        with pytest.raises(ValueError, match="remasking='lost' scored a prediction as NaN"):
            generate(table_model({}), [[1]], SamplerConfig(4, remasking="lost"), mask_token_id=9)
    finally:
        REMASKING_POLICIES.pop("lost")
