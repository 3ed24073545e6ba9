"""A small model on a GPU: patterns through FlexAttention against a dense mask, loss and gradients.

Shape letters: B samples, L tokens of a sample.
"""

import pytest
import torch

from nemo_dllm.collections.diffusion.attention.layers import have_transformer_engine
from nemo_dllm.collections.diffusion.attention.masks import Bidirectional, BlockCausal, NoisyClean

pytestmark = [pytest.mark.gpu, pytest.mark.nemo]

L = 150
needs_transformer_engine = pytest.mark.skipif(not have_transformer_engine(), reason="needs Transformer Engine")
LAYERS = ["local", pytest.param("transformer_engine", marks=needs_transformer_engine)]
# Head sizes that every attention kernel takes.
FIELDS = {"hidden_size": 64, "kv_channels": 64, "seq_length": 2 * L}
RECOMPUTATION = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def batches():
    """Tokens of two samples with their pattern, by name."""
    index_L = torch.arange(L, device="cuda")
    key_mask_BL = index_L < torch.tensor([[L], [70]], device="cuda")
    document_BL = index_L // torch.tensor([[60], [47]], device="cuda")
    tokens = torch.randint(0, 190, (2, 2 * L), generator=torch.Generator().manual_seed(1)).cuda()
    return {
        "noisy and clean": (tokens, NoisyClean(32, L)),
        "noisy and clean, padded": (tokens, NoisyClean(32, L, key_mask_BL)),
        "noisy and clean, packed": (tokens, NoisyClean(8, L, document_BL=document_BL)),
        "block-causal": (tokens[:, :L], BlockCausal(32)),
        "bidirectional, packed": (tokens[:, :L], Bidirectional(key_mask_BL, document_BL)),
    }


def loss_and_gradients(model, tokens, pattern):
    from nemo_dllm.collections.diffusion.models.core import Targets

    targets = Targets(
        row_N=torch.arange(0, 2 * 70, 3, device="cuda"),
        token_N=torch.arange(0, 2 * 70, 3, device="cuda") % 190,
        loss_weight_N=torch.linspace(0.5, 2, 47, device="cuda"),
    )
    model.zero_grad(set_to_none=True)
    scored = model(tokens, attention_mask=pattern, targets=targets)
    scored.loss_sum.backward()
    return scored.loss_sum.item(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("transformer_impl", LAYERS)
@pytest.mark.parametrize("kind", ["dense", "mixture of experts"])
@pytest.mark.parametrize("recomputed", [False, True], ids=["", "recomputed"])
def test_auto_takes_flex_attention_and_equals_a_dense_mask(
    build_model, model_fields, transformer_impl, kind, recomputed
):
    fields = {**model_fields[kind], **FIELDS}
    exact = build_model(attention_backend="eager", transformer_impl=transformer_impl, **fields).cuda().train()
    fields |= RECOMPUTATION if recomputed else {}
    model = build_model(transformer_impl=transformer_impl, **fields).cuda().train()
    model.load_state_dict(exact.state_dict(), strict=False)
    for name, (tokens, pattern) in batches().items():
        expected_loss, expected = loss_and_gradients(exact, tokens, pattern)
        loss, gradients = loss_and_gradients(model, tokens, pattern)
        assert loss == pytest.approx(expected_loss, rel=1e-4), name
        for parameter, gradient in expected.items():
            error = (gradients[parameter] - gradient).norm() / gradient.norm()
            assert error < 2e-3, (name, parameter, error.item())


@torch.no_grad()
def test_bfloat16_without_gradients(build_model):
    exact = build_model(attention_backend="eager", **FIELDS).cuda().eval()
    model = build_model(**FIELDS, params_dtype=torch.bfloat16, bf16=True).cuda().bfloat16().eval()
    model.load_state_dict(exact.state_dict(), strict=False)
    for name, (tokens, pattern) in batches().items():
        # The first tokens of both samples are real in all of them.
        logits = model(tokens, attention_mask=pattern)[:, :70].float()
        expected = exact(tokens, attention_mask=pattern)[:, :70]
        error = (logits - expected).abs().mean() / expected.std()
        assert error < 2e-2, (name, error.item())
