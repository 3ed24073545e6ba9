"""Golden logits and one training loss on a GPU, with and without Transformer Engine."""

import pytest
import torch

from nemo_dllm.collections.diffusion.attention.layers import have_transformer_engine

pytestmark = [pytest.mark.gpu, pytest.mark.nemo]

NAMES = (
    *("qwen3", "qwen3_tied", "qwen3_sharded", "qwen2", "llama", "llama3_rope"),
    *("a2d_qwen3", "a2d_qwen2", "a2d_llama", "sdar", "dream", "llada", "llada_gqa"),
)
EXPERTS = ("qwen3_moe", "sdar_moe", "llada_moe", "llada_moe_dense_shared", "llada2_moe")
LAYERS = [
    ("local", "sdpa"),
    ("local", "eager"),
    pytest.param(
        "transformer_engine",
        "te",
        marks=pytest.mark.skipif(not have_transformer_engine(), reason="needs Transformer Engine"),
    ),
]
FP32, BF16 = 1e-4, 2e-2
# Where two experts are nearly as good, rounding chooses.
BF16_EXPERTS = 5e-2


@torch.no_grad()
def errors(build_core, models, name, transformer_impl, backend, dtype):
    """Largest difference to the golden logits in fp32; in bf16 the mean one over the logits' standard deviation."""
    from safetensors.torch import load_file

    from nemo_dllm.connectors.load import load_hf_weights

    fields = {"params_dtype": dtype, "bf16": dtype == torch.bfloat16, "pipeline_dtype": dtype}
    core = build_core(models / name, backend, transformer_impl=transformer_impl, **fields).cuda().to(dtype)
    load_hf_weights(core, models / name)
    tensors = {key: value.cuda() for key, value in load_file(models / name / "golden.safetensors").items()}
    suffix = "_bidirectional" if "logits_bidirectional" in tensors else ""
    real = tensors["padded_attention_mask"].bool()
    logits = {
        "logits": core(tensors["input_ids"]),
        "padded_logits": core(tensors["padded_input_ids"], None, real),
    }
    if "pos_position_ids" in tensors:
        logits["pos_logits"] = core(tensors["input_ids"], tensors["pos_position_ids"])
    found = {}
    for case, value in logits.items():
        expected = tensors[case + suffix]
        difference = (value.float() - expected).abs()
        if case == "padded_logits":
            difference, expected = difference[real], expected[real]
        found[case] = (difference.max() if dtype == torch.float32 else difference.mean() / expected.std()).item()
    print(f"{name} {transformer_impl} {backend} {dtype}: " + ", ".join(f"{k} {v:.2e}" for k, v in found.items()))
    return found


@pytest.mark.parametrize("transformer_impl, backend", LAYERS)
@pytest.mark.parametrize("name", NAMES + EXPERTS)
def test_fp32_logits(build_core, models, name, transformer_impl, backend):
    if backend == "te":
        pytest.skip("Transformer Engine's fused attention has no fp32 form")
    assert max(errors(build_core, models, name, transformer_impl, backend, torch.float32).values()) < FP32


@pytest.mark.parametrize("transformer_impl, backend", LAYERS)
@pytest.mark.parametrize("name", NAMES + EXPERTS)
def test_bf16_logits(build_core, models, name, transformer_impl, backend):
    found = errors(build_core, models, name, transformer_impl, backend, torch.bfloat16)
    assert max(found.values()) < (BF16_EXPERTS if name in EXPERTS else BF16)
