"""Auxiliary losses against their definition, written out with loops over rows and experts."""

import pytest
import torch

pytestmark = pytest.mark.nemo

EXPERTS, TOPK, MASK = 4, 2, 199
# Rows with 12, 3, 7 and 1 maskable tokens, of 12, 5, 9 and 4 real ones, after prompts of 0, 2, 2 and 3.
ROWS = {
    "tokens": torch.randint(0, MASK, (4, 12), generator=torch.Generator().manual_seed(0)),
    "loss_mask": (torch.arange(12) < torch.tensor([[12], [5], [9], [4]]))
    & (torch.arange(12) >= torch.tensor([[0], [2], [2], [3]])),
    "key_mask": torch.arange(12) < torch.tensor([[12], [5], [9], [4]]),
    "sample_index": torch.arange(4),
}
# The part of the loss's denominator that each row has.
SHARES = {"token": [12, 3, 7, 1], "sequence": [1, 1, 1, 1], "batch": [1, 1, 1, 1]}
OBJECTIVES = {
    "masked": {},
    "complementary pairs": {"complementary": True},
    "blocks": {"block_size": 4},
    "pairs of blocks": {"block_size": 4, "complementary": True},
}
COEFFICIENT = 0.3
LOSSES = {
    "sequence": {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": COEFFICIENT},
    "micro-batch": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": COEFFICIENT},
    "global batch": {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": COEFFICIENT},
    "z": {"moe_z_loss_coeff": COEFFICIENT},
}


@pytest.fixture(scope="module")
def build(build_model, model_fields):
    """A small mixture of experts in fp64; ``build(objective, loss_norm, **fields of model and config)``."""
    from nemo_dllm.collections.diffusion.objectives import BlockDiffusion, MaskedDiffusion

    def build(objective, loss_norm, balance_over="real", **fields):
        chosen = OBJECTIVES[objective]
        kind = BlockDiffusion if "block_size" in chosen else MaskedDiffusion
        # One time for a row, so that noise does not depend on the number of blocks.
        noise = kind(mask_token_id=MASK, group_size=4, loss_norm=loss_norm, time_sampling="antithetic", **chosen)
        model = build_model(noise, **{**model_fields["mixture of experts"], **fields, "balance_over": balance_over})
        return model.double().train()

    return build


def batches_of(rows, size):
    return [{name: value[i : i + size] for name, value in rows.items()} for i in range(0, len(rows["tokens"]), size)]


def gradients(model, rows, micro_batch_size):
    """Of the objective over all rows, as Megatron forms it: sums over micro-batches, divided by the whole count."""
    model.zero_grad()
    count = 0
    for rows_of_batch in batches_of(rows, micro_batch_size):
        batch = model.training_data_step(iter([rows_of_batch]))
        model.forward_step(batch).loss_sum.backward()
        count += batch.count
    return {name: p.grad / count for name, p in model.named_parameters() if p.grad is not None}


def added_by_losses(build, objective, loss_norm, loss, micro_batch_size=4, rows=ROWS, **fields):
    """What an auxiliary loss adds to the gradient."""
    with_loss = gradients(build(objective, loss_norm, **LOSSES[loss], **fields), rows, micro_batch_size)
    without = gradients(build(objective, loss_norm, **fields), rows, micro_batch_size)
    return {name: with_loss[name] - without[name] for name in with_loss}


def defined(build, objective, loss_norm, loss, rows=ROWS, kinds=("clean", "visible", "masked"), **fields):
    """The gradient of the loss by its definition, in one process, all rows at once."""
    model = build(objective, loss_norm, **fields)
    logits = []
    for layer in model.module.decoder.layers:
        layer.mlp.router.register_forward_hook(lambda router, args, out: logits.append(router.gating(args[0])))
    batch = model.training_data_step(iter([rows]))
    noised = model.objective.corrupt(rows["tokens"], rows["loss_mask"], rows["sample_index"])
    model.forward_step(batch)
    views = model.objective.views
    share = torch.tensor(SHARES[loss_norm], dtype=torch.float64).repeat(views) / views
    real = rows["key_mask"].repeat(views, 1)
    counted = real & (noised.masked if kinds == ("masked",) else True)
    halves = [counted]
    if model.objective.block_size and "clean" in kinds:
        halves.append(real)
    total = 0
    for layer_SRE in logits:
        # The last layer drops the clean half.
        counted_RS = torch.cat(halves, dim=1)[:, : len(layer_SRE)]
        padded = torch.zeros(counted_RS.size(0), len(layer_SRE), dtype=torch.bool)
        padded[:, : counted_RS.size(1)] = counted_RS
        groups = [[row] for row in range(len(padded))] if loss in ("sequence", "z") else [list(range(len(padded)))]
        for group in groups:
            tokens = torch.cat([layer_SRE[padded[row], row] for row in group])
            if len(tokens):
                total = total + sum(share[row] for row in group) * _of_tokens(tokens, loss)
    total = COEFFICIENT * total / share.sum()
    total.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _of_tokens(logits_TE, loss):
    if loss == "z":
        return logits_TE.exp().sum(1).log().square().mean()
    scores_TE = logits_TE.exp() / logits_TE.exp().sum(1, keepdim=True)
    result = 0
    for expert in range(EXPERTS):
        chosen = [expert in token.topk(TOPK).indices for token in scores_TE]
        result = result + EXPERTS * (sum(chosen) / len(chosen) / TOPK) * scores_TE[:, expert].mean()
    return result


def largest_difference(expected, actual):
    """The largest of max|difference| over max|gradient|, of the tensors in front of a router."""
    names = [name for name, gradient in expected.items() if gradient.abs().max() > 1e-9]
    assert any(name.endswith("router.weight") for name in names) and any("word_embeddings" in name for name in names)
    return max(((actual[n] - expected[n]).abs().max() / expected[n].abs().max()).item() for n in names)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("loss_norm", SHARES)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_an_auxiliary_loss_has_the_strength_of_its_definition(build, objective, loss_norm, loss):
    expected = defined(build, objective, loss_norm, loss)
    assert largest_difference(expected, added_by_losses(build, objective, loss_norm, loss)) < 1e-5


@pytest.mark.parametrize("loss", ["sequence", "z"])
@pytest.mark.parametrize("micro_batch_size", [1, 2])
@pytest.mark.parametrize("loss_norm", SHARES)
def test_losses_of_rows_are_the_same_however_a_batch_is_split(build, loss_norm, micro_batch_size, loss):
    whole = gradients(build("pairs of blocks", loss_norm, **LOSSES[loss]), ROWS, 4)
    split = gradients(build("pairs of blocks", loss_norm, **LOSSES[loss]), ROWS, micro_batch_size)
    assert largest_difference(whole, split) < 1e-6


def test_the_global_loss_takes_assignments_of_the_whole_step(build):
    """The second of two micro-batches knows the first; each alone would not."""
    model = build("masked", "token", **LOSSES["global batch"])
    gradients(model, ROWS, 2)
    router = model.module.decoder.layers[0].mlp.router
    real = ROWS["key_mask"].sum()
    assert router.ga_steps == real and router.global_tokens_per_expert.sum() == TOPK * real


@pytest.mark.parametrize("loss", ["sequence", "micro-batch", "z"])
@pytest.mark.parametrize(
    "balance_over, kinds", [("noised", ("visible", "masked")), ("masked", ("masked",))], ids=["noised", "masked"]
)
def test_the_tokens_to_balance_are_a_choice(build, balance_over, kinds, loss):
    expected = defined(build, "blocks", "token", loss, kinds=kinds)
    added = added_by_losses(build, "blocks", "token", loss, balance_over=balance_over)
    assert largest_difference(expected, added) < 1e-5
    assert largest_difference(expected, added_by_losses(build, "blocks", "token", loss)) > 0.05


@pytest.mark.parametrize("loss", ["sequence", "micro-batch", "z"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_padding_changes_nothing(build, objective, loss):
    longer = {
        name: value if value.dim() == 1 else torch.nn.functional.pad(value, (0, 8)) for name, value in ROWS.items()
    }
    expected = gradients(build(objective, "token", **LOSSES[loss]), ROWS, 4)
    actual = gradients(build(objective, "token", seq_length=20, **LOSSES[loss]), longer, 4)
    assert largest_difference(expected, actual) < 1e-6


def test_megatrons_own_router_would_be_noticed(build):
    """The mutated twin: its losses take pads in, and are multiplied by rows that the loss's denominator lacks."""
    from megatron.core.transformer.moe.router import TopKRouter

    model = build("masked", "sequence", **LOSSES["sequence"])
    for layer in model.module.decoder.layers:
        layer.mlp.router.__class__ = TopKRouter
    theirs = gradients(model, ROWS, 4)
    assert largest_difference(gradients(build("masked", "sequence", **LOSSES["sequence"]), ROWS, 4), theirs) > 0.5


@pytest.mark.parametrize("recompute", [("full", None), ("selective", ["moe"])], ids=["full", "moe"])
def test_recomputed_activations_route_their_own_micro_batch(build, recompute):
    """As in a pipeline, the second micro-batch runs forward before the first runs backward."""
    granularity, modules = recompute
    fields = {"recompute_granularity": granularity, **LOSSES["sequence"]}
    fields |= {"recompute_modules": modules} if modules else {"recompute_method": "uniform", "recompute_num_layers": 1}
    expected = gradients(build("blocks", "token", **LOSSES["sequence"]), ROWS, 2)
    model = build("blocks", "token", **fields)
    batches = [model.training_data_step(iter([rows])) for rows in batches_of(ROWS, 2)]
    for output in [model.forward_step(batch) for batch in batches]:
        output.loss_sum.backward()
    count = sum(batch.count for batch in batches)
    actual = {name: p.grad / count for name, p in model.named_parameters() if p.grad is not None}
    assert largest_difference(expected, actual) < 1e-6
    # Each token is counted once, although its layer ran twice.
    router = model.module.decoder.layers[0].mlp.router
    assert router.load_CE[1:].sum() == 2 * TOPK * ROWS["key_mask"].sum()


def test_losses_are_reported_without_their_coefficient(build):
    model = build("masked", "token", **LOSSES["z"])
    gradients(model, ROWS, 2)
    router = model.module.decoder.layers[0].mlp.router
    assert router.losses["z_loss_share"] == sum(SHARES["token"])
    mean = router.losses["z_loss"] / router.losses["z_loss_share"]
    # ln(4)^2 where all logits are zero.
    assert 0.5 < mean < 6


def test_unknown_tokens_to_balance(build):
    with pytest.raises(ValueError, match="balance_over='all' is unknown; choose from real, noised, masked"):
        build("masked", "token", balance_over="all")
