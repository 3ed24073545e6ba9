"""Which predictions of a step are committed. They are judged on the model's device, and chosen among on the CPU.

Shape letters: B rows, T canvas positions, L candidates of a row, N judged positions of all rows in row-major order.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import isnan
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nemo_dllm.collections.diffusion.sampling.config import SamplerConfig
from nemo_dllm.collections.diffusion.sampling.noise import gumbel
from nemo_dllm.collections.diffusion.sampling.remasking import REMASKING_POLICIES, Predictions


class Judged(NamedTuple):
    """Predictions as far as the choice among them needs; on the CPU.

    Attributes:
        tokens_N: int64, the token chosen at each position.
        scores_N: float64, by remasking policy; the highest are committed first.
        probability_N: float32, the model's probability of each chosen token.
    """

    tokens_N: Tensor
    scores_N: Tensor
    probability_N: Tensor

    def at(self, chosen_N: Tensor) -> "Judged":
        """Some of the predictions; ``chosen_N`` is bool."""
        return Judged(*(values_N[chosen_N] for values_N in self))


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
    tokens_N, scores_N, probability_N = moved_3N.unbind()
    if isnan(probability_N.sum()):
        raise ValueError(
            "the model's logits are NaN, or -inf for every token that may be chosen; check its weights, and its dtype: "
            "float16 overflows where bfloat16 does not"
        )
    return Judged(tokens_N.long(), scores_N, probability_N.float())


def select_commits(
    judged: Judged, candidates_BT: Tensor, counts: Sequence[int], quotas: Sequence[int], config: SamplerConfig
) -> Tensor:
    """The candidates to commit: the ``quotas`` best of each row by policy, and all that are sure enough.

    Args:
        judged: what was predicted at the candidates.
        candidates_BT: bool, positions that may be committed.
        counts: per row, how many these are.
        quotas: per row, tokens to commit at least, as far as there are candidates.
        config: threshold, factor and quirks are read.

    Returns:
        bool [B, T].
    """
    if config.quirks.topk_ties:
        selected_N = _topk(judged.scores_N, candidates_BT, quotas)
    else:
        selected_N = _best_of_rows(judged.scores_N, counts, quotas)
    if config.threshold is not None:
        selected_N |= judged.probability_N > config.threshold
    if config.factor is not None:
        within = _within_factor(judged.probability_N, counts, config.factor)
        selected_N |= _best_of_rows(judged.probability_N, counts, within)
    return torch.zeros_like(candidates_BT).masked_scatter_(candidates_BT, selected_N)


def _best_of_rows(values_N: Tensor, counts: Sequence[int], numbers: Sequence[int]) -> Tensor:
    """The highest of each row, so many as ``numbers`` says, the lowest position first among equals; bool [N].

    Rows have few candidates: to sort them as numbers of Python takes less time than to call the sort of a tensor.
    """
    values, chosen = values_N.tolist(), []
    for (start, end), number in zip(pairwise(accumulate(counts, initial=0)), numbers, strict=True):
        chosen += sorted(range(start, end), key=values.__getitem__, reverse=True)[:number]
    selected_N = torch.zeros(len(values), dtype=torch.bool)
    return selected_N.index_fill_(0, torch.tensor(chosen, dtype=torch.int64), True)


def _within_factor(probability_N: Tensor, counts: Sequence[int], factor: float) -> list[int]:
    """The largest n of each row with (n' + 1) * (1 - the n'-th highest probability) <= factor for each n' up to n."""
    probability_BL = pad_sequence(probability_N.split(counts), batch_first=True, padding_value=-torch.inf)
    sorted_BL = probability_BL.sort(dim=1, descending=True).values
    place_L = torch.arange(1, sorted_BL.shape[1] + 1)
    sure_BL = (place_L + 1) * (1 - sorted_BL) <= factor
    return sure_BL.int().cumprod(dim=1).sum(dim=1).tolist()


def _topk(scores_N: Tensor, candidates_BT: Tensor, quotas: Sequence[int]) -> Tensor:
    """The best of each row as ``torch.topk`` finds them on its canvas, which is -inf elsewhere; bool [N]."""
    lowest_BT = torch.full(candidates_BT.shape, -torch.inf, dtype=scores_N.dtype)
    scores_BT = lowest_BT.masked_scatter(candidates_BT, scores_N)
    selected_BT = torch.zeros_like(candidates_BT)
    for selected_T, scores_T, quota in zip(selected_BT, scores_BT, quotas, strict=True):
        selected_T[scores_T.topk(min(quota, len(scores_T))).indices] = True
    return selected_BT[candidates_BT]
