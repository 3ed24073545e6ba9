"""FLOPs per token by hand: 6 times the weights that multiply a token, plus 12 * layers * heads * head size * length."""

import pytest

pytestmark = pytest.mark.nemo

VOCAB = 151_936


@pytest.fixture(scope="module")
def flops():
    from nemo_dllm.collections.diffusion.training.flops import train_flops_per_token

    return train_flops_per_token


@pytest.fixture(scope="module")
def llm():
    from nemo.collections import llm

    return llm


def test_qwen3_1p7b(flops, llm):
    attention = 2048 * (16 * 128) + 2 * 2048 * (8 * 128) + (16 * 128) * 2048
    weights = 28 * (attention + 3 * 2048 * 6144) + VOCAB * 2048
    expected = 6 * weights + 12 * 28 * 16 * 128 * 2048
    assert flops(llm.Qwen3Config1P7B(), VOCAB, 2048) == expected
    assert expected == pytest.approx(11.73e9, rel=1e-3)


def test_qwen3_0p6b(flops, llm):
    """Heads of 128 that are wider together (2,048) than the hidden size (1,024)."""
    attention = 1024 * 2048 + 2 * 1024 * 1024 + 2048 * 1024
    weights = 28 * (attention + 3 * 1024 * 3072) + VOCAB * 1024
    expected = 6 * weights + 12 * 28 * 2048 * 2048
    assert flops(llm.Qwen3Config600M(), VOCAB, 2048) == expected
    assert expected == pytest.approx(4.985e9, rel=1e-3)


def test_weights_count_six_times(flops, llm):
    """All but the norms of a model with tied embeddings; 6ND, the attention apart."""
    config = llm.Qwen3Config1P7B()
    norms = 28 * (2 * 2048 + 2 * 128) + 2048
    without_attention = flops(config, VOCAB, 0)
    assert without_attention == 6 * (1_720_574_976 - norms)


def test_attention_grows_with_the_length(flops, llm):
    config = llm.Qwen3Config1P7B()
    assert flops(config, VOCAB, 4096) - flops(config, VOCAB, 2048) == 12 * 28 * 16 * 128 * 2048


def test_vocabulary_and_projections_without_a_gate(flops, llm):
    config = llm.GPTConfig(num_layers=3, hidden_size=8, ffn_hidden_size=20, num_attention_heads=2, kv_channels=4)
    # num_query_groups defaults to the heads: 4 projections of 8 x 8.
    assert config.gated_linear_unit is False
    assert flops(config, 100, 0) == 6 * (3 * (4 * 8 * 8 + 2 * 8 * 20) + 100 * 8)


MIXTURE = {
    "num_layers": 4,
    "hidden_size": 8,
    "ffn_hidden_size": 20,
    "num_attention_heads": 2,
    "kv_channels": 4,
    "gated_linear_unit": True,
    "num_moe_experts": 6,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 12,
}
ATTENTION, DENSE, ROUTED, ROUTER, SHARED = 4 * 8 * 8, 3 * 8 * 20, 2 * 3 * 8 * 12, 8 * 6, 3 * 8 * 10


@pytest.mark.parametrize(
    "fields, layers",
    [
        ({}, 4 * (ROUTED + ROUTER)),
        ({"moe_shared_expert_intermediate_size": 10}, 4 * (ROUTED + ROUTER + SHARED)),
        # Every second, the first included; every third: layers 0 and 3.
        ({"moe_layer_freq": 2}, 2 * (ROUTED + ROUTER) + 2 * DENSE),
        ({"moe_layer_freq": 3}, 2 * (ROUTED + ROUTER) + 2 * DENSE),
        ({"moe_layer_freq": [0, 1, 1, 1]}, 3 * (ROUTED + ROUTER) + DENSE),
        ({"moe_router_topk": 1, "moe_router_pre_softmax": True}, 4 * (ROUTED // 2 + ROUTER)),
    ],
    ids=str,
)
def test_mixture_of_experts_counts_what_a_token_visits(flops, llm, fields, layers):
    config = llm.GPTConfig(**MIXTURE | fields)
    assert flops(config, 100, 0) == 6 * (4 * ATTENTION + layers + 100 * 8)


def test_qwen3_30b_a3b(flops, llm):
    """8 of 128 experts of 768: 3.3 of 30.5 billion weights."""
    attention = 2 * 2048 * (32 * 128) + 2 * 2048 * (4 * 128)
    weights = 48 * (attention + 8 * 3 * 2048 * 768 + 2048 * 128) + VOCAB * 2048
    assert flops(llm.Qwen3Config30B_A3B(moe_permute_fusion=False), VOCAB, 0) == 6 * weights
    assert weights + VOCAB * 2048 == pytest.approx(3.35e9, rel=1e-2)


def test_block_diffusion_reads_every_token_twice_and_scores_it_once(flops, llm):
    """Attention over what the mask allows, by hand for eight tokens in two blocks."""
    config = llm.Qwen3Config1P7B()
    block = flops(config, 0, 0) / 6
    allowed = [4] * 4 + [4 + 4] * 4 + [4] * 4 + [8] * 4  # keys of each of the 16 positions
    expected = 6 * (2 * block + VOCAB * 2048) + 12 * 28 * 16 * 128 * sum(allowed) / 8
    assert flops(config, VOCAB, 8, block_size=4) == expected
    assert flops(config, VOCAB, 8, block_size=4, views=2) == 2 * expected
