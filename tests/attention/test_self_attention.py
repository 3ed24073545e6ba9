"""Splitting, normalising and rotating queries and keys, on the CPU, against loops and against Megatron.

Shape letters: S positions, B samples, G key/value heads, R query heads of each, D head size, T rotary dimensions.
"""

import math

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_dllm.collections.diffusion.attention.self_attention import rotary_table, split_norm_rotate

S, B, G, R, D = 5, 2, 2, 3, 8
SETTINGS = {"num_groups": G, "head_size": D, "eps": 1e-6, "interleaved": False}


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def angles_of(rotary, samples=1, interleaved=False):
    """Megatron's angles [S, samples, 1, T]; the positions of each sample start elsewhere."""
    positions = torch.arange(S).float()[:, None] + 10 * torch.arange(samples)
    half = positions[:, :, None, None] * torch.tensor([100 ** (-2 * i / rotary) for i in range(rotary // 2)])
    return torch.stack((half, half), -1).flatten(-2) if interleaved else torch.cat((half, half), -1)


def test_the_projection_holds_each_groups_queries_then_its_key_and_value():
    qkv = torch.arange(G * (R + 2) * D).float().expand(S, B, -1)
    query, key, value = split_norm_rotate(qkv, None, None, None, **SETTINGS)
    heads = torch.arange(G * (R + 2) * D).float().view(-1, D)
    # Two groups of (query, query, query, key, value).
    assert torch.equal(query[0, 0], heads[[0, 1, 2, 5, 6, 7]])
    assert torch.equal(key[0, 0], heads[[3, 8]])
    assert torch.equal(value[0, 0], heads[[4, 9]])
    assert query.shape == (S, B, G * R, D)


def test_norms_are_of_each_head_and_leave_values_alone():
    qkv, q_weight, k_weight = random(S, B, G * (R + 2) * D), random(D, seed=1), random(D, seed=2)
    plain = split_norm_rotate(qkv, None, None, None, **SETTINGS)
    query, key, value = split_norm_rotate(qkv, q_weight, k_weight, None, **SETTINGS)
    for normed, raw, weight in ((query, plain[0], q_weight), (key, plain[1], k_weight)):
        expected = raw / (raw.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
        torch.testing.assert_close(normed, expected)
    assert torch.equal(value, plain[2])


def test_a_quarter_turn_by_hand():
    """Angle pi / 2 takes (x, y) to (-y, x): halves of the head, or neighbours."""
    qkv = torch.arange(1.0, 3 * 4 + 1).view(1, 1, 12)
    table = rotary_table(torch.full((1, 1, 1, 4), math.pi / 2))
    for interleaved, turned in ((False, [-3.0, -4, 1, 2]), (True, [-2.0, 1, -4, 3])):
        query, key, value = split_norm_rotate(
            qkv, None, None, table, num_groups=1, head_size=4, eps=0.0, interleaved=interleaved
        )
        torch.testing.assert_close(query[0, 0, 0], torch.tensor(turned))
        torch.testing.assert_close(key[0, 0, 0] - 4 * torch.tensor(turned).sign(), torch.tensor(turned))
        assert value.flatten().tolist() == [9, 10, 11, 12]


@pytest.mark.usefixtures("single_process")
@pytest.mark.parametrize("rotary", [D, D // 2], ids=["all dimensions", "half of them"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("samples", [1, B], ids=["shared positions", "positions of each sample"])
def test_rotation_is_megatrons(rotary, interleaved, samples):
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, rotary_interleaved=interleaved, apply_rope_fusion=False
    )
    qkv, angles = random(S, B, G * (R + 2) * D), angles_of(rotary, samples, interleaved)
    raw = split_norm_rotate(qkv, None, None, None, **SETTINGS)
    turned = split_norm_rotate(qkv, None, None, rotary_table(angles), **(SETTINGS | {"interleaved": interleaved}))
    for before, after in zip(raw[:2], turned[:2], strict=True):
        for sample in range(B):
            shared = angles[:, [sample if samples > 1 else 0]]
            expected = apply_rotary_pos_emb(before[:, [sample]], shared, config=config, cp_group=None)
            torch.testing.assert_close(after[:, [sample]], expected, rtol=0, atol=1e-6)
    assert torch.equal(turned[2], raw[2])
    # The mutated twin: the angles of the next position.
    other = split_norm_rotate(qkv, None, None, rotary_table(angles.roll(1, 0)), **SETTINGS)
    assert (other[0] - turned[0]).abs().max() > 0.1


def test_bfloat16_is_rounded_once_after_norm_and_rotation():
    qkv, weight = random(S, B, G * (R + 2) * D).bfloat16(), random(D, seed=1).bfloat16()
    table = rotary_table(angles_of(D))
    actual = split_norm_rotate(qkv, weight, weight, table, **SETTINGS)
    exact = split_norm_rotate(qkv.float(), weight.float(), weight.float(), table, **SETTINGS)
    for rounded, full in zip(actual, exact, strict=True):
        assert rounded.dtype == torch.bfloat16
        assert torch.equal(rounded, full.bfloat16())
