"""The core against Megatron's own GPT with its own self-attention and rotary embedding, weight for weight.

Only the core attention is ours on both sides: Megatron has no bidirectional one without Transformer Engine.
"""

import copy

import pytest
import torch
from torch.nn import functional as F

pytestmark = pytest.mark.nemo

VARIANTS = {
    "grouped queries": {},
    "as many keys as queries": {"num_query_groups": 4},
    "q/k norm": {"qk_layernorm": True},
    "half of each head rotated": {"rotary_percent": 0.5},
    "neighbours rotated": {"rotary_interleaved": True},
    "positions interpolated": {"seq_len_interpolation_factor": 4.0},
    "rotary base": {"rotary_base": 500},
    "biases": {"add_bias_linear": True, "add_qkv_bias": True},
    "layer norm": {"normalization": "LayerNorm"},
    "untied": {"share_embeddings_and_output_weights": False},
    "learned positions": {"position_embedding_type": "learned_absolute"},
    "no positions": {"position_embedding_type": "none"},
    "no rotation in the second layer": {"no_rope_freq": [0, 1]},
    "mixture of experts": {
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 24,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "allgather",
    },
}
RECOMPUTATIONS = {
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def random_weights(model):
    """Norms and biases start as ones and zeros, which hide mistakes."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def megatrons_own(model):
    """Megatron's GPT with the weights of a built diffusion model."""
    from megatron.core.transformer.attention import SelfAttention

    from nemo_dllm.collections.diffusion.attention.core import PatternAttention
    from nemo_dllm.collections.diffusion.attention.layers import diffusion_block_spec
    from nemo_dllm.collections.diffusion.attention.masks import Bidirectional

    class KeyMaskedAttention(PatternAttention):
        def forward(self, query, key, value, attention_mask, **unused):
            return super().forward(query, key, value, Bidirectional(attention_mask))

    def layers(config):
        block = diffusion_block_spec(config, transformer_impl="local")
        for layer in block.layer_specs:
            attention = layer.submodules.self_attention
            attention.module, attention.submodules.core_attention = SelfAttention, KeyMaskedAttention
            attention.params.pop("drop_clean", None)
        return block

    config = copy.deepcopy(model.config)
    config.transformer_layer_spec = layers
    reference = config.configure_model(tokenizer=None)
    reference.load_state_dict(model.module.state_dict())
    return reference


def logits_and_gradients(core, *inputs):
    logits_BSV = core(*inputs)
    core.zero_grad(set_to_none=True)
    F.cross_entropy(logits_BSV.flatten(0, 1), inputs[0].flatten()).backward()
    return logits_BSV.detach(), {name: parameter.grad for name, parameter in core.named_parameters()}


def assert_same(actual, expected):
    torch.testing.assert_close(actual[0], expected[0], rtol=0, atol=2e-5)
    for name, gradient in expected[1].items():
        # An expert that got no token has none.
        if gradient is not None:
            torch.testing.assert_close(
                actual[1][name], gradient, rtol=0, atol=2e-5 * gradient.abs().max().item(), msg=name
            )


TOKENS_BS = torch.randint(0, 190, (3, 12), generator=torch.Generator().manual_seed(0))
KEY_MASK_BS = torch.arange(12) < torch.tensor([[12], [7], [10]])


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("key_mask", [None, KEY_MASK_BS], ids=["no padding", "padding"])
def test_logits_and_gradients_are_megatrons(build_model, name, key_mask):
    model = random_weights(build_model(**VARIANTS[name]))
    reference = megatrons_own(model)
    actual = logits_and_gradients(model.module, TOKENS_BS, None, key_mask)
    expected = logits_and_gradients(reference, TOKENS_BS, torch.arange(12).expand(3, 12), key_mask)
    assert_same(actual, expected)


def test_another_variant_would_be_noticed(build_model):
    """The mutated twin: shapes agree, the model does not."""
    base = random_weights(build_model())
    expected, _ = logits_and_gradients(megatrons_own(base), TOKENS_BS, torch.arange(12).expand(3, 12), None)
    for name in ("half of each head rotated", "neighbours rotated", "positions interpolated", "rotary base"):
        other = build_model(**VARIANTS[name])
        other.module.load_state_dict(base.module.state_dict())
        with torch.no_grad():
            assert (other(TOKENS_BS) - expected).abs().max() > 1e-2, name


@pytest.mark.parametrize("name", RECOMPUTATIONS)
@pytest.mark.parametrize("variant", ["grouped queries", "q/k norm", "mixture of experts"])
def test_recomputation_changes_nothing(build_model, name, variant):
    plain = random_weights(build_model(**VARIANTS[variant])).train()
    recomputed = build_model(**VARIANTS[variant], **RECOMPUTATIONS[name]).train()
    recomputed.module.load_state_dict(plain.module.state_dict())
    inputs = (TOKENS_BS, torch.arange(12).flip(0).expand(3, 12), KEY_MASK_BS)
    assert_same(logits_and_gradients(recomputed.module, *inputs), logits_and_gradients(plain.module, *inputs))
