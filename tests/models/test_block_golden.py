"""Block diffusion losses of tiny published checkpoints, through model class, data step, masks and head.

The recorded logits are of the whole [noised row | clean row].
"""

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.nemo

GOLDEN = Path(__file__).parents[1] / "golden"
FILES = {
    case["file"].removesuffix(".safetensors").removeprefix("bd3lm_model_"): case
    for case in json.loads((GOLDEN / "objective" / "index.json").read_text())["bd3lm_model"]
}
TENSORS = {name: load_file(GOLDEN / "objective" / case["file"]) for name, case in FILES.items()}
LOSSES = list(itertools.product(["scheduler", "uniform"], ["token", "sequence", "batch"], [False, True]))
MASK = {"a2d_qwen3": 196, "sdar": 196, "llada2_moe": 197}


@pytest.fixture(scope="module")
def checkpoint(single_process):
    """Builds a BD3LMModel of a golden checkpoint, filled."""
    from nemo_dllm.collections.diffusion.models.bd3lm import BD3LMModel
    from nemo_dllm.collections.diffusion.objectives import BlockDiffusion
    from nemo_dllm.connectors.config import hf_to_nemo_config
    from nemo_dllm.connectors.load import load_hf_weights

    built = {}

    def build(name):
        if name not in built:
            model = BD3LMModel(hf_to_nemo_config(GOLDEN / "models" / name), BlockDiffusion(mask_token_id=MASK[name]))
            model.configure_model()
            load_hf_weights(model.module, GOLDEN / "models" / name)
            built[name] = model.eval()
        return built[name]

    return build


def batch_of(name, **changes):
    """The corrupted batch of a file, its noise given."""
    from functools import partial

    from nemo_dllm.collections.diffusion.models.batch import corrupt_batch
    from nemo_dllm.collections.diffusion.objectives import BlockDiffusion, preset

    case, golden = FILES[name], TENSORS[name]
    settings = preset("dllm_bd3lm") | {"schedule": case["schedule"], "block_size": case["block_size"]} | changes
    objective = BlockDiffusion(mask_token_id=MASK[case["model"]], **settings)
    objective.corrupt = partial(objective.corrupt, time=golden["t"], uniforms_BL=golden["u"])
    batch = {
        "tokens": golden["input_ids"],
        "loss_mask": golden["labels"] != -100,
        "sample_index": torch.arange(len(golden["t"])),
    }
    return corrupt_batch(batch, objective, validation=False)


def loss_of(model, batch):
    output = model.forward_step(batch)
    return output.loss_sum / batch.count


@pytest.mark.parametrize("name", FILES)
@torch.no_grad()
def test_reference_logits(checkpoint, name):
    """Of both halves, where asked for; else of the noised one."""
    golden, model = TENSORS[name], checkpoint(FILES[name]["model"])
    batch = batch_of(name)
    assert torch.equal(batch.input_ids, golden["concat_input_ids"])
    noised_BLV = model(batch.input_ids, attention_mask=batch.pattern)
    torch.testing.assert_close(noised_BLV, golden["logits"].chunk(2, dim=1)[0], rtol=0, atol=2e-5)
    both = batch_of(name, right_shift=True, block_start="clean_prefix")
    logits_BSV = model(batch.input_ids, attention_mask=both.pattern)
    torch.testing.assert_close(logits_BSV, golden["logits"], rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", FILES)
@torch.no_grad()
def test_reference_losses(checkpoint, name):
    model = checkpoint(FILES[name]["model"])
    for weight, norm, shift in LOSSES:
        batch = batch_of(name, loss_weight=weight, loss_norm=norm, right_shift=shift)
        side = "shift" if shift else "noshift"
        expected = TENSORS[name][f"loss.{weight}.{norm}.{side}"]
        torch.testing.assert_close(loss_of(model, batch), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "name, changes",
    [
        ("a2d_qwen3_len16_block4", {"block_size": 8}),
        ("a2d_qwen3_len14_block4", {"block_size": 2}),
        ("a2d_qwen3_len14_block1", {"block_size": 4}),
        ("a2d_qwen3_len16_block32", {"block_size": 8}),
        ("sdar_len16_block4", {"right_shift": True}),
        ("sdar_len14_block4", {"loss_norm": "sequence"}),
        ("llada2_moe_len16_block4", {"block_size": 16}),
        ("llada2_moe_len14_block32", {"loss_weight": "uniform"}),
    ],
)
@torch.no_grad()
def test_mutated_twin_fails(checkpoint, name, changes):
    """Far off: by 50 times the tolerance."""
    expected = TENSORS[name]["loss.scheduler.token.noshift"]
    actual = loss_of(checkpoint(FILES[name]["model"]), batch_of(name, **changes))
    assert (actual / expected - 1).abs() > 5e-4


@pytest.mark.parametrize("name", FILES)
@torch.no_grad()
def test_a_shifted_first_token_scored_from_the_clean_prefix(checkpoint, name):
    """From the recorded logits of the clean copy, at the position before the block."""
    golden, case = TENSORS[name], FILES[name]
    actual = loss_of(checkpoint(case["model"]), batch_of(name, right_shift=True, block_start="clean_prefix"))
    length = golden["input_ids"].shape[1]
    masked_BL = golden["concat_input_ids"][:, :length] != golden["input_ids"]
    total = 0.0
    for sample, position in masked_BL.nonzero().tolist():
        start = position % case["block_size"] == 0
        row = length + position - 1 if start else position - 1
        log_probability = golden["logits"][sample, row].log_softmax(-1)[golden["input_ids"][sample, position]]
        total -= log_probability / (golden["t"][sample] + 1e-6)
    torch.testing.assert_close(actual, total / (golden["labels"] != -100).sum(), rtol=1e-5, atol=0)
