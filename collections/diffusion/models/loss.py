"""Sum and count of the loss over micro-batches and data-parallel ranks, and what the metrics need beside it."""

from collections.abc import Sequence

import torch
from megatron.core import parallel_state
from nemo.lightning.megatron_parallel import MegatronLossReduction
from torch import Tensor

from nemo_dllm.collections.diffusion.models.batch import CLEAN_BUCKET, NUM_TIME_BUCKETS, DiffusionBatch
from nemo_dllm.collections.diffusion.models.core import HeadOutput

# Layout of a report: sums over targets, then two sums for each time bucket.
_SCALARS = ("loss_sum", "nll_bound_sum", "count", "maskable", "masked")
_NUM_BUCKETS = NUM_TIME_BUCKETS + 1


class LossTotals:
    """Sums over one global batch (or a whole validation), fp64.

    Args:
        report: fp64 vector in the layout of :func:`report`.
    """

    def __init__(self, report: Tensor):
        self.report = report

    @classmethod
    def empty(cls, device: torch.device) -> "LossTotals":
        """Sums over nothing."""
        return cls(torch.zeros(len(_SCALARS) + 2 * _NUM_BUCKETS, dtype=torch.float64, device=device))

    def __add__(self, other: "LossTotals") -> "LossTotals":
        return LossTotals(self.report + other.report)

    @property
    def loss(self) -> Tensor:
        """The loss as optimised; 0 where nothing was maskable."""
        return self.report[0] / self.report[2].clamp(min=1)

    @property
    def nll_bound_sum(self) -> Tensor:
        """The likelihood bound summed over tokens, in nats."""
        return self.report[1]

    @property
    def nll_bound(self) -> Tensor:
        """Upper bound of the negative log-likelihood per maskable token, in nats (negative ELBO)."""
        return self.nll_bound_sum / self.report[3].clamp(min=1)

    @property
    def mask_ratio(self) -> Tensor:
        """Masked over maskable tokens."""
        return self.report[4] / self.report[3].clamp(min=1)

    @property
    def bucket_nll(self) -> Tensor:
        """Mean negative log-likelihood of masked tokens by time, in nats, NaN for an empty bucket: [buckets]."""
        return self._means[:NUM_TIME_BUCKETS]

    @property
    def next_token_nll(self) -> Tensor:
        """Mean negative log-likelihood of tokens predicted from the clean text before them; NaN without such a loss."""
        return self._means[CLEAN_BUCKET]

    @property
    def _means(self) -> Tensor:
        sums, counts = self.report[len(_SCALARS) :].view(2, _NUM_BUCKETS)
        return sums / counts


def report(batch: DiffusionBatch, output: HeadOutput) -> Tensor:
    """One micro-batch's sums as a vector, without waiting for the device."""
    nll_N = output.nll_N.double()
    device = nll_N.device
    buckets_2K = torch.zeros(2, _NUM_BUCKETS, dtype=torch.float64, device=device)
    buckets_2K[0].index_add_(0, batch.time_bucket_N, nll_N)
    buckets_2K[1].index_add_(0, batch.time_bucket_N, torch.ones_like(nll_N))
    sums_2 = torch.stack([output.loss_sum.detach().double(), torch.dot(nll_N, batch.nll_weight_N.double())])
    return torch.cat([sums_2, batch.counts_3, buckets_2K.flatten()])


class DiffusionLossReduction(MegatronLossReduction):
    """Hands Megatron (sum, count), so that any split of the global batch gives the same gradient.

    ``totals`` holds the sums of the last global batch over all data-parallel ranks.
    """

    def __init__(self):
        super().__init__()
        self.totals: LossTotals | None = None

    def forward(self, batch: DiffusionBatch, forward_out) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (loss sum, count, report) of one micro-batch."""
        # The mixed-precision wrapper gives back a plain tuple.
        output = HeadOutput(*forward_out)
        return output.loss_sum, torch.tensor(batch.count, dtype=torch.int), report(batch, output)

    def reduce(self, losses_reduced_per_micro_batch: Sequence[Tensor]) -> Tensor:
        """Loss of the global batch, a fp32 scalar."""
        total = torch.stack(list(losses_reduced_per_micro_batch)).sum(0)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        if group.size() > 1:
            torch.distributed.all_reduce(total, group=group)
        self.totals = LossTotals(total)
        return self.totals.loss.float()
