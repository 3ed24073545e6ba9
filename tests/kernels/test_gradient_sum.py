"""Gradients added to buffers by their addresses."""

import pytest
import torch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("shape", [(3, 7, 5), (2, 64, 96), (1, 5000)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_each_buffer_gets_its_gradient(shape, dtype):
    from nemo_dllm.collections.diffusion.kernels.gradient_sum import add_to_buffers, addresses_of

    generator = torch.Generator("cuda").manual_seed(0)
    gradients = torch.randn(shape, generator=generator, device="cuda").to(dtype)
    # The buffers lie in another order, with a gap that must stay as it is.
    room = torch.randn(len(gradients), gradients[0].numel() + 8, generator=generator, device="cuda")
    before = room.clone()
    buffers = [room[len(gradients) - 1 - e, : gradients[0].numel()] for e in range(len(gradients))]
    add_to_buffers(gradients, addresses_of(buffers))
    expected = before.clone()
    expected[:, : gradients[0].numel()] += gradients.flip(0).float().flatten(1)
    assert torch.equal(room, expected)
