"""The plain-torch checkpoints that the traces are sampled from: their logits, and float32 as real models have it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nemo_dllm.collections.diffusion.sampling import SamplerConfig, generate

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


@pytest.mark.parametrize("name, mask, block", [("llada", 197, None), ("a2d_qwen3", 196, None), ("sdar", 196, 4)])
@pytest.mark.parametrize("remasking", ["confidence", "margin", "entropy"])
def test_an_empty_prompt_gives_the_same_in_any_batch(tiny_decoder, name, mask, block, remasking):
    """Its masks are all alike in the first pass: only rounding, which depends on the batch, tells them apart."""
    model, blocks = tiny_decoder(name), {"block_size": block, "cache": block and "exact"}
    config = SamplerConfig(12, remasking=remasking, **blocks)
    alone = generate(model, [[]], config, mask_token_id=mask).sequences[0].tolist()
    for length in (3, 6, 9, 14, 20):
        together = generate(model, [[], list(range(length)), [5]], config, mask_token_id=mask)
        assert together.sequences[0].tolist() == alone
