"""The plain-torch checkpoints that the traces are sampled from give the recorded logits."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

MODELS = Path(__file__).parents[1] / "golden" / "models"


@pytest.mark.parametrize("name", ["a2d_qwen3", "llada", "sdar", "dream", "llada2_moe"])
def test_logits_are_the_recorded_ones(tiny_decoder, name):
    golden = load_file(MODELS / name / "golden.safetensors")
    model = tiny_decoder(name)
    torch.testing.assert_close(model(golden["input_ids"]), golden["logits"], rtol=0, atol=2e-5)
    if "padded_logits" in golden:
        real = golden["padded_attention_mask"].bool()
        padded = model(golden["padded_input_ids"], key_mask_BT=real)
        torch.testing.assert_close(padded[real], golden["padded_logits"][real], rtol=0, atol=2e-5)
    if "block_logits" in golden:
        blocks = tiny_decoder(name, block_size=4)
        torch.testing.assert_close(blocks(golden["input_ids"]), golden["block_logits"], rtol=0, atol=2e-5)
