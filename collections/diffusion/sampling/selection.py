"""Which predictions of a step are committed. They are judged on the model's device, and chosen among on the CPU.

Shape letters: B rows, T canvas positions, L candidates of a row, N scored positions of all rows in row-major order.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nemo_dllm.collections.diffusion.sampling.config import SamplerConfig
from nemo_dllm.collections.diffusion.sampling.noise import gumbel
from nemo_dllm.collections.diffusion.sampling.remasking import REMASKING_POLICIES, Predictions


class Judged(NamedTuple):
    """Predictions as far as the choice among them needs; on the CPU.

    Attributes:
        tokens_N: int64, the token chosen at each position.
        scores_N: float, by remasking policy; the highest are committed first.
        probability_N: float32, the model's probability of each chosen token.
    """

    tokens_N: Tensor
    scores_N: Tensor
    probability_N: Tensor


def judge(predictions: Predictions, config: SamplerConfig) -> Judged:
    """Score predictions and bring them to the CPU: the one time in a step that it waits for the device.

    Raises:
        ValueError: the model's logits leave no token to choose: there are NaN among them, or no finite one.
    """
    scores_N = REMASKING_POLICIES[config.remasking](predictions)
    if config.remasking_temperature > 0:
        # The largest of score / T plus Gumbel noise are a draw without replacement (Kool et al. 2019).
        noise_N = gumbel(predictions.draw_uniform_N().double())
        # In float32 a temperature next to 0 would be 0, and every score infinite.
        scores_N = scores_N.double() / config.remasking_temperature + noise_N
    probability_N = predictions.chosen_probability()
    # float64 holds every token id, and float32 without rounding.
    moved_3N = torch.stack([values.double() for values in (predictions.tokens_N, scores_N, probability_N)]).cpu()
    if moved_3N[2].isnan().any():
        raise ValueError(
            "the model's logits are NaN, or -inf for every token that may be chosen; check its weights, and its dtype: "
            "float16 overflows where bfloat16 does not"
        )
    return Judged(moved_3N[0].long(), moved_3N[1].to(scores_N.dtype), moved_3N[2].float())


def select_commits(
    judged: Judged, scored_BT: Tensor, candidates_BT: Tensor, quota_B: Tensor, config: SamplerConfig
) -> Tensor:
    """The candidates to commit: the ``quota_B`` best of each row by policy, and all that are sure enough.

    Args:
        judged: what was predicted at the scored positions.
        scored_BT: bool, where predictions were made.
        candidates_BT: bool, those of them that may be committed.
        quota_B: int64, tokens to commit at least, as far as there are candidates.
        config: threshold, factor and quirks are read.

    Returns:
        bool [B, T].
    """
    if config.quirks.topk_ties:
        selected_BT = _topk(_spread(judged.scores_N, scored_BT, candidates_BT), quota_B)
    else:
        scores_BL, valid_BL = _by_row(judged.scores_N, scored_BT, candidates_BT)
        selected_BT = torch.zeros_like(candidates_BT).masked_scatter(
            candidates_BT, (_ranks(scores_BL) < quota_B[:, None])[valid_BL]
        )
    sure_enough = {"threshold": _above_threshold, "factor": _within_factor}
    for field, rule in sure_enough.items():
        bound = getattr(config, field)
        if bound is not None:
            probability_BL, valid_BL = _by_row(judged.probability_N, scored_BT, candidates_BT)
            sure_BT = torch.zeros_like(candidates_BT)
            selected_BT = selected_BT | sure_BT.masked_scatter(candidates_BT, rule(probability_BL, bound)[valid_BL])
    return selected_BT & candidates_BT


def _spread(values_N: Tensor, scored_BT: Tensor, candidates_BT: Tensor) -> Tensor:
    """Values on the canvas, -inf where there is no candidate."""
    lowest_BT = torch.full(scored_BT.shape, -torch.inf, dtype=values_N.dtype)
    return lowest_BT.masked_scatter(scored_BT, values_N).masked_fill(~candidates_BT, -torch.inf)


def _by_row(values_N: Tensor, scored_BT: Tensor, candidates_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Values of the candidates of each row, from left to right, and bool where they are; -inf behind them."""
    counts_B = candidates_BT.sum(dim=1)
    valid_BL = torch.arange(int(counts_B.max())) < counts_B[:, None]
    lowest_BL = torch.full(valid_BL.shape, -torch.inf, dtype=values_N.dtype)
    return lowest_BL.masked_scatter(valid_BL, values_N[candidates_BT[scored_BT]]), valid_BL


def _ranks(scores_BL: Tensor) -> Tensor:
    """Place of each candidate in its row, 0 for the best."""
    # topk may return equal scores in any order; a stable sort puts the lowest position first.
    return scores_BL.argsort(dim=1, descending=True, stable=True).argsort(dim=1)


def _above_threshold(probability_BL: Tensor, threshold: float) -> Tensor:
    return probability_BL > threshold


def _within_factor(probability_BL: Tensor, factor: float) -> Tensor:
    """The n most confident positions, (n' + 1) * (1 - probability) <= factor for each n' up to n."""
    sorted_BL = probability_BL.sort(dim=1, descending=True).values
    place_L = torch.arange(1, sorted_BL.shape[1] + 1)
    sure_BL = (place_L + 1) * (1 - sorted_BL) <= factor
    return _ranks(probability_BL) < sure_BL.int().cumprod(dim=1).sum(dim=1, keepdim=True)


def _topk(scores_BT: Tensor, quota_B: Tensor) -> Tensor:
    selected_BT = torch.zeros_like(scores_BT, dtype=torch.bool)
    for selected_T, scores_T, quota in zip(selected_BT, scores_BT, quota_B.tolist(), strict=True):
        selected_T[scores_T.topk(min(quota, len(scores_T))).indices] = True
    return selected_BT
