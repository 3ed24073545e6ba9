"""What routers count, and how expert biases follow it."""

import pytest
import torch

pytestmark = pytest.mark.nemo

MASK, TOPK = 199, 2
SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}


@pytest.fixture(scope="module")
def build(build_model, model_fields):
    from nemo_dllm.collections.diffusion.objectives import BlockDiffusion

    def build(**fields):
        # One time for a row, so that noise does not depend on the number of blocks.
        objective = BlockDiffusion(mask_token_id=MASK, group_size=2, block_size=4, time_sampling="antithetic")
        return build_model(objective, **{**model_fields["mixture of experts"], **fields}).train()

    return build


def rows(length):
    """A prompt of 2 tokens and an answer of 6; and one of 1 and 3; padded."""
    position = torch.arange(length)
    return {
        "tokens": 5 * position % 13 + torch.tensor([[0], [20]]),
        "loss_mask": (position >= torch.tensor([[2], [1]])) & (position < torch.tensor([[8], [4]])),
        "key_mask": position < torch.tensor([[8], [4]]),
        "sample_index": torch.arange(2),
    }


def run(model, rows_of_batch):
    batch = model.training_data_step(iter([rows_of_batch]))
    model.forward_step(batch).loss_sum.backward()
    return batch, [layer.mlp.router for layer in model.module.decoder.layers]


def test_every_real_token_is_counted_once_by_its_kind(build):
    from nemo_dllm.collections.diffusion.models.balancing import TokenKind

    batch, (first, last) = run(build(), rows(12))
    masked = len(batch.targets.row_N)
    # 12 real tokens in each half, of 24 positions.
    assert torch.equal(first.load_CE.sum(1), TOPK * torch.tensor([24.0, 12, 12 - masked, masked]))
    # The last layer drops the clean half.
    assert torch.equal(last.load_CE.sum(1), TOPK * torch.tensor([12.0, 0, 12 - masked, masked]))
    assert [kind.name for kind in TokenKind] == ["PAD", "CLEAN", "VISIBLE", "MASKED"]


@pytest.mark.parametrize("balance_over, halves", [("real", 2), ("noised", 1), ("masked", 0)])
def test_biases_follow_the_tokens_to_balance(build, balance_over, halves):
    _, (router, _) = run(build(balance_over=balance_over, **SIGMOID), rows(12))
    expected = router.load_CE[[[3], [2, 3], [1, 2, 3]][halves]].sum(0)
    assert torch.equal(router.local_tokens_per_expert, expected)


def test_counts_do_not_depend_on_padding(build):
    loads = []
    for length in (8, 32):
        _, routers = run(build(seq_length=length, **SIGMOID), rows(length))
        loads.append(torch.stack([router.load_CE[1:] for router in routers]))
    assert torch.equal(*loads)


def test_nothing_is_counted_in_evaluation(build):
    model = build(**SIGMOID).eval()
    model.forward_step(model.validation_data_step(iter([rows(8)])))
    router = model.module.decoder.layers[0].mlp.router
    assert not router.load_CE.any() and not router.local_tokens_per_expert.any()


def test_counts_survive_half_precision(build):
    """bf16 has no 257, and Megatron converts all buffers of a half-precision model."""
    model = build(**SIGMOID)
    model.module.bfloat16()
    router = model.module.decoder.layers[0].mlp.router
    router.local_tokens_per_expert += 256
    run(model, rows(8))
    assert router.local_tokens_per_expert.dtype == router.expert_bias.dtype == torch.float32
    assert torch.equal(router.local_tokens_per_expert - 256, router.load_CE[1:].sum(0))


def test_pads_never_take_the_place_of_real_tokens(build):
    """Experts with room for a quarter of the tokens: as many real ones are kept with 24 pads as with none."""
    kept = []
    for length, factor in ((8, 0.5), (32, 0.5 / 4)):
        model = build(seq_length=length, moe_expert_capacity_factor=factor)
        model.forward_step(model.training_data_step(iter([rows(length)])))
        router = model.module.decoder.layers[0].mlp.router
        kept.append(router.load_CE[1:])
        assert not router.load_CE[0].any()
    assert torch.equal(*kept)
    assert 0 < kept[0].sum() < 24 * TOPK
