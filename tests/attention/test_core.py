"""Core attention modules: the fused kernels against the spelled-out form, and both against a loop.

Shape letters: S positions, B samples, H query heads, G key/value heads, D head size.
"""

import math

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_dllm.collections.diffusion.attention.core import PatternAttention, eager, sdpa
from nemo_dllm.collections.diffusion.attention.flex import flex
from nemo_dllm.collections.diffusion.attention.masks import Bidirectional, BlockCausal, NoisyClean

S, B, H, D = 7, 3, 4, 8
BACKENDS = [sdpa, eager]
KEY_MASKS = {
    "no mask": None,
    "right padding": torch.tensor([[1] * 7, [1] * 4 + [0] * 3, [1] + [0] * 6]).bool(),
    "left padding": torch.tensor([[0] * 3 + [1] * 4, [1] * 7, [0] * 6 + [1]]).bool(),
}


def config_of(**fields):
    return TransformerConfig(
        **{"num_layers": 1, "hidden_size": H * D, "num_attention_heads": H, "attention_dropout": 0.0} | fields
    )


def attention_of(kernel, layer_number=1, softmax_scale=None, **fields):
    return PatternAttention(
        config_of(**fields),
        layer_number,
        AttnMaskType.no_mask,
        "self",
        softmax_scale=softmax_scale,
        bidirectional=kernel,
        patterned=kernel,
    )


def inputs(groups, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(S, B, heads, D, generator=generator).requires_grad_() for heads in (H, groups, groups)]


def forward_and_gradients(attention, tensors, key_mask):
    """The context, and its gradients for an upstream gradient that differs at every entry."""
    context_SBX = attention(*tensors, Bidirectional(key_mask))
    upstream = torch.randn(context_SBX.shape, generator=torch.Generator().manual_seed(1))
    return [context_SBX, *torch.autograd.grad(context_SBX, tensors, upstream)]


def attention_by_loops(query, key, value, key_mask, scale):
    """One sample, head and query at a time, in float64."""
    context_SBHD = torch.zeros(S, B, H, D, dtype=torch.float64)
    group_size = H // key.size(2)
    for b in range(B):
        keys = range(S) if key_mask is None else [j for j in range(S) if key_mask[b, j]]
        for h in range(H):
            g = h // group_size
            for i in range(S):
                scores = torch.stack([query[i, b, h].double() @ key[j, b, g].double() for j in keys]) * scale
                weights = scores.softmax(0)
                context_SBHD[i, b, h] = sum(w * value[j, b, g].double() for w, j in zip(weights, keys, strict=True))
    return context_SBHD.flatten(2)


