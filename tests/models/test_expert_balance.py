"""Biases of experts, and metrics of their load, in training."""

import pytest
import torch

pytestmark = pytest.mark.nemo

RATE, STEPS, EXPERTS = 0.02, 12, 4
ROWS = {
    "tokens": torch.randint(0, 199, (8, 24), generator=torch.Generator().manual_seed(0)),
    "loss_mask": torch.arange(24) < torch.tensor([24, 6, 13, 4, 20, 9, 24, 24])[:, None],
    "key_mask": torch.arange(24) < torch.tensor([24, 10, 18, 4, 20, 9, 24, 24])[:, None],
}
BIASED = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": RATE,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 1e-3,
}
# Ranks, rows per micro-batch, and fields of the strategy.
LAYOUTS = {
    "two ranks": (2, 2, {}),
    "two ranks of experts": (2, 4, {"expert_model_parallel_size": 2}),
    "tensor parallel": (2, 8, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "context parallel": (2, 8, {"context_parallel_size": 2}),
    "pipeline": (2, 2, {"pipeline_model_parallel_size": 2}),
}


@pytest.fixture(scope="module")
def run(run_job, model_fields):
    def run(ranks=1, micro_batch_size=8, layout=None, **fields):
        config = {**model_fields["mixture of experts"], "moe_token_dispatcher_type": "alltoall", **BIASED, **fields}
        arguments = {"layout": layout or {}, "micro_batch_size": micro_batch_size, "rows": ROWS, "config": config}
        folder = run_job("balance", ranks, script="expert_jobs.py", steps=STEPS, **arguments)
        return [torch.load(folder / f"kept{rank}") for rank in range(ranks)]

    return run


@pytest.fixture(scope="module")
def alone(run):
    return run()[0]


def test_biases_bring_experts_into_balance(alone):
    first, last = alone[0], alone[-1]
    start = torch.tensor([0.2, 0.1, -0.1, -0.2])
    # All tokens went to the first two experts.
    assert torch.allclose(first["biases"] - start, RATE * torch.tensor([-1.0, -1, 1, 1]))
    assert (last["biases"] - start).abs().max() <= STEPS * RATE + 1e-6
    # Without attention all masked tokens are alike, and go to the same experts.
    for layers in ("1-1", "2-2"):
        name = f"train/experts/layers_{layers}/unmasked"
        assert last["metrics"][f"{name}_max"] < first["metrics"][f"{name}_max"]
        assert last["metrics"][f"{name}_entropy"] > first["metrics"][f"{name}_entropy"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_moves_them_alike(run, alone, layout):
    ranks = run(*LAYOUTS[layout])
    if layout == "pipeline":
        together = [torch.cat([step["biases"] for step in steps]) for steps in zip(*ranks, strict=True)]
        ranks = [[{**ours, "biases": biases} for ours, biases in zip(rank, together, strict=True)] for rank in ranks]
    for rank in ranks:
        for step, expected in zip(rank, alone, strict=True):
            assert torch.equal(step["biases"], expected["biases"])
            assert step["metrics"].keys() == expected["metrics"].keys()
            for name, value in expected["metrics"].items():
                assert step["metrics"][name] == pytest.approx(value, rel=1e-4), name


def test_metrics(alone):
    names = {f"{kind}_{what}" for kind in ("masked", "unmasked") for what in ("max", "min", "entropy")}
    layers = {f"train/experts/layers_{n}-{n}/{name}" for n in (1, 2) for name in names}
    assert alone[0]["metrics"].keys() == layers | {"train/experts/seq_aux_loss"}
    # In perfect balance it is 1.
    assert 0.9 < alone[0]["metrics"]["train/experts/seq_aux_loss"] < 2
    for name, value in alone[0]["metrics"].items():
        low, high = (1, EXPERTS / 2) if name.endswith("max") else (0, 1.5)
        assert low <= value <= high, name


@pytest.fixture(scope="module")
def router_gradients(run_job, model_fields):
    """By layer, of losses of rows and tokens that count for much."""
    losses = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 10.0, "moe_z_loss_coeff": 1.0}
    config = {**model_fields["mixture of experts"], "moe_token_dispatcher_type": "alltoall", **losses}

    def run(ranks=1, micro_batch_size=8, layout=None):
        arguments = {"layout": layout or {}, "micro_batch_size": micro_batch_size, "rows": ROWS, "config": config}
        folder = run_job("router_gradients", ranks, script="expert_jobs.py", **arguments)
        return [torch.load(folder / f"gradients{rank}") for rank in range(ranks)]

    return run


def test_auxiliary_losses_have_one_gradient_in_every_layout(router_gradients):
    (expected,) = router_gradients()
    assert all(gradient.abs().max() > 1e-3 for gradient in expected.values())
    for name, layout in LAYOUTS.items():
        for rank in router_gradients(*layout):
            assert rank
            for layer, gradient in rank.items():
                difference = (gradient - expected[layer]).abs().max() / expected[layer].abs().max()
                assert difference < 1e-5, (name, layer)
