"""The Megatron core: positions, padding, the bidirectional switch and the two ways to a loss.

Shape letters: B samples, S positions, N target positions, V vocabulary.
"""

import pytest
import torch
from torch.nn import functional as F

pytestmark = pytest.mark.nemo

MIXTURE = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_aux_loss_coeff": 0.0,
    "moe_router_load_balancing_type": "none",
    "moe_grouped_gemm": False,
    "moe_token_dispatcher_type": "allgather",
}
KINDS = {"dense": {}, "mixture of experts": MIXTURE}
MODELS = [(kind, backend) for kind in KINDS for backend in ("sdpa", "eager")]
by_model = pytest.mark.parametrize("kind, backend", MODELS, ids=lambda value: value)
LENGTHS = (12, 5, 1)


def random_tokens(*shape, seed=0):
    return torch.randint(0, 190, shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def model_of(build_model):
    """Builds a model once for each kind and backend, with the same weights for both backends."""
    built = {}

    def model(kind, backend):
        if (kind, backend) not in built:
            built[kind, backend] = build_model(attention_backend=backend, **KINDS[kind]).eval()
        return built[kind, backend]

    return model


def padded(side, *, pad_seed):
    """Rows of LENGTHS real tokens, padded with random ids; the places of the real ones, and the mask."""
    tokens_BS, key_mask_BS = random_tokens(3, 12, seed=pad_seed), torch.zeros(3, 12, dtype=torch.bool)
    places = [slice(0, n) if side == "right" else slice(12 - n, 12) for n in LENGTHS]
    for row, place in enumerate(places):
        tokens_BS[row, place] = random_tokens(LENGTHS[row], seed=row)
        key_mask_BS[row, place] = True
    return tokens_BS, key_mask_BS, places


@by_model
@pytest.mark.parametrize("side", ["right", "left"])
@torch.no_grad()
def test_padded_rows_equal_unpadded_runs_whatever_the_pads_are(model_of, kind, backend, side):
    """On the left, rope sees relative positions only, so the rows need no position ids of their own."""
    model = model_of(kind, backend)
    tokens_BS, key_mask_BS, places = padded(side, pad_seed=100)
    logits_BSV = model(tokens_BS, attention_mask=key_mask_BS)
    assert logits_BSV.isfinite().all()
    other_pads_BS, _, _ = padded(side, pad_seed=200)
    other_logits_BSV = model(other_pads_BS, attention_mask=key_mask_BS)
    for row, place in enumerate(places):
        alone = model(tokens_BS[row : row + 1, place])[0]
        torch.testing.assert_close(logits_BSV[row, place], alone, rtol=0, atol=1e-5)
        torch.testing.assert_close(other_logits_BSV[row, place], logits_BSV[row, place], rtol=0, atol=1e-6)


@by_model
@torch.no_grad()
def test_pads_without_a_mask_would_be_noticed(model_of, kind, backend):
    """The mutated twin: without the mask, and with one that hides another position."""
    model = model_of(kind, backend)
    tokens_BS, key_mask_BS, _ = padded("right", pad_seed=100)
    logits_BSV = model(tokens_BS, attention_mask=key_mask_BS)
    for wrong in (None, key_mask_BS.roll(1, dims=1)):
        assert (model(tokens_BS, attention_mask=wrong) - logits_BSV)[1, :5].abs().max() > 1e-2


@by_model
@torch.no_grad()
def test_integers_of_zero_and_one_are_the_bool_mask(model_of, kind, backend):
    model = model_of(kind, backend)
    tokens_BS, key_mask_BS, _ = padded("left", pad_seed=100)
    expected = model(tokens_BS, attention_mask=key_mask_BS)
    assert torch.equal(model(tokens_BS, attention_mask=key_mask_BS.long()), expected)


@by_model
def test_float_masks_are_refused(model_of, kind, backend):
    tokens_BS, key_mask_BS, _ = padded("left", pad_seed=100)
    for mask in (key_mask_BS.float(), torch.zeros(3, 12).masked_fill(~key_mask_BS, float("-inf"))):
        with pytest.raises(ValueError, match=r"key_mask has dtype torch\.float32, .* pass a bool mask, True = real"):
            model_of(kind, backend)(tokens_BS, attention_mask=mask)


@by_model
def test_a_row_of_pads_is_finite_and_leaves_the_other_rows_alone(build_model, kind, backend):
    model = build_model(attention_backend=backend, **KINDS[kind])
    tokens_BS = random_tokens(2, 12)
    key_mask_BS = torch.tensor([[True] * 9 + [False] * 3, [False] * 12])
    logits_BSV = model(tokens_BS, attention_mask=key_mask_BS)
    alone = model(tokens_BS[:1], attention_mask=key_mask_BS[:1])
    torch.testing.assert_close(logits_BSV[0], alone[0], rtol=0, atol=1e-5)
    logits_BSV.square().mean().backward()
    assert logits_BSV.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@by_model
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@torch.no_grad()
def test_the_last_token_reaches_the_first_position(model_of, kind, backend, training):
    model = model_of(kind, backend).train(training)
    tokens_BS = random_tokens(2, 12)
    changed_BS = tokens_BS.clone()
    changed_BS[:, -1] = (tokens_BS[:, -1] + 1) % 190
    ones = torch.ones(2, 12, dtype=torch.bool)
    logits_BSV = model(tokens_BS)
    for mask in (None, ones, ones.long()):
        torch.testing.assert_close(model(tokens_BS, attention_mask=mask), logits_BSV, rtol=0, atol=1e-5)
        difference_B = (model(changed_BS, attention_mask=mask) - logits_BSV)[:, 0].abs().amax(-1)
        assert (difference_B > 1e-3).all()
    model.eval()


@by_model
@torch.no_grad()
def test_both_backends_are_one_model(model_of, kind, backend):
    tokens_BS, key_mask_BS, _ = padded("right", pad_seed=100)
    expected = model_of(kind, "eager")(tokens_BS, attention_mask=key_mask_BS)
    actual = model_of(kind, backend)(tokens_BS, attention_mask=key_mask_BS)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_positions_counted_from_zero_are_the_default(model_of):
    model, tokens_BS = model_of("dense", "sdpa"), random_tokens(3, 12)
    expected = model(tokens_BS)
    for positions in (torch.arange(12), torch.arange(12).expand(3, 12)):
        torch.testing.assert_close(model(tokens_BS, positions), expected, rtol=0, atol=1e-6)


@torch.no_grad()
def test_only_distances_between_positions_matter(model_of):
    """Rope is relative, so a shift by 100, another one for each row, changes nothing; a stretch does."""
    model, tokens_BS = model_of("dense", "sdpa"), random_tokens(3, 12)
    expected = model(tokens_BS)
    shifts_B1 = torch.tensor([[100], [7], [0]])
    for positions in (torch.arange(12) + 100, torch.arange(12) + shifts_B1):
        torch.testing.assert_close(model(tokens_BS, positions), expected, rtol=0, atol=1e-4)
    for positions in (2 * torch.arange(12), torch.arange(12).flip(0), torch.zeros(12, dtype=torch.long)):
        assert (model(tokens_BS, positions) - expected).abs().max() > 1e-2


@torch.no_grad()
def test_equal_positions_are_told_apart_by_their_tokens_only(model_of):
    """[x | y] with positions 0..5 twice: swapping the halves swaps their logits, which no other positions allow."""
    model, tokens_BS = model_of("dense", "sdpa"), random_tokens(2, 12)
    twice = torch.arange(6).repeat(2)
    swapped_BS = tokens_BS.roll(6, dims=1)
    for positions in (twice, twice.expand(2, 12)):
        logits, swapped = model(tokens_BS, positions), model(swapped_BS, positions)
        torch.testing.assert_close(swapped.roll(6, dims=1), logits, rtol=0, atol=1e-5)
    assert (model(swapped_BS).roll(6, dims=1) - model(tokens_BS)).abs().max() > 1e-2


@torch.no_grad()
def test_rows_may_have_positions_of_their_own(model_of):
    model, tokens_BS = model_of("dense", "sdpa"), random_tokens(2, 12)
    positions_BS = torch.stack([torch.arange(12) * 3, torch.arange(12).flip(0) + 5])
    logits_BSV = model(tokens_BS, positions_BS)
    for row in range(2):
        alone = model(tokens_BS[row : row + 1], positions_BS[row])
        torch.testing.assert_close(logits_BSV[row], alone[0], rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("fields", [{"seq_len_interpolation_factor": 4.0}, {"rotary_interleaved": True}])
def test_the_variants_of_rope_keep_their_meaning(build_model, fields):
    """Explicit positions 0..S-1 go another way than none at all; both must scale and interleave alike."""
    model, tokens_BS = build_model(**fields).eval(), random_tokens(2, 12)
    expected = model(tokens_BS)
    torch.testing.assert_close(model(tokens_BS, torch.arange(12)), expected, rtol=0, atol=1e-6)
    assert (build_model().eval()(tokens_BS) - expected).abs().max() > 1e-3


@torch.no_grad()
def test_learned_positions(build_model):
    model, tokens_BS = build_model(position_embedding_type="learned_absolute").eval(), random_tokens(2, 12)
    expected = model(tokens_BS)
    for positions in (torch.arange(12), torch.arange(12).expand(2, 12)):
        assert torch.equal(model(tokens_BS, positions), expected)
    assert (model(tokens_BS, torch.arange(12).flip(0)) - expected).abs().max() > 1e-2


@torch.no_grad()
def test_without_positions_order_does_not_matter(build_model):
    model, tokens_BS = build_model(position_embedding_type="none").eval(), random_tokens(2, 12)
    torch.testing.assert_close(model(tokens_BS.flip(1)).flip(1), model(tokens_BS), rtol=0, atol=1e-5)


def test_other_position_embeddings_are_refused_when_the_model_is_built(build_model):
    with pytest.raises(
        ValueError, match=r"position_embedding_type='mrope' is not supported; choose from rope, learned"
    ):
        build_model(position_embedding_type="mrope", mrope_section=[2, 3, 3])


def target_rows(tokens_BS):
    """Five targets in no order: (sample, position of the logit), clean token, weight."""
    from nemo_dllm.collections.diffusion.models.core import Targets

    places = torch.tensor([[1, 7], [0, 0], [2, 11], [0, 5], [1, 0]])
    return places, Targets(
        row_N=places[:, 1] * len(tokens_BS) + places[:, 0],
        token_N=random_tokens(5, seed=9),
        loss_weight_N=torch.tensor([0.5, 2.0, 1.0, 0.0, 3.0]),
    )


@by_model
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_scoring_targets_equals_cross_entropy_of_the_logits(build_model, kind, backend, tied):
    fields = {**KINDS[kind], "share_embeddings_and_output_weights": tied}
    model = build_model(attention_backend=backend, **fields)
    tokens_BS, key_mask_BS, _ = padded("right", pad_seed=100)
    places, targets = target_rows(tokens_BS)

    scored = model(tokens_BS, attention_mask=key_mask_BS, targets=targets)
    scored.loss_sum.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)

    logits_BSV = model(tokens_BS, attention_mask=key_mask_BS)
    assert logits_BSV.shape == (3, 12, 200)
    nll_N = F.cross_entropy(logits_BSV[places[:, 0], places[:, 1]], targets.token_N, reduction="none")
    (nll_N * targets.loss_weight_N).sum().backward()

    torch.testing.assert_close(scored.nll_N, nll_N.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scored.loss_sum, (nll_N * targets.loss_weight_N).sum(), rtol=1e-5, atol=1e-5)
    for name, parameter in model.named_parameters():
        scale = parameter.grad.abs().max()
        assert (gradients[name] - parameter.grad).abs().max() <= 1e-5 * scale, name


@torch.no_grad()
def test_rows_count_positions_first(model_of):
    """The mutated twin: sample * S + position, the order of [B, S], names other logits."""
    model, tokens_BS = model_of("dense", "sdpa"), random_tokens(3, 12)
    places, targets = target_rows(tokens_BS)
    right = model(tokens_BS, targets=targets)
    wrong = model(tokens_BS, targets=targets._replace(row_N=places[:, 0] * 12 + places[:, 1]))
    # The first and the last row are the same either way.
    assert (right.nll_N - wrong.nll_N)[[0, 3, 4]].abs().min() > 1e-3
    assert torch.equal(right.nll_N[[1, 2]], wrong.nll_N[[1, 2]])


def test_experts_build_and_run_with_nemos_default_of_grouped_products(build_model):
    """Grouped products need a kernel of Transformer Engine; local layers run expert by expert."""
    model = build_model(**{**MIXTURE, "moe_grouped_gemm": True})
    logits_BSV = model(torch.randint(0, 200, (2, 12)))
    assert logits_BSV.shape == (2, 12, 200)
    assert torch.isfinite(logits_BSV).all()


def test_a_checkpoint_holds_no_extra_state_of_the_layers_and_needs_none(build_model):
    """Transformer Engine's modules have one; without it their checkpoints and those of local layers are the same."""

    class WithExtraState(torch.nn.Module):
        def get_extra_state(self):
            return torch.zeros(1)

        def set_extra_state(self, state):
            raise AssertionError("nothing to set")

        def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
            """As grouped experts: one per expert, the first without a number."""
            return {f"{prefix}{name}": torch.zeros(1) for name in ("_extra_state", "_extra_state12", "kept")}

    core = build_model().module
    state = core.state_dict()
    assert not any("_extra_state" in name for name in core.sharded_state_dict())
    core.decoder.layers[0].scales = WithExtraState()
    assert any("_extra_state" in name for name in core.state_dict())
    assert [name for name in core.sharded_state_dict() if "scales" in name] == ["decoder.layers.0.scales.kept"]
    assert core.load_state_dict(state).missing_keys == []
    del state["decoder.final_layernorm.weight"]
    with pytest.raises(RuntimeError, match="final_layernorm.weight"):
        core.load_state_dict(state)


def test_a_config_with_layers_of_its_own_is_refused(build_model):
    from nemo.collections.llm.gpt.model.base import transformer_engine_layer_spec

    with pytest.raises(ValueError, match="GPTConfig brings layers of its own .*; choose a config with NeMo's default"):
        build_model(transformer_layer_spec=transformer_engine_layer_spec)


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_leaves_additions_of_residuals_to_the_products(build_model, kind):
    """And training does not. Two layers; the first product is added to a copy, as the embedding's output stays."""

    model = build_model(activation_func=F.silu, **KINDS[kind])

    def products(*, training):
        model.train(training)
        with torch.set_grad_enabled(training), torch.profiler.profile() as profile:
            model(random_tokens(2, 12))
        names = [event.name for event in profile.events()]
        return names.count("aten::addmm"), names.count("aten::addmm_")

    assert products(training=True) == (0, 0)
    assert products(training=False) == {"dense": (1, 3), "mixture of experts": (1, 1)}[kind]
