"""Sums, counts and metrics of a global batch."""

import math

import pytest
import torch

pytestmark = [pytest.mark.nemo, pytest.mark.usefixtures("single_process")]


def micro_batch(nll, loss_weight, nll_weight, bucket, count, maskable):
    from nemo_dllm.collections.diffusion.attention.masks import Bidirectional
    from nemo_dllm.collections.diffusion.models.batch import DiffusionBatch
    from nemo_dllm.collections.diffusion.models.core import Targets
    from nemo_dllm.collections.diffusion.models.head import HeadOutput

    nll_N, loss_weight_N = torch.tensor(nll), torch.tensor(loss_weight)
    indices_N = torch.zeros(len(nll), dtype=torch.long)
    batch = DiffusionBatch(
        input_ids=torch.zeros(1, 4, dtype=torch.long),
        pattern=Bidirectional(),
        targets=Targets(indices_N, indices_N, loss_weight_N),
        nll_weight_N=torch.tensor(nll_weight),
        time_bucket_N=torch.tensor(bucket, dtype=torch.long),
        count=count,
        counts_3=torch.tensor([count, maskable, len(nll)], dtype=torch.float64),
    )
    return batch, HeadOutput((nll_N * loss_weight_N).sum(), nll_N)


FIRST = dict(nll=[1.0, 3.0], loss_weight=[2.0, 2.0], nll_weight=[2.0, 2.0], bucket=[4, 4], count=8, maskable=8)
SECOND = dict(nll=[5.0], loss_weight=[1.0], nll_weight=[4.0], bucket=[9], count=2, maskable=4)
EMPTY = dict(nll=[], loss_weight=[], nll_weight=[], bucket=[], count=0, maskable=0)


def reduce(*micro_batches):
    from nemo_dllm.collections.diffusion.models.loss import DiffusionLossReduction

    reduction = DiffusionLossReduction()
    outputs = [reduction.forward(*micro_batch(**fields)) for fields in micro_batches]
    return outputs, reduction.reduce([report for _, _, report in outputs]), reduction.totals


def test_sums_and_counts_add_before_they_are_divided():
    outputs, loss, totals = reduce(FIRST, SECOND)
    assert [(total.item(), count.item()) for total, count, _ in outputs] == [(8.0, 8), (5.0, 2)]
    # Not the mean of 8/8 and 5/2.
    assert loss.item() == pytest.approx(13 / 10)
    assert loss.dtype == torch.float32
    assert totals.nll_bound.item() == pytest.approx((8 + 20) / 12)
    assert totals.mask_ratio.item() == pytest.approx(3 / 12)


def test_mean_likelihood_by_time():
    _, _, totals = reduce(FIRST, SECOND)
    by_time = totals.bucket_nll.tolist()
    assert by_time[4] == 2.0
    assert by_time[9] == 5.0
    assert all(math.isnan(value) for index, value in enumerate(by_time) if index not in (4, 9))


def test_nothing_maskable_is_a_loss_of_zero():
    outputs, loss, totals = reduce(EMPTY)
    assert outputs[0][1].item() == 0
    assert loss.item() == totals.nll_bound.item() == totals.mask_ratio.item() == 0
    _, with_a_full_one, _ = reduce(FIRST, EMPTY)
    assert with_a_full_one.item() == 1.0


def test_global_batches_add():
    from nemo_dllm.collections.diffusion.models.loss import LossTotals

    _, _, first = reduce(FIRST)
    _, _, second = reduce(SECOND)
    _, _, both = reduce(FIRST, SECOND)
    assert torch.equal((first + second).report, both.report)
    assert torch.equal((LossTotals.empty(torch.device("cpu")) + first).report, first.report)


def test_sums_keep_small_terms():
    """A million micro-batches of 1.0 on top of 2**24: fp32 would stop counting."""
    from nemo_dllm.collections.diffusion.models.loss import LossTotals

    _, _, one = reduce(dict(FIRST, nll=[1.0], loss_weight=[1.0], nll_weight=[1.0], bucket=[0], count=1, maskable=1))
    large = LossTotals(one.report * 2**24)
    assert (large + one).report[1].item() == 2**24 + 1


def test_the_mixed_precision_wrapper_may_hand_over_a_plain_tuple():
    from nemo_dllm.collections.diffusion.models.loss import DiffusionLossReduction

    batch, output = micro_batch(**FIRST)
    assert DiffusionLossReduction().forward(batch, tuple(output))[0].item() == 8.0
