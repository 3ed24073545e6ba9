"""Parity with the recorded losses of a public trainer, through the objects that recipes train with.

Every check is run a second time on a mutated objective or loss, where it must fail.
"""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from nemo_dllm.collections.diffusion.objectives import LossSum, MaskedDiffusion, get_schedule

FOLDER = Path(__file__).parents[1] / "golden" / "objective"
FILES = {
    case["file"].removesuffix(".safetensors"): case for case in json.loads((FOLDER / "index.json").read_text())["mdlm"]
}
TENSORS = {name: load_file(FOLDER / f"{name}.safetensors") for name in FILES}
CASES = list(
    itertools.product(FILES, ["linear", "cosine"], ["scheduler", "uniform"], ["token", "sequence", "batch"], [0, 1])
)
DEVICES = ["cpu"]
if torch.cuda.is_available():
    DEVICES.append(pytest.param("cuda", marks=pytest.mark.gpu))


def objective_of(name, schedule, weight, norm, shift):
    return MaskedDiffusion(
        mask_token_id=FILES[name]["mask_token_id"],
        schedule=schedule,
        time_sampling="iid",
        time_epsilon=FILES[name]["time_epsilon"],
        loss_weight=weight,
        weight_epsilon=1e-6,
        loss_norm=norm,
        right_shift=bool(shift),
    )


def batch_of(name, shift, device="cpu"):
    """The tensors of a case: those with a BOS column where the reference prepends one."""
    prefix = "bos." if shift and FILES[name]["bos_prepended_when_shifted"] else ""
    tensors = {key: TENSORS[name][prefix + key].to(device) for key in ("input_ids", "labels", "logits", "u")}
    return tensors | {"t": TENSORS[name]["t"].to(device), "prefix": prefix}


def token_nll(logits_BLV, tokens_BL, shift):
    logits_BLV = torch.cat([logits_BLV[:, :shift], logits_BLV[:, : logits_BLV.shape[1] - shift]], dim=1)
    return cross_entropy(logits_BLV.transpose(1, 2), tokens_BL, reduction="none")


def check_against_reference(name, schedule, weight, norm, shift, *, device="cpu", mutate=None, reduce=None):
    """Compare a case with its golden numbers; ``mutate`` and ``reduce`` change the objective and the reduction."""
    golden, batch = TENSORS[name], batch_of(name, shift, device)
    objective = objective_of(name, schedule, weight, norm, shift)
    if mutate is not None:
        objective = mutate(objective)
    tokens_BL = batch["input_ids"]
    corruption = objective.corrupt(
        tokens_BL,
        batch["labels"] != -100,
        torch.arange(len(tokens_BL)),
        time=batch["t"],
        uniforms_BL=batch["u"],
    )
    nll_BL = token_nll(batch["logits"], tokens_BL, objective.shift)
    loss = (reduce or MaskedDiffusion.reduce)(objective, nll_BL, corruption).mean

    masked = f"{batch['prefix']}{schedule}"
    side = "shift" if shift else "noshift"
    assert torch.equal(corruption.masked.cpu(), golden[f"{masked}.masked_mask"])
    assert torch.equal(corruption.tokens.cpu(), golden[f"{masked}.noised_input_ids"])
    expected = golden[f"loss.{schedule}.{weight}.{norm}.{side}"]
    torch.testing.assert_close(loss.cpu(), expected, rtol=1e-5, atol=0)
    assert FILES[name]["losses"][f"{schedule}.{weight}.{norm}.{side}"] == expected.item()
    if norm == "token":  # without the norm's scale, loss weights are the reference's weights
        weighted_BL = (nll_BL * corruption.loss_weight).cpu()
        torch.testing.assert_close(weighted_BL, golden[f"weighted_nll.{schedule}.{weight}.{side}"], rtol=1e-5, atol=0)
    nelbo_BL = (nll_BL * corruption.nll_weight).cpu()
    torch.testing.assert_close(nelbo_BL, golden[f"weighted_nll.{schedule}.scheduler.{side}"], rtol=1e-5, atol=0)


