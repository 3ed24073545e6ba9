import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from nemo_dllm.collections.diffusion.objectives import BlockDiffusion, MaskedDiffusion, preset
from nemo_dllm.collections.diffusion.objectives.presets import PRESETS

FOLDER = Path(__file__).parents[1] / "golden" / "objective"
MASK = 7


@pytest.fixture
def batch():
    """Rows with 8, 4 and 1 maskable tokens, one third of the tokens masked, and arbitrary NLLs."""
    generator = torch.Generator().manual_seed(0)
    lengths_B1 = torch.tensor([[8], [4], [1]])
    return {
        "tokens_BL": torch.arange(24).view(3, 8) + 100,
        "loss_mask_BL": torch.arange(8) < lengths_B1,
        "sample_index_B": torch.arange(3),
        "time": torch.tensor([0.3, 0.6, 0.9]),
        "uniforms_BL": torch.rand(3, 8, generator=generator),
    }, torch.rand(3, 8, generator=generator)


def loss_of(name, batch, nll_BL):
    it = MaskedDiffusion(mask_token_id=MASK, **preset(name))
    corruption = it.corrupt(**batch)
    return it.reduce(nll_BL, corruption).mean.item()


def test_every_preset_names_all_settings_of_a_reference():
    run_or_checkpoint = {"mask_token_id", "right_shift", "group_size", "seed"}
    for name in PRESETS:
        objective = BlockDiffusion if "block_size" in preset(name) else MaskedDiffusion
        assert set(preset(name)) == {field.name for field in dataclasses.fields(objective)} - run_or_checkpoint
        objective(**preset(name))


def test_dllm_mdlm_reproduces_the_recorded_loss():
    case = next(it for it in json.loads((FOLDER / "index.json").read_text())["mdlm"] if it["file"].startswith("mdlm_m"))
    golden = load_file(FOLDER / case["file"])
    it = MaskedDiffusion(mask_token_id=case["mask_token_id"], **preset("dllm_mdlm"))
    tokens_BL = golden["input_ids"]
    noise = {"time": golden["t"], "uniforms_BL": golden["u"]}
    corruption = it.corrupt(tokens_BL, golden["labels"] != -100, torch.arange(len(tokens_BL)), **noise)
    nll_BL = cross_entropy(golden["logits"].transpose(1, 2), tokens_BL, reduction="none")
    expected = case["losses"]["linear.scheduler.token.noshift"]
    assert it.reduce(nll_BL, corruption).mean.item() == pytest.approx(expected, rel=1e-6)


def test_llada_is_the_mean_over_sequences_of_nll_over_t_and_length(batch):
    inputs, nll_BL = batch
    rows = []
    for t, u_L, mask_L, nll_L in zip(
        inputs["time"], inputs["uniforms_BL"], inputs["loss_mask_BL"], nll_BL, strict=True
    ):
        rows.append(sum(nll for u, nll in zip(u_L[mask_L], nll_L[mask_L], strict=True) if u < t) / t / mask_L.sum())
    assert loss_of("llada", inputs, nll_BL) == pytest.approx(sum(rows).item() / 3, rel=1e-6)


def test_mdlm_is_nll_over_t_per_token(batch):
    inputs, nll_BL = batch
    masked_BL = (inputs["uniforms_BL"] < inputs["time"][:, None]) & inputs["loss_mask_BL"]
    total = (nll_BL / inputs["time"][:, None])[masked_BL].sum()
    assert loss_of("mdlm", inputs, nll_BL) == pytest.approx(total.item() / 13, rel=1e-6)


def test_presets_draw_times_as_their_references():
    index = torch.arange(64)
    drawn = {
        name: MaskedDiffusion(group_size=64, **preset(name)).draw_times(index, torch.ones_like(index))[:, 0]
        for name in ("dllm_mdlm", "llada", "mdlm")
    }
    spacing = torch.diff(drawn["mdlm"].sort().values)
    torch.testing.assert_close(spacing, torch.full_like(spacing, 0.999 / 64), rtol=0, atol=1e-6)
    for name in ("dllm_mdlm", "llada"):
        assert torch.diff(drawn[name].sort().values).max() > 2 / 64


def test_a_preset_is_a_copy_and_unknown_names_are_listed():
    preset("llada")["loss_norm"] = "token"
    assert preset("llada")["loss_norm"] == "sequence"
    with pytest.raises(
        ValueError, match="preset='dream' is unknown; known: bd3lm, dllm_bd3lm, dllm_mdlm, fast_dllm_v2, "
    ):
        preset("dream")
