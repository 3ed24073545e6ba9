"""The masked-position head: logits and cross-entropy only where a token was masked, chunk by chunk.

Shape letters: N target positions of a micro-batch, H hidden size, V vocabulary rows of this rank, C chunk.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

# Rows per chunk on a GPU: 4,096 rows of a vocabulary of 151,936 in bf16 are 1.2 GB.
DEFAULT_CHUNK = 4096


class VocabularyShard(NamedTuple):
    """The slice of the vocabulary that this tensor-parallel rank holds."""

    start: int
    """Vocabulary id of the first row."""
    valid: int
    """Rows that stand for a token; the rest of the shard is padding and takes no probability."""
    group: dist.ProcessGroup | None
    """Ranks that hold the other slices, or None where this rank holds them all."""


class HeadOutput(NamedTuple):
    """What the head returns."""

    loss_sum: Tensor
    """fp32 scalar: sum over positions of loss weight times negative log-likelihood. The only differentiable part."""
    nll_N: Tensor
    """fp32 [N]: negative log-likelihood of each target, in nats."""


def masked_cross_entropy(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    loss_weight_N: Tensor,
    shard: VocabularyShard,
    chunk: int = DEFAULT_CHUNK,
) -> HeadOutput:
    """Weighted cross-entropy of a linear head, exact over vocabulary shards, without ever holding [N, V] logits.

    The loss is linear in the negative log-likelihoods and its weights are known beforehand, so gradients are formed
    in the forward pass while a chunk's logits are at hand: three matrix products instead of four, and no logits kept.

    Args:
        hidden_NH: hidden states of the target positions, the same on every rank of ``shard.group``.
        weight_VH: this rank's rows of the head.
        targets_N: int64 token ids over the whole vocabulary.
        loss_weight_N: fp32 weights of the negative log-likelihoods.
        shard: which rows ``weight_VH`` holds.
        chunk: positions per chunk, at least 1.

    Returns:
        :class:`HeadOutput`. The gradient of ``hidden_NH`` is this rank's share; the caller's copy or gather region
        sums it over ``shard.group``.
    """
    return HeadOutput(*_MaskedCrossEntropy.apply(hidden_NH, weight_VH, targets_N, loss_weight_N, shard, chunk))


class _MaskedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, targets_N, loss_weight_N, shard, chunk):
        ctx.dtypes = hidden_NH.dtype, weight_VH.dtype
        if hidden_NH.dtype == torch.float16:
            # The loss scale that saves fp16 gradients from underflow arrives in the backward pass only.
            hidden_NH, weight_VH = hidden_NH.float(), weight_VH.float()
        nll_N = torch.empty_like(loss_weight_N)
        grad_hidden_NH = torch.empty_like(hidden_NH) if ctx.needs_input_grad[0] else None
        # fp32: the sum runs over every chunk.
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for start in range(0, len(targets_N), chunk):
            rows = slice(start, start + chunk)
            hidden_CH = hidden_NH[rows]
            logits_CV = hidden_CH @ weight_VH.t()
            if shard.valid < weight_VH.size(0):
                logits_CV[:, shard.valid :] = float("-inf")
            log_partition_C, nll_N[rows] = _log_partition_and_nll(logits_CV, targets_N[rows], shard)
            if grad_hidden_NH is None and grad_weight_VH is None:
                continue
            grad_logits_CV = _logit_gradient_(
                logits_CV, log_partition_C, targets_N[rows] - shard.start, loss_weight_N[rows]
            )
            if grad_hidden_NH is not None:
                torch.mm(grad_logits_CV, weight_VH, out=grad_hidden_NH[rows])
            if grad_weight_VH is not None:
                _accumulate(grad_weight_VH, grad_logits_CV.t(), hidden_CH)
        if grad_weight_VH is not None:
            grad_weight_VH = grad_weight_VH.to(weight_VH.dtype)
        ctx.save_for_backward(grad_hidden_NH, grad_weight_VH)
        ctx.mark_non_differentiable(nll_N)
        return (nll_N * loss_weight_N).sum(), nll_N

    @staticmethod
    def backward(ctx, grad_loss, _grad_nll):
        scaled = [
            None if grad is None else (grad * grad_loss.to(grad.dtype)).to(dtype)
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*scaled, None, None, None, None)


def _log_partition_and_nll(logits_CV: Tensor, targets_C: Tensor, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    """Log of the softmax denominator and negative log-likelihood of each row, over all shards, in fp32."""
    maximum_C, sum_C, target_logit_C = _row_statistics(logits_CV, targets_C - shard.start)
    if shard.group is not None:
        local_maximum_C = maximum_C.clone()
        dist.all_reduce(maximum_C, op=dist.ReduceOp.MAX, group=shard.group)
        sums_2C = torch.stack([sum_C * torch.exp(local_maximum_C - maximum_C), target_logit_C])
        dist.all_reduce(sums_2C, group=shard.group)
        sum_C, target_logit_C = sums_2C
    log_partition_C = maximum_C + sum_C.log()
    return log_partition_C, log_partition_C - target_logit_C


def _row_statistics(logits_CV: Tensor, local_targets_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Maximum, sum of exp(logit - maximum), and the target's logit (0 where another shard holds it), fp32."""
    if logits_CV.is_cuda:
        from nemo_dllm.collections.diffusion.kernels import cross_entropy

        return cross_entropy.row_statistics(logits_CV, local_targets_C)
    # A shard that is all padding has no finite logit.
    maximum_C = logits_CV.amax(-1).float().clamp(min=torch.finfo(torch.float32).min)
    sum_C = torch.exp(logits_CV.float() - maximum_C[:, None]).sum(-1)
    here_C = (local_targets_C >= 0) & (local_targets_C < logits_CV.size(1))
    index_C1 = local_targets_C.clamp(0, logits_CV.size(1) - 1)[:, None]
    return maximum_C, sum_C, torch.where(here_C, logits_CV.gather(1, index_C1)[:, 0].float(), 0.0)


def _logit_gradient_(logits_CV: Tensor, log_partition_C: Tensor, local_targets_C: Tensor, weight_C: Tensor) -> Tensor:
    """Overwrite logits with the gradient of weight * nll: weight * (softmax - one-hot)."""
    if logits_CV.is_cuda:
        from nemo_dllm.collections.diffusion.kernels import cross_entropy

        return cross_entropy.logit_gradient_(logits_CV, log_partition_C, local_targets_C, weight_C)
    gradient_CV = torch.exp(logits_CV.float() - log_partition_C[:, None])
    here_C = (local_targets_C >= 0) & (local_targets_C < logits_CV.size(1))
    gradient_CV[here_C, local_targets_C[here_C]] -= 1.0
    return logits_CV.copy_(gradient_CV * weight_C[:, None])


def _accumulate(total_VH: Tensor, left_VC: Tensor, right_CH: Tensor) -> None:
    """total += left @ right, the sum kept in fp32."""
    if left_VC.dtype == torch.float32:
        total_VH.addmm_(left_VC, right_CH)
    elif left_VC.is_cuda:
        torch.addmm(total_VH, left_VC, right_CH, out_dtype=torch.float32, out=total_VH)
    else:
        total_VH += left_VC @ right_CH
