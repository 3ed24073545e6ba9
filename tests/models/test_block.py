"""Block diffusion through the tiny model: padding, packed documents, lengths off the grid, and what each loss reads.

Shape letters: B samples, L positions, V vocabulary.
"""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.nemo

MASK = 199


def tokens_of(rows, length, seed=0):
    return torch.randint(0, MASK, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def model(build_model):
    return build_model().eval()


@pytest.fixture(scope="module")
def objective_of():
    """Builds an objective by the name of its kind: blocks of 4 and one time per sequence, or masked diffusion."""
    from nemo_dllm.collections.diffusion.objectives import BlockDiffusion, MaskedDiffusion

    def build(kind="block", **settings):
        common = {"mask_token_id": MASK, "time_sampling": "iid"}
        if kind == "masked":
            return MaskedDiffusion(**{**common, **settings})
        return BlockDiffusion(**{**common, "block_size": 4, **settings})

    return build


@pytest.fixture(scope="module")
def run(model):
    """The batch that an objective makes of tokens, under uniforms that mask about a half, and the head's output."""
    from nemo_dllm.collections.diffusion.models.batch import corrupt_batch

    @torch.no_grad()
    def run(objective, tokens_BL, uniforms_BL=None, loss_mask=None, time=0.5, **tensors):
        uniforms_BL = uniforms_of(*tokens_BL.shape) if uniforms_BL is None else uniforms_BL
        objective.corrupt = partial(
            objective.corrupt, time=torch.full((len(tokens_BL),), time), uniforms_BL=uniforms_BL
        )
        batch = {
            "tokens": tokens_BL,
            "loss_mask": torch.ones_like(tokens_BL, dtype=torch.bool) if loss_mask is None else loss_mask,
            "sample_index": torch.arange(len(tokens_BL)),
            **tensors,
        }
        batch = corrupt_batch(batch, objective, validation=False)
        return batch, model.forward_step(batch)

    return run


def uniforms_of(rows, length):
    return torch.rand(rows, length, generator=torch.Generator().manual_seed(7))


def nll_by_token(batch, output):
    """Of text whose tokens all differ."""
    return dict(zip(batch.targets.token_N.tolist(), output.nll_N.tolist(), strict=True))


def close(expected):
    return pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("kind", ["block", "masked"])
def test_packed_documents_are_as_if_alone(run, objective_of, kind):
    """Documents of 5, 6 and 1 tokens: off the grid of blocks, which begins anew with each."""
    tokens_1L = torch.randperm(MASK, generator=torch.Generator().manual_seed(1))[None, :12]
    uniforms_1L = uniforms_of(1, 12).clone()
    uniforms_1L[0, 11] = 0.0
    document_1L = torch.tensor([[3] * 5 + [4] * 6 + [9]])
    packed = nll_by_token(*run(objective_of(kind), tokens_1L, uniforms_1L, document_ids=document_1L))
    alone = {}
    for start, stop in ((0, 5), (5, 11), (11, 12)):
        part = slice(start, stop)
        alone |= nll_by_token(*run(objective_of(kind), tokens_1L[:, part], uniforms_1L[:, part]))
    assert packed == close(alone)
    assert len(packed) >= 5
    one_text = nll_by_token(*run(objective_of(kind), tokens_1L, uniforms_1L))
    assert one_text != pytest.approx(packed, rel=1e-2)


@pytest.mark.parametrize("start", ["clean_prefix", "reference"])
def test_packed_documents_are_as_if_alone_under_the_shift(run, objective_of, start):
    tokens_1L = torch.randperm(MASK, generator=torch.Generator().manual_seed(1))[None, :12]
    shifted = partial(objective_of, right_shift=True, block_start=start, ar_loss_weight=0.5)
    uniforms_1L = torch.zeros(1, 12)
    document_1L = torch.tensor([[0] * 5 + [1] * 7])
    batch, output = run(shifted(), tokens_1L, uniforms_1L, document_ids=document_1L)
    alone = [run(shifted(), tokens_1L[:, part], uniforms_1L[:, part]) for part in (slice(0, 5), slice(5, 12))]
    assert batch.count == sum(part.count for part, _ in alone) == 10
    assert output.loss_sum.item() == close(sum(part.loss_sum.item() for _, part in alone))


@pytest.mark.parametrize("kind", ["block", "masked"])
def test_every_row_of_a_padded_batch_is_as_if_alone(run, objective_of, kind):
    lengths = (4, 7, 10)
    tokens_BL, uniforms_BL = tokens_of(3, 10), uniforms_of(3, 10)
    key_mask = torch.arange(10) < torch.tensor(lengths)[:, None]
    batch, output = run(objective_of(kind), tokens_BL, uniforms_BL, loss_mask=key_mask, key_mask=key_mask)
    sample_N = batch.targets.row_N % 3
    for row, length in enumerate(lengths):
        _, alone = run(objective_of(kind), tokens_BL[row : row + 1, :length], uniforms_BL[row : row + 1, :length])
        assert output.nll_N[sample_N == row].tolist() == close(alone.nll_N.tolist())
    other_pads_BL = torch.where(key_mask, tokens_BL, tokens_of(3, 10, seed=5))
    _, other = run(objective_of(kind), other_pads_BL, uniforms_BL, loss_mask=key_mask, key_mask=key_mask)
    assert torch.equal(other.nll_N, output.nll_N)


@pytest.mark.parametrize("length", [3, 10])
def test_lengths_off_the_block_grid(run, objective_of, length):
    """As the same rows filled up to whole blocks by pads that nobody sees and nothing trains."""
    tokens_BL, uniforms_BL = tokens_of(2, 12), uniforms_of(2, 12)
    real = (torch.arange(12) < length).expand(2, -1)
    short_batch, short = run(objective_of(), tokens_BL[:, :length], uniforms_BL[:, :length])
    full_batch, full = run(objective_of(), tokens_BL, uniforms_BL, loss_mask=real, key_mask=real)
    assert short_batch.count == full_batch.count == 2 * length
    assert short.loss_sum.item() == close(full.loss_sum.item())


@pytest.mark.parametrize("block_size", [12, 100])
def test_one_block_is_masked_diffusion(run, objective_of, block_size):
    tokens_BL = tokens_of(2, 12)
    _, blocks = run(objective_of(block_size=block_size), tokens_BL)
    _, whole = run(objective_of("masked"), tokens_BL)
    torch.testing.assert_close(blocks.nll_N, whole.nll_N, rtol=1e-5, atol=1e-6)
    _, smaller = run(objective_of(block_size=4), tokens_BL)
    assert (smaller.nll_N - whole.nll_N).abs().max() > 1e-2


@torch.no_grad()
def test_one_pass_is_block_by_block(run, model, objective_of):
    """The noised tokens of a block are scored as in a pass over the clean blocks before it and itself."""
    from nemo_dllm.collections.diffusion.attention.masks import BlockCausal

    tokens_1L = torch.randperm(MASK, generator=torch.Generator().manual_seed(2))[None, :10]
    batch, output = run(objective_of(), tokens_1L)
    actual = nll_by_token(batch, output)
    noised_1L, clean_1L = batch.input_ids.split(10, dim=1)
    expected = {}
    for start in (0, 4, 8):
        seen = torch.cat([clean_1L[:, :start], noised_1L[:, start : start + 4]], dim=1)
        log_LV = model(seen, attention_mask=BlockCausal(4))[0].log_softmax(-1)
        for position in range(start, seen.shape[1]):
            token = tokens_1L[0, position].item()
            if seen[0, position] == MASK:
                expected[token] = -log_LV[position, token].item()
    assert actual == close(expected)


@torch.no_grad()
def test_a_shifted_block_starts_from_what_a_sampler_has(run, model, objective_of):
    """The clean blocks before it, block-causal, at their last position."""
    from nemo_dllm.collections.diffusion.attention.masks import BlockCausal

    tokens_1L = torch.randperm(MASK, generator=torch.Generator().manual_seed(3))[None, :10]
    noise = {"uniforms_BL": torch.zeros(1, 10)}
    actual = nll_by_token(*run(objective_of(right_shift=True), tokens_1L, **noise))
    log_LV = model(tokens_1L, attention_mask=BlockCausal(4))[0].log_softmax(-1)
    for start in (4, 8):
        token = tokens_1L[0, start].item()
        assert actual[token] == close(-log_LV[start - 1, token].item())
    reference = nll_by_token(*run(objective_of(right_shift=True, block_start="reference"), tokens_1L, **noise))
    firsts = tokens_1L[0, [4, 8]].tolist()
    assert all((reference[token] == actual[token]) == (token not in firsts) for token in actual)


@torch.no_grad()
def test_the_next_token_loss_is_that_of_a_causal_model(run, model, objective_of):
    from nemo_dllm.collections.diffusion.attention.masks import BlockCausal

    tokens_BL = tokens_of(2, 10)
    batch, output = run(objective_of(ar_loss_weight=0.25), tokens_BL)
    log_BLV = model(tokens_BL, attention_mask=BlockCausal(1)).log_softmax(-1)
    expected_BL = -log_BLV[:, :-1].gather(-1, tokens_BL[:, 1:, None])[..., 0]
    clean_N = batch.time_bucket_N == 10
    torch.testing.assert_close(output.nll_N[clean_N], expected_BL.flatten(), rtol=1e-5, atol=1e-5)
    assert batch.targets.loss_weight_N[clean_N].unique().tolist() == [0.25]


def test_a_next_token_loss_is_a_metric_of_its_own(run, objective_of):
    from nemo_dllm.collections.diffusion.models.loss import LossTotals, report

    batch, output = run(objective_of(ar_loss_weight=0.25), tokens_of(2, 10))
    clean_N = batch.time_bucket_N == 10
    totals = LossTotals(report(batch, output))
    assert totals.next_token_nll.item() == close(output.nll_N[clean_N].mean().item())
    assert totals.bucket_nll[4].item() == close(output.nll_N[~clean_N].mean().item())
    assert totals.mask_ratio.item() == (~clean_N).sum().item() / 20
    plain, _ = run(objective_of(), tokens_of(2, 10))
    bound = (output.nll_N[~clean_N] * plain.nll_weight_N).sum().item() / 20
    assert totals.nll_bound.item() == close(bound)


@pytest.mark.parametrize("kind", ["block", "masked"])
def test_a_pair_is_two_runs(run, objective_of, kind):
    """View 1 masks exactly what view 0 shows; padding and documents go with both."""
    tokens_BL, uniforms_BL = tokens_of(2, 12), uniforms_of(2, 12)
    key_mask = torch.arange(12) < torch.tensor([[12], [9]])
    tensors = {
        "loss_mask": key_mask,
        "key_mask": key_mask,
        "document_ids": (torch.arange(12) >= 5).long().expand(2, -1),
    }
    batch, output = run(objective_of(kind, complementary=True), tokens_BL, uniforms_BL, **tensors)
    _, first = run(objective_of(kind), tokens_BL, uniforms_BL, **tensors)
    _, second = run(objective_of(kind), tokens_BL, 1 - uniforms_BL, **tensors)
    view_N = batch.targets.row_N % 4 // 2
    assert output.nll_N[view_N == 0].tolist() == close(first.nll_N.tolist())
    assert output.nll_N[view_N == 1].tolist() == close(second.nll_N.tolist())
    # At t = 1/2 both weights are 2, and a pair's is the mean.
    assert output.loss_sum.item() == close((first.loss_sum + second.loss_sum).item() / 2)
    assert (batch.count, batch.counts_3.tolist()) == (21, [21, 21, 10.5])


@pytest.mark.parametrize(
    "data, message",
    [
        ({"seq_length": 3}, "model.objective.block_size=4 is longer than data.seq_length=3; choose a smaller block"),
        (
            {"seq_length": 8, "document_boundaries": None},
            "data.document_boundaries=None: .* set document_boundaries=Tr",
        ),
    ],
)
def test_data_that_does_not_fit_blocks(build_model, objective_of, data, message):
    model = build_model(objective=objective_of())
    from nemo import lightning as nl

    trainer = nl.Trainer(devices=1, accelerator="cpu", strategy=nl.MegatronStrategy(), logger=False)
    trainer.datamodule = SimpleNamespace(micro_batch_size=1, global_batch_size=4, **data)
    model.trainer = trainer
    with pytest.raises(ValueError, match=message):
        model.setup("fit")