@pytest.mark.parametrize("groups", [H, 2, 1], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("mask", KEY_MASKS)
def test_fused_kernels_equal_the_spelled_out_form_forward_and_backward(groups, mask):
    fused = forward_and_gradients(attention_of(sdpa), inputs(groups), KEY_MASKS[mask])
    spelled_out = forward_and_gradients(attention_of(eager), inputs(groups), KEY_MASKS[mask])
    for name, a, b in zip(("context", "query", "key", "value"), fused, spelled_out, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("groups", [H, 2], ids=["MHA", "GQA"])
@pytest.mark.parametrize("mask", KEY_MASKS)
def test_both_equal_a_loop_over_samples_heads_and_queries(backend, groups, mask):
    tensors = [x.detach() for x in inputs(groups)]
    context = attention_of(backend)(*tensors, Bidirectional(KEY_MASKS[mask]))
    expected = attention_by_loops(*tensors, KEY_MASKS[mask], scale=1 / math.sqrt(D))
    torch.testing.assert_close(context.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_another_mask_or_grouping_would_be_noticed(backend):
    """The mutated twin of the two tests above."""
    query, key, value = (x.detach() for x in inputs(2))
    context = attention_of(backend)(query, key, value, Bidirectional(KEY_MASKS["right padding"]))
    for wrong in (
        (query, key, value, None, 1 / math.sqrt(D)),
        (query, key, value, ~KEY_MASKS["right padding"] | KEY_MASKS["left padding"], 1 / math.sqrt(D)),
        (query, key.flip(2), value.flip(2), KEY_MASKS["right padding"], 1 / math.sqrt(D)),
        (query, key, value, KEY_MASKS["right padding"], 1 / D),
    ):
        assert (context.double() - attention_by_loops(*wrong)).abs().max() > 1e-2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mask_type", [AttnMaskType.causal, AttnMaskType.no_mask])
def test_the_last_position_reaches_the_first_whatever_mask_type_the_layer_names(backend, training, mask_type):
    attention = PatternAttention(config_of(), 1, mask_type, "self", bidirectional=backend).train(training)
    query, key, value = (x.detach() for x in inputs(2))
    before = attention(query, key, value, Bidirectional())
    value[-1] += 1
    after = attention(query, key, value, Bidirectional())
    assert ((after - before)[0].abs() > 1e-3).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_ones_mask_is_no_mask(backend):
    tensors = [x.detach() for x in inputs(2)]
    ones = torch.ones(B, S, dtype=torch.bool)
    attention = attention_of(backend)
    torch.testing.assert_close(
        attention(*tensors, Bidirectional(ones)), attention(*tensors, Bidirectional()), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_hidden_key_has_no_influence_at_all(backend):
    attention, key_mask = attention_of(backend), KEY_MASKS["right padding"]
    query, key, value = (x.detach() for x in inputs(2))
    before = attention(query, key, value, Bidirectional(key_mask))
    hidden_SB = ~key_mask.t()
    key[hidden_SB], value[hidden_SB] = 1e4, -1e4
    assert torch.equal(attention(query, key, value, Bidirectional(key_mask)), before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_of_pads_is_finite_forward_and_backward(backend):
    key_mask = torch.tensor([[1] * 7, [0] * 7, [0] * 6 + [1]])
    for tensor in forward_and_gradients(attention_of(backend), inputs(2), key_mask):
        assert tensor.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_scale_follows_the_configs(backend):
    query, key, value = (x.detach() for x in inputs(H))
    layer_scaled = attention_of(backend, layer_number=3, apply_query_key_layer_scaling=True)
    given = attention_of(backend, softmax_scale=0.5)
    # Megatron takes the layer's factor back inside the softmax.
    for attention, scale in ((layer_scaled, 1 / math.sqrt(D)), (given, 0.5)):
        expected = attention_by_loops(query, key, value, None, scale)
        torch.testing.assert_close(attention(query, key, value, Bidirectional()).double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_is_near_fp32_of_the_same_inputs(backend):
    tensors = [x.detach().bfloat16() for x in inputs(2)]
    attention = attention_of(backend)
    context = attention(*tensors, Bidirectional(KEY_MASKS["left padding"]))
    assert context.dtype == torch.bfloat16
    expected = attention(*(x.float() for x in tensors), Bidirectional(KEY_MASKS["left padding"]))
    torch.testing.assert_close(context.float(), expected, rtol=0, atol=2e-2)


DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 1, 2, 2, 2, 2, 2], [0] * 7])
PADDING = KEY_MASKS["left padding"]
# Inputs of seven positions; [x_t | x_0] of seven tokens has fourteen.
PATTERNS = {
    "causal": BlockCausal(1),
    "block-causal": BlockCausal(3),
    "block-causal, packed": BlockCausal(2, document_BL=DOCUMENTS),
    "block-causal, padded": BlockCausal(3, PADDING),
    "bidirectional, packed": Bidirectional(document_BL=DOCUMENTS),
    "noisy and clean": NoisyClean(3, S),
    "noisy and clean, packed and padded": NoisyClean(3, S, PADDING, DOCUMENTS),
}


def patterned_inputs(pattern, queries=None, groups=2):
    positions = 2 * S if isinstance(pattern, NoisyClean) else S
    generator = torch.Generator().manual_seed(0)
    shapes = ((queries or positions, B, H, D), (positions, B, groups, D), (positions, B, groups, D))
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def gradients_of(attention, tensors, pattern):
    context_QBX = attention(*tensors, pattern)
    upstream = torch.randn(context_QBX.shape, generator=torch.Generator().manual_seed(1))
    return [context_QBX, *torch.autograd.grad(context_QBX, tensors, upstream)]


def patterned_attention_by_loops(query, key, value, pattern):
    """One sample, head and query at a time, in float64; the predicate is asked about one pair at a time."""
    context_QBHD = torch.zeros(*query.shape, dtype=torch.float64)
    for b in range(B):
        for i in range(len(query)):
            keys = [j for j in range(len(key)) if pattern.allows(*map(torch.tensor, (b, i, j)))]
            for h in range(H):
                g = h // (H // key.size(2))
                scores = torch.stack([query[i, b, h].double() @ key[j, b, g].double() for j in keys]) / math.sqrt(D)
                weights = scores.softmax(0)
                context_QBHD[i, b, h] = sum(w * value[j, b, g].double() for w, j in zip(weights, keys, strict=True))
    return context_QBHD.flatten(2)


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("queries", [None, 4], ids=["all queries", "the first four"])
def test_every_pattern_by_loops_and_its_gradients_with_both_kernels(name, queries):
    tensors = patterned_inputs(PATTERNS[name], queries)
    fused, spelled_out = (gradients_of(attention_of(kernel), tensors, PATTERNS[name]) for kernel in BACKENDS)
    expected = patterned_attention_by_loops(*(x.detach() for x in tensors), PATTERNS[name])
    torch.testing.assert_close(fused[0].double(), expected, rtol=0, atol=1e-5)
    for a, b in zip(fused, spelled_out, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_another_pattern_would_be_noticed():
    """The mutated twin: the same tensors under each other pattern of that length."""
    for name, pattern in PATTERNS.items():
        tensors = [x.detach() for x in patterned_inputs(pattern)]
        context = attention_of(sdpa)(*tensors, pattern)
        for other_name, other in PATTERNS.items():
            if other_name != name and isinstance(other, NoisyClean) == isinstance(pattern, NoisyClean):
                assert (attention_of(sdpa)(*tensors, other) - context).abs().max() > 1e-2


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_training_takes_flex_attention_and_generation_a_dense_mask():
    """What a pattern keeps tells which mask was made of it. On a CPU FlexAttention refuses gradients."""
    attention = attention_of(flex)
    for make, training_only in ((lambda: NoisyClean(3, S, PADDING), True), (lambda: BlockCausal(3, PADDING), False)):
        tensors = patterned_inputs(make())
        with pytest.raises(NotImplementedError, match="CPU"):
            attention.train()(*tensors, make())
        tensors = [x.detach() for x in tensors]
        # The first pass of a layer that is recomputed has no gradients, and must be what the second is.
        for training in (True, False):
            pattern = make()
            with torch.no_grad():
                context = attention.train(training)(*tensors, pattern)
            taken = "block_mask" if training or training_only else "dense_mask"
            assert [key[0].__name__ for key in pattern.built] == [taken]
            torch.testing.assert_close(context, attention_of(sdpa)(*tensors, make()), rtol=0, atol=1e-5)


def test_the_kernel_of_patterns_is_not_that_of_bidirectional_attention():
    """A model may train MDLM with one kernel and block diffusion with another."""
    asked = []

    def named(name):
        return lambda query, key, value, pattern, scale, dropout: asked.append(name) or query

    attention = PatternAttention(
        config_of(), 1, AttnMaskType.no_mask, "self", bidirectional=named("fast"), patterned=named("general")
    )
    tensors = inputs(2)
    for pattern in (Bidirectional(), Bidirectional(PADDING), BlockCausal(9), Bidirectional(document_BL=DOCUMENTS)):
        attention(*tensors, pattern)
    assert asked == ["fast", "fast", "general", "general"]