def other(value, *values):
    return next(candidate for candidate in values if candidate != value)


def divide_by_masked_tokens(objective, nll_BL, corruption):
    return LossSum(objective.reduce(nll_BL, corruption).sum, corruption.masked.sum())


def forget_the_loss_weight(objective, nll_BL, corruption):
    return objective.reduce(nll_BL, corruption._replace(loss_weight=corruption.masked.float() * 0.75))


MUTATIONS = {
    "other shift": {"mutate": lambda it: replace(it, right_shift=not it.right_shift)},
    "other schedule": {"mutate": lambda it: replace(it, schedule=other(it.schedule, "linear", "cosine"))},
    "other weight": {"mutate": lambda it: replace(it, loss_weight=other(it.loss_weight, "uniform", "scheduler"))},
    "other mask token": {"mutate": lambda it: replace(it, mask_token_id=it.mask_token_id - 1)},
    "masked tokens as denominator": {"reduce": divide_by_masked_tokens},
    "no loss weight": {"reduce": forget_the_loss_weight},
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "schedule", "weight", "norm", "shift"), CASES)
def test_reference_loss(name, schedule, weight, norm, shift, device):
    check_against_reference(name, schedule, weight, norm, shift, device=device)


@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize(("name", "schedule", "weight", "norm", "shift"), CASES)
def test_mutated_twin_fails(name, schedule, weight, norm, shift, mutation):
    with pytest.raises(AssertionError):
        check_against_reference(name, schedule, weight, norm, shift, **MUTATIONS[mutation])


@pytest.mark.parametrize(
    ("norm", "wrong"), [("token", "batch"), ("sequence", "batch"), ("batch", "token"), ("token", "sequence")]
)
@pytest.mark.parametrize("name", ["mdlm_mixed", "mdlm_bos", "mdlm_eps"])  # all rows of mdlm_pretrain are equally long
def test_mutated_norm_fails(name, norm, wrong):
    with pytest.raises(AssertionError):
        check_against_reference(name, "linear", "scheduler", norm, 0, mutate=lambda it: replace(it, loss_norm=wrong))


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("name", FILES)
def test_recorded_draws_follow_from_the_seed(name, shift):
    batch = batch_of(name, shift)
    generator = torch.Generator().manual_seed(FILES[name]["seed"])
    epsilon = FILES[name]["time_epsilon"]
    assert torch.equal(epsilon + (1 - epsilon) * torch.rand(len(batch["t"]), generator=generator), batch["t"])
    assert torch.equal(torch.rand(batch["u"].shape, generator=generator), batch["u"])


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("name", FILES)
def test_reference_mask_rate(name, schedule):
    rate_B = get_schedule(schedule).mask_rate(TENSORS[name]["t"])
    # The reference rounds twice near 1; no recorded uniform is within 1.9e-4 of its rate.
    torch.testing.assert_close(rate_B, TENSORS[name][f"{schedule}.p_mask"], rtol=0, atol=2e-7)


def test_a_missing_bos_changes_what_is_trained():
    # Without the BOS column, position 0 has no left neighbour: it is left out instead of scored by its own logits.
    batch = {key: TENSORS["mdlm_bos"][key] for key in ("input_ids", "labels", "t", "u")}
    objective = objective_of("mdlm_bos", "linear", "scheduler", "token", 1)
    corruption = objective.corrupt(
        batch["input_ids"], batch["labels"] != -100, torch.arange(4), time=torch.ones(4), uniforms_BL=batch["u"]
    )
    assert not corruption.maskable[:, 0].any()
    assert torch.equal(corruption.masked[:, 1:], batch["labels"][:, 1:] != -100)
    assert corruption.count == (batch["labels"][:, 1:] != -100).sum()
