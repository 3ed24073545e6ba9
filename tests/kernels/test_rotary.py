"""The kernel against the same operation spelled out in torch, on the CPU in fp64-free fp32."""

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.nemo]

# S, B, G, R, D, T (None = no rotation), table per sample, norm
CASES = {
    "Qwen3 heads": (33, 2, 8, 2, 128, 128, False, True),
    "positions of each sample": (17, 3, 2, 2, 64, 64, True, True),
    "partial rotary": (9, 2, 4, 4, 128, 64, False, True),
    "no norm": (9, 2, 2, 1, 64, 64, False, False),
    "no rotation": (9, 2, 2, 3, 64, None, False, True),
    "head size off the powers of two": (9, 2, 3, 5, 48, 48, True, True),
}


def run(case, device, dtype=torch.float32):
    from nemo_dllm.collections.diffusion.attention.self_attention import rotary_table, split_norm_rotate

    sequence, batch, groups, repeats, head, rotary, per_sample, norm = case
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    qkv = draw(sequence, batch, groups * (repeats + 2) * head).to(dtype).to(device).requires_grad_()
    weights = [draw(head).to(dtype).to(device).requires_grad_() if norm else None for _ in range(2)]
    table = None
    if rotary is not None:
        table = rotary_table(3 * draw(sequence, batch if per_sample else 1, 1, rotary)).to(device)
    outputs = split_norm_rotate(
        qkv, *weights, table, num_groups=groups, head_size=head, eps=1e-6, interleaved=False
    )  # fmt: skip
    gradients = [draw(*output.shape).to(dtype).to(device) for output in outputs]
    inputs = [qkv, *(weight for weight in weights if weight is not None)]
    return [tensor.float().cpu() for tensor in (*outputs, *torch.autograd.grad(outputs, inputs, gradients))]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_kernel_equals_the_spelled_out_form(case):
    for ours, expected in zip(run(case, "cuda"), run(case, "cpu"), strict=True):
        assert (ours - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_bf16_is_rounded_once():
    case = CASES["Qwen3 heads"]
    for ours, expected in zip(run(case, "cuda", torch.bfloat16), run(case, "cpu", torch.bfloat16), strict=True):
        assert (ours - expected).norm() <= 4e-3 * expected.norm()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_without_gradients_values_are_a_view(case):
    from nemo_dllm.collections.diffusion.attention.self_attention import rotary_table, split_norm_rotate

    sequence, batch, groups, repeats, head, rotary, per_sample, norm = case
    qkv = torch.randn(sequence, batch, groups * (repeats + 2) * head, device="cuda")
    weights = [torch.randn(head, device="cuda") if norm else None for _ in range(2)]
    table = None
    if rotary is not None:
        table = rotary_table(torch.randn(sequence, batch if per_sample else 1, 1, rotary, device="cuda"))
    settings = {"num_groups": groups, "head_size": head, "eps": 1e-6, "interleaved": False}
    expected = split_norm_rotate(qkv, *weights, table, **settings)
    with torch.no_grad():
        ours = split_norm_rotate(qkv, *weights, table, **settings)
    assert all(torch.equal(one, other) for one, other in zip(ours, expected, strict=True))
    assert ours[2].data_ptr() == qkv.data_ptr() + (repeats + 1) * head * qkv.element_size()
