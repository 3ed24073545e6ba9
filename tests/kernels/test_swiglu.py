"""The kernel against the same operation spelled out in torch, and the MLP that uses it against Megatron's."""

import pytest
import torch
import torch.nn.functional as F

pytestmark = [pytest.mark.gpu, pytest.mark.nemo]


@pytest.mark.parametrize("features", [8, 1024, 3072 + 8])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
def test_the_kernel_equals_the_spelled_out_form(features, dtype, tolerance):
    from nemo_dllm.collections.diffusion.kernels.swiglu import swiglu

    generator = torch.Generator(device="cuda").manual_seed(0)
    inputs = torch.randn(5, 3, 2 * features, generator=generator, device="cuda").to(dtype).requires_grad_()
    gradient = torch.randn(5, 3, features, generator=generator, device="cuda").to(dtype)
    reference = inputs.detach().double().requires_grad_()
    gate, up = reference.chunk(2, dim=-1)
    expected = F.silu(gate) * up
    output = swiglu(inputs)
    output.backward(gradient)
    expected.backward(gradient.double())
    assert (output.double() - expected).norm() <= tolerance * expected.norm()
    assert (inputs.grad.double() - reference.grad).norm() <= tolerance * reference.grad.norm()
