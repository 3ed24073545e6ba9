"""The Megatron core under patterns of attention: block diffusion's property, packing, recomputation, skipped work.

Shape letters: B samples, L tokens of a sample, S positions of the input, N target positions, V vocabulary.
"""

import pytest
import torch

from nemo_dllm.collections.diffusion.attention.masks import Bidirectional, BlockCausal, NoisyClean, dense_mask

pytestmark = pytest.mark.nemo

KINDS = ("dense", "mixture of experts")
MODELS = [(kind, backend) for kind in KINDS for backend in ("sdpa", "eager")]
by_model = pytest.mark.parametrize("kind, backend", MODELS, ids=lambda value: value)
# Length and block size: on the grid of blocks, off it, causal, and one block that is not full.
SIZES = [(12, 4), (11, 4), (5, 1), (6, 8)]
by_size = pytest.mark.parametrize("length, block_size", SIZES, ids=lambda value: str(value))
MASK = 199


def random_tokens(*shape, seed=0):
    return torch.randint(0, 190, shape, generator=torch.Generator().manual_seed(seed))


def noised(clean_BL, seed=0):
    """About half of the tokens masked."""
    hidden_BL = torch.rand(clean_BL.shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    return clean_BL.masked_fill(hidden_BL, MASK)


@pytest.fixture(scope="module")
def model_of(build_model, model_fields):
    """Builds a model once for each kind and backend, with the same weights for both backends."""
    built = {}

    def model(kind, backend="sdpa"):
        if (kind, backend) not in built:
            built[kind, backend] = build_model(attention_backend=backend, **model_fields[kind]).eval()
        return built[kind, backend]

    return model


def targets_of(length, samples):
    """Targets in no order; some weights differ."""
    from nemo_dllm.collections.diffusion.models.core import Targets

    position_N = torch.tensor([length - 1, 0, 3, 1, length - 1])
    return Targets(
        row_N=position_N * samples + torch.tensor([0, 1, 0, 1, 1]),
        token_N=random_tokens(5, seed=9),
        loss_weight_N=torch.tensor([0.5, 2.0, 1.0, 0.25, 3.0]),
    )


def loss_and_gradients(model, tokens_BS, pattern, targets):
    model.zero_grad(set_to_none=True)
    scored = model(tokens_BS, attention_mask=pattern, targets=targets)
    scored.loss_sum.backward()
    return scored.loss_sum.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same_gradients(actual, expected):
    for name, gradient in expected.items():
        assert (actual[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name


@by_model
@by_size
@torch.no_grad()
def test_one_pass_shows_every_block_what_generation_would_show_it(model_of, kind, backend, length, block_size):
    """Noised block k of [x_t | x_0] is a block-causal pass over the clean blocks before it and itself."""
    model, clean_BL = model_of(kind, backend), random_tokens(2, length)
    noised_BL = noised(clean_BL)
    both_BS = torch.cat((noised_BL, clean_BL), dim=1)
    logits_BLV = model(both_BS, attention_mask=NoisyClean(block_size, length))
    assert logits_BLV.shape == (2, length, 200)
    for start in range(0, length, block_size):
        block = slice(start, start + block_size)
        seen_BS = torch.cat((clean_BL[:, :start], noised_BL[:, block]), dim=1)
        expected_BSV = model(seen_BS, attention_mask=BlockCausal(block_size))
        torch.testing.assert_close(logits_BLV[:, block], expected_BSV[:, start:], rtol=0, atol=1e-5)


@torch.no_grad()
def test_other_positions_or_blocks_would_be_noticed(model_of):
    """The mutated twin: positions 0..2L-1 train without an error, and so does a neighbouring block size."""
    model, clean_BL = model_of("dense"), random_tokens(2, 12)
    both_BS, pattern = torch.cat((noised(clean_BL), clean_BL), dim=1), NoisyClean(4, 12)
    logits_BLV = model(both_BS, attention_mask=pattern)
    repeated = torch.arange(12).repeat(2)
    for positions in (repeated, repeated.expand(2, 24)):
        assert torch.equal(model(both_BS, positions, pattern), logits_BLV)
    for wrong in (
        model(both_BS, torch.arange(24), pattern),
        model(both_BS, attention_mask=NoisyClean(3, 12)),
        model(both_BS, attention_mask=BlockCausal(4))[:, :12],
    ):
        assert (wrong - logits_BLV).abs().max() > 1e-2


@by_model
@torch.no_grad()
def test_what_a_change_of_one_block_reaches(model_of, kind, backend):
    """Clean block k reaches noised blocks after k, noised block k itself only; everything else stays bit for bit."""
    model, clean_BL = model_of(kind, backend), random_tokens(1, 11)
    both_BS, pattern = torch.cat((noised(clean_BL), clean_BL), dim=1), NoisyClean(4, 11)
    before_LV = model(both_BS, attention_mask=pattern)[0]
    block_L = torch.arange(11) // 4
    for half in range(2):
        for block in range(3):
            changed_BS = both_BS.clone()
            place = torch.where(block_L == block)[0] + 11 * half
            changed_BS[0, place] = random_tokens(len(place), seed=40)
            difference_L = (model(changed_BS, attention_mask=pattern)[0] - before_LV).abs().amax(-1)
            reached_L = block_L > block if half else block_L == block
            assert (difference_L[reached_L] > 1e-4).all()
            # Other tokens at an expert change the shape of its product, and that the rounding.
            assert difference_L[~reached_L].max() <= (0 if kind == "dense" else 1e-5)


@by_model
@torch.no_grad()
def test_one_block_for_all_is_bidirectional_and_blocks_of_one_are_causal(model_of, kind, backend):
    model, tokens_BL = model_of(kind, backend), random_tokens(2, 9)
    bidirectional_BLV = model(tokens_BL)
    assert torch.equal(model(tokens_BL, attention_mask=Bidirectional()), bidirectional_BLV)
    both_BS = torch.cat((tokens_BL, random_tokens(2, 9, seed=1)), dim=1)
    for actual in (
        model(tokens_BL, attention_mask=BlockCausal(9)),
        model(both_BS, attention_mask=NoisyClean(16, 9)),
    ):
        torch.testing.assert_close(actual, bidirectional_BLV, rtol=0, atol=1e-5)
    causal_BLV = model(tokens_BL, attention_mask=BlockCausal(1))
    for length in (1, 5):
        expected = model(tokens_BL[:, :length], attention_mask=BlockCausal(1))
        torch.testing.assert_close(causal_BLV[:, :length], expected, rtol=0, atol=1e-5)
    assert (causal_BLV - bidirectional_BLV).abs().max() > 1e-2


@by_model
@torch.no_grad()
def test_a_clean_half_that_is_read_is_the_autoregressive_model(model_of, kind, backend):
    """In the same pass; what the noised half shows is then that of causal earlier blocks."""
    model, clean_BL = model_of(kind, backend), random_tokens(2, 11)
    both_BS = torch.cat((noised(clean_BL), clean_BL), dim=1)
    logits_BSV = model(both_BS, attention_mask=NoisyClean(4, 11, clean_causal=True, clean_output=True))
    assert logits_BSV.shape == (2, 22, 200)
    causal_BLV = model(clean_BL, attention_mask=BlockCausal(1))
    torch.testing.assert_close(logits_BSV[:, 11:], causal_BLV, rtol=0, atol=1e-5)
    noised_only_BLV = model(both_BS, attention_mask=NoisyClean(4, 11, clean_causal=True))
    torch.testing.assert_close(logits_BSV[:, :11], noised_only_BLV, rtol=0, atol=1e-5)
    assert (model(both_BS, attention_mask=NoisyClean(4, 11)) - noised_only_BLV)[:, 4:].abs().max() > 1e-2


def packed_and_alone(kind_of_pattern, lengths):
    """Tokens and pattern of documents in one row, and of each document in a row of its own."""
    document_BL = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    total = sum(lengths)
    of = {
        "bidirectional": (lambda _, **fields: Bidirectional(**fields), 1),
        "block-causal": (lambda _, **fields: BlockCausal(3, **fields), 1),
        "noisy and clean": (lambda length, **fields: NoisyClean(3, length, **fields), 2),
    }
    pattern_of, halves = of[kind_of_pattern]
    tokens_BHL = random_tokens(1, halves, total)
    alone = []
    for start, length in zip([0, *torch.tensor(lengths).cumsum(0)], lengths, strict=False):
        alone.append(
            (tokens_BHL[:, :, start : start + length].flatten(1), pattern_of(length), slice(start, start + length))
        )
    return tokens_BHL.flatten(1), pattern_of(total, document_BL=document_BL), alone


@by_model
@pytest.mark.parametrize("pattern", ["bidirectional", "block-causal", "noisy and clean"])
@torch.no_grad()
def test_packed_documents_are_as_if_alone(model_of, kind, backend, pattern):
    model = model_of(kind, backend)
    tokens_BS, packed, alone = packed_and_alone(pattern, (5, 1, 7))
    logits_BLV = model(tokens_BS, attention_mask=packed)
    for tokens, own_pattern, place in alone:
        expected = model(tokens, attention_mask=own_pattern)
        torch.testing.assert_close(logits_BLV[:, place], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("pattern", ["bidirectional", "block-causal", "noisy and clean"])
@torch.no_grad()
def test_learned_positions_start_anew_in_every_document_and_half(build_model, pattern):
    model = build_model(position_embedding_type="learned_absolute").eval()
    tokens_BS, packed, alone = packed_and_alone(pattern, (5, 1, 6))
    logits_BLV = model(tokens_BS, attention_mask=packed)
    for tokens, own_pattern, place in alone:
        expected = model(tokens, attention_mask=own_pattern)
        torch.testing.assert_close(logits_BLV[:, place], expected, rtol=0, atol=1e-5)


@by_model
@pytest.mark.parametrize("pattern", ["block-causal", "noisy and clean"])
def test_padding_is_that_of_each_row_and_a_row_of_pads_is_finite(build_model, model_fields, kind, backend, pattern):
    model = build_model(attention_backend=backend, **model_fields[kind])
    lengths = (4, 7, 10, 0)
    key_mask_BL = torch.arange(10) < torch.tensor(lengths)[:, None]
    pattern_of, halves = {
        "block-causal": (lambda length, **fields: BlockCausal(4, **fields), 1),
        "noisy and clean": (lambda length, **fields: NoisyClean(4, length, **fields), 2),
    }[pattern]
    tokens_BHL = random_tokens(4, halves, 10)
    logits_BLV = model(tokens_BHL.flatten(1), attention_mask=pattern_of(10, key_mask_BL=key_mask_BL))
    for row, length in enumerate(lengths[:3]):
        alone = model(tokens_BHL[row : row + 1, :, :length].flatten(1), attention_mask=pattern_of(length))
        torch.testing.assert_close(logits_BLV[row, :length], alone[0], rtol=0, atol=1e-5)
    assert logits_BLV.isfinite().all()
    logits_BLV.square().mean().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@torch.no_grad()
def test_left_padding_with_positions_of_the_real_tokens(model_of):
    """A canvas padded to the grid of blocks on the left is the canvas alone, when its positions are counted so."""
    model, tokens_BL = model_of("dense"), random_tokens(1, 9)
    real_BL = torch.arange(12)[None] >= 3
    padded_BL = torch.cat((random_tokens(1, 3, seed=5), tokens_BL), dim=1)
    position_BL = (real_BL.cumsum(1) - 1).clamp(min=0)
    alone = model(tokens_BL, attention_mask=BlockCausal(4))
    pattern = BlockCausal(4, key_mask_BL=real_BL, position_BL=position_BL)
    torch.testing.assert_close(model(padded_BL, position_BL, pattern)[:, 3:], alone, rtol=0, atol=1e-5)
    # Blocks that are counted from the first pad, as a sampler may, are other blocks.
    physical = model(padded_BL, position_BL, BlockCausal(4, key_mask_BL=real_BL))
    assert (physical[:, 3:] - alone).abs().max() > 1e-2


@by_model
@by_size
def test_dropping_the_clean_half_changes_neither_logits_nor_gradients(
    build_model, model_fields, kind, backend, length, block_size
):
    model = build_model(attention_backend=backend, **model_fields[kind]).double()
    last = model.module.decoder.layers[-1]
    assert last.self_attention.drop_clean
    tokens_BS, pattern, targets = random_tokens(2, 2 * length), NoisyClean(block_size, length), targets_of(length, 2)
    lengths = []
    for layer in model.module.decoder.layers:
        layer.mlp.register_forward_hook(lambda module, inputs, output: lengths.append(len(inputs[0])))

    logits_BLV = model(tokens_BS, attention_mask=pattern)
    loss, gradients = loss_and_gradients(model, tokens_BS, pattern, targets)
    assert lengths == [2 * length, length] * 2

    last.self_attention.drop_clean = False
    torch.testing.assert_close(model(tokens_BS, attention_mask=pattern), logits_BLV, rtol=0, atol=1e-10)
    full_loss, full_gradients = loss_and_gradients(model, tokens_BS, pattern, targets)
    assert lengths[4:] == [2 * length] * 4
    torch.testing.assert_close(loss, full_loss, rtol=1e-6, atol=0)
    assert_same_gradients(gradients, full_gradients)


RECOMPUTATION = {
    "every layer": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "both layers at once": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    "the first layer": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    "core attention": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recomputed", RECOMPUTATION)
def test_recomputation_sees_the_pattern_of_its_own_batch(build_model, model_fields, kind, recomputed):
    """Two forward passes, then their backward passes, as pipeline schedules do."""
    key_mask_BL = torch.arange(6) < torch.tensor([[6], [4]])
    batches = [
        (random_tokens(2, 12, seed=1), NoisyClean(2, 6, key_mask_BL), targets_of(6, 2)),
        (random_tokens(2, 12, seed=2), BlockCausal(5), targets_of(12, 2)),
        (random_tokens(2, 12, seed=3), None, targets_of(12, 2)),
    ]

    def gradients_of(**fields):
        model = build_model(**model_fields[kind], **fields).train()
        losses = [model(tokens, attention_mask=pattern, targets=targets) for tokens, pattern, targets in batches]
        for scored in losses:
            scored.loss_sum.backward()
        return {name: p.grad for name, p in model.named_parameters()}

    assert_same_gradients(gradients_of(**RECOMPUTATION[recomputed]), gradients_of())


@torch.no_grad()
def test_each_pipeline_stage_takes_the_pattern_of_its_batch(build_model):
    """The model cut between its layers by hand: the second stage knows the batch only by its arguments."""
    core, first, second = (build_model(share_embeddings_and_output_weights=False).eval().module for _ in range(3))
    del first.decoder.layers[1:], second.decoder.layers[:1]
    first.post_process = False
    first.decoder.final_layernorm = None
    second.pre_process = second.decoder.pre_process = False
    for pattern in (NoisyClean(4, 6), BlockCausal(3), Bidirectional()):
        tokens_BS = random_tokens(2, 12)
        hidden_SBH = first(tokens_BS, attention_mask=pattern)
        assert len(hidden_SBH) == 12
        second.set_input_tensor(hidden_SBH)
        torch.testing.assert_close(second(tokens_BS, attention_mask=pattern), core(tokens_BS, attention_mask=pattern))


def test_masks_are_built_once_for_all_layers(model_of, monkeypatch):
    calls = []
    monkeypatch.setattr(
        BlockCausal, "allows", lambda self, *index, allows=BlockCausal.allows: calls.append(1) or allows(self, *index)
    )
    model, key_mask_BL = model_of("dense"), torch.ones(2, 12, dtype=torch.bool)
    model(random_tokens(2, 12), attention_mask=BlockCausal(2, key_mask_BL))
    assert len(calls) == 1
    model(random_tokens(2, 12), attention_mask=BlockCausal(2, key_mask_BL))
    assert len(calls) == 2
    assert dense_mask(BlockCausal(2), 4, 4, torch.device("cpu")).shape == (1, 1, 4, 4)


@pytest.mark.parametrize(
    "pattern, text",
    [
        (
            NoisyClean(4, 12),
            r"12 positions, but NoisyClean\(length=12\) is of 24; pass the noised tokens, then the clean",
        ),
        (NoisyClean(4, 6, torch.ones(2, 12, dtype=torch.bool)), r"key_mask_BL has shape \(2, 12\); give .*: \(2, 6\)"),
        (
            BlockCausal(4, document_BL=torch.zeros(1, 12)),
            r"document_BL has shape \(1, 12\); give one row .*: \(2, 12\)",
        ),
        (BlockCausal(4, position_BL=torch.arange(12)), r"position_BL has shape \(12,\); give one row .*: \(2, 12\)"),
        (torch.ones(2, 11, dtype=torch.bool), r"key_mask_BL has shape \(2, 11\); give one row .*: \(2, 12\)"),
    ],
    ids=["length", "both halves", "one row", "no rows", "key mask"],
)
def test_a_pattern_of_another_shape_is_refused(model_of, pattern, text):
    """On a GPU a kernel would read beyond the end of the shorter tensor."""
    with pytest.raises(ValueError, match=text):
        model_of("dense")(random_tokens(2, 12), attention_mask=pattern)
