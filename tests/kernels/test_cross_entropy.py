"""The head on a GPU, through its kernels, against the same head on the CPU."""

import pytest
import torch

from nemo_dllm.collections.diffusion.models.head import VocabularyShard, masked_cross_entropy

pytestmark = [pytest.mark.gpu, pytest.mark.nemo]


def run(device, dtype, rows=37, hidden=64, vocabulary=20_001, valid=20_001, chunk=16):
    generator = torch.Generator().manual_seed(0)
    hidden_NH = torch.randn(rows, hidden, generator=generator).to(dtype).to(device).requires_grad_()
    weight_VH = torch.randn(vocabulary, hidden, generator=generator).to(dtype).to(device).requires_grad_()
    targets_N = torch.randint(valid, (rows,), generator=generator).to(device)
    loss_weight_N = torch.rand(rows, generator=generator).to(device)
    shard = VocabularyShard(start=0, valid=valid, group=None)
    loss, nll_N = masked_cross_entropy(hidden_NH, weight_VH, targets_N, loss_weight_N, shard, chunk)
    (3.0 * loss).backward()
    return [tensor.detach().float().cpu() for tensor in (loss, nll_N, hidden_NH.grad, weight_VH.grad)]


@pytest.mark.parametrize(
    "shape", [{}, {"valid": 19_000}, {"rows": 1}, {"rows": 0}, {"vocabulary": 64, "valid": 61}], ids=str
)
def test_fp32(shape):
    for ours, expected in zip(run("cuda", torch.float32, **shape), run("cpu", torch.float32, **shape), strict=True):
        assert torch.isfinite(ours).all()
        if expected.numel():
            assert (ours - expected).abs().max() <= 1e-5 * expected.abs().max().clamp(min=1e-6)


def test_bf16():
    """Against fp32 on the same rounded inputs."""
    for ours, expected in zip(run("cuda", torch.bfloat16), run("cpu", torch.bfloat16), strict=True):
        assert (ours - expected).norm() <= 2e-2 * expected.norm()
