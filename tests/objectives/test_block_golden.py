"""Parity of block diffusion with the recorded losses of a public trainer, through the object that recipes train with.

The logits are given, for the whole [noised row | clean row]. Every check is run a second time on a mutated objective,
where it must fail.
"""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from nemo_dllm.collections.diffusion.attention.masks import NoisyClean, dense_mask, token_positions
from nemo_dllm.collections.diffusion.objectives import BlockDiffusion, preset

FOLDER = Path(__file__).parents[1] / "golden" / "objective"
FILES = {
    case["file"].removesuffix(".safetensors"): case for case in json.loads((FOLDER / "index.json").read_text())["bd3lm"]
}
TENSORS = {name: load_file(FOLDER / f"{name}.safetensors") for name in FILES}
DEVICES = ["cpu"]
if torch.cuda.is_available():
    DEVICES.append(pytest.param("cuda", marks=pytest.mark.gpu))
CASES = list(
    itertools.product(FILES, ["linear", "cosine"], ["scheduler", "uniform"], ["token", "sequence", "batch"], [0, 1])
)


def objective_of(name, schedule, weight, norm, shift, block_size=4):
    settings = preset("dllm_bd3lm") | {
        "schedule": schedule,
        "time_epsilon": FILES[name]["time_epsilon"],
        "loss_weight": weight,
        "loss_norm": norm,
        "block_size": block_size,
    }
    return BlockDiffusion(mask_token_id=FILES[name]["mask_token_id"], right_shift=bool(shift), **settings)


def prefix_of(name, shift):
    """Of the tensors of a case: those with a BOS column where the reference prepends one."""
    return "bos." if shift and FILES[name]["bos_prepended_when_shifted"] else ""


def check_against_reference(name, schedule, weight, norm, shift, block_size=4, mutate=lambda it: it, device="cpu"):
    golden, prefix = {key: value.to(device) for key, value in TENSORS[name].items()}, prefix_of(name, shift)
    objective = mutate(objective_of(name, schedule, weight, norm, shift, block_size))
    tokens_BL, labels_BL, logits_BSV = (golden[prefix + key] for key in ("input_ids", "labels", "logits"))
    corruption = objective.corrupt(
        tokens_BL,
        labels_BL != -100,
        torch.arange(len(tokens_BL)),
        time=golden["t"],
        uniforms_BL=golden[prefix + "u"],
    )
    masked = f"{prefix}{schedule}"
    assert torch.equal(corruption.masked, golden[f"{masked}.masked_mask"])
    assert torch.equal(torch.cat([corruption.tokens, tokens_BL], dim=1), golden[f"{masked}.concat_input_ids"])

    scored = objective.score(tokens_BL, corruption)
    nll_N = cross_entropy(logits_BSV[scored.row, scored.position], scored.token, reduction="none")
    side = "shift" if shift else "noshift"
    expected = golden[f"loss.{schedule}.{weight}.{norm}.{side}"]
    actual = (nll_N * scored.loss_weight).sum() / corruption.count.clamp(min=1)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=0)
    assert FILES[name]["losses"][f"{schedule}.{weight}.{norm}.{side}"] == expected.item()
    bound_BL = torch.zeros(tokens_BL.shape, device=device)
    bound_BL[corruption.masked] = nll_N * scored.nll_weight
    torch.testing.assert_close(bound_BL, golden[f"weighted_nll.{schedule}.scheduler.{side}"], rtol=1e-5, atol=0)


def other(value, *values):
    return next(candidate for candidate in values if candidate != value)


MUTATIONS = {
    "other shift": lambda it: replace(it, right_shift=not it.right_shift),
    "other schedule": lambda it: replace(it, schedule=other(it.schedule, "linear", "cosine")),
    "other weight": lambda it: replace(it, loss_weight=other(it.loss_weight, "uniform", "scheduler")),
    "other mask token": lambda it: replace(it, mask_token_id=it.mask_token_id - 1),
    "a next-token loss": lambda it: replace(it, ar_loss_weight=0.5),
    "complementary masks": lambda it: replace(it, complementary=True),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "schedule", "weight", "norm", "shift"), CASES)
def test_reference_loss(name, schedule, weight, norm, shift, device):
    """For given logits the loss does not depend on the block size."""
    for block_size in FILES[name]["blocks"]:
        check_against_reference(name, schedule, weight, norm, shift, block_size, device=device)


@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize(("name", "schedule", "weight", "norm", "shift"), CASES)
def test_mutated_twin_fails(name, schedule, weight, norm, shift, mutation):
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        check_against_reference(name, schedule, weight, norm, shift, mutate=MUTATIONS[mutation])


@pytest.mark.parametrize(
    ("norm", "wrong"), [("token", "batch"), ("sequence", "batch"), ("batch", "token"), ("token", "sequence")]
)
@pytest.mark.parametrize("name", ["bd3lm_len24", "bd3lm_len21"])
def test_mutated_norm_fails(name, norm, wrong):
    with pytest.raises(AssertionError):
        check_against_reference(name, "linear", "scheduler", norm, 0, mutate=lambda it: replace(it, loss_norm=wrong))


@pytest.mark.parametrize("name", FILES)
def test_a_clean_prefix_scores_the_first_token_of_a_block_elsewhere(name):
    """The default of a shifted model differs from the reference, whose samplers do not read what it trained."""
    with pytest.raises(AssertionError):
        check_against_reference(
            name, "linear", "scheduler", "token", 1, mutate=lambda it: replace(it, block_start="clean_prefix")
        )


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("name", FILES)
def test_reference_layout(name, shift):
    """Positions and the mask of [noised row | clean row]."""
    golden, prefix = TENSORS[name], prefix_of(name, shift)
    position_BS = golden[f"{prefix}position_ids"]
    length = position_BS.shape[1] // 2
    cpu = torch.device("cpu")
    for block_size in FILES[name]["blocks"]:
        pattern = NoisyClean(block_size, length)
        assert torch.equal(token_positions(pattern, cpu).expand_as(position_BS), position_BS)
        expected = golden[f"{prefix}attention_mask_4d.block{block_size}"]
        assert torch.equal(dense_mask(pattern, 2 * length, 2 * length, cpu), expected)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("name", FILES)
def test_recorded_draws_follow_from_the_seed(name, shift):
    golden, epsilon = TENSORS[name], FILES[name]["time_epsilon"]
    uniforms_BL = golden[prefix_of(name, shift) + "u"]
    generator = torch.Generator().manual_seed(FILES[name]["seed"])
    assert torch.equal(epsilon + (1 - epsilon) * torch.rand(len(uniforms_BL), generator=generator), golden["t"])
    assert torch.equal(torch.rand(uniforms_BL.shape, generator=generator), uniforms_BL)
