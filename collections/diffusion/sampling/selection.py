"""Which predictions of a step are committed. They are judged on the model's device, and chosen among on the CPU.

There are few of them, and numbers of Python take less time than the operations on tensors that would do the same.

Shape letters: B rows, T canvas positions, N scored positions of all rows in row-major order.
"""

from collections.abc import Sequence
from ctypes import c_float
from itertools import accumulate, chain
from math import isclose, isnan
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from nemo_dllm.collections.diffusion.sampling.config import SamplerConfig
from nemo_dllm.collections.diffusion.sampling.device import OnItsWay
from nemo_dllm.collections.diffusion.sampling.noise import gumbel
from nemo_dllm.collections.diffusion.sampling.remasking import REMASKING_POLICIES, Predictions

# Of scores in float32: a probability, or an entropy in nats.
_ROUNDING = {"rel_tol": 1e-6, "abs_tol": 1e-6}


class Scored(NamedTuple):
    """The scored positions of a step, by their numbers from 0 to N - 1.

    Attributes:
        places: where each is on the canvas, whose positions are counted row after row.
        candidates: per row, those that may be committed, ascending.
        width: positions of a row of the canvas.
    """

    places: list[int]
    candidates: list[Sequence[int]]
    width: int

    @classmethod
    def of(
        cls, candidates: Sequence[Sequence[int]], width: int, others: Sequence[Sequence[int]] | None = None
    ) -> "Scored":
        """Places that may be committed, by row, and others that are scored as well."""
        if others is None:
            ends = [0, *accumulate(map(len, candidates))]
            return cls(list(chain.from_iterable(candidates)), list(map(range, ends, ends[1:])), width)
        rows = [sorted({*row, *other}) for row, other in zip(candidates, others, strict=True)]
        places = list(chain.from_iterable(rows))
        number_of = {place: number for number, place in enumerate(places)}
        return cls(places, [[number_of[place] for place in row] for row in candidates], width)

    def at(self, numbers: Sequence[int]) -> list[int]:
        """The places of some of them."""
        return [self.places[n] for n in numbers]


class Judged(NamedTuple):
    """Predictions as far as the choice among them needs, one entry per scored position.

    Attributes:
        tokens: the token chosen.
        scores: by remasking policy; the highest are committed first.
        probabilities: the model's, of the chosen token; numbers that float32 holds.
    """

    tokens: list[int]
    scores: list[float]
    probabilities: list[float]


def rate(predictions: Predictions, config: SamplerConfig) -> Tensor:
    """What ``judge`` reads, float64 [2, N] or [3, N] on the model's device: tokens, probabilities, and other scores."""
    scores_N = REMASKING_POLICIES[config.remasking](predictions)
    if config.remasking_temperature > 0:
        # The largest of score / T plus Gumbel noise are a draw without replacement (Kool et al. 2019).
        noise_N = gumbel(predictions.draw_uniform_N().double())
        # In float32 a temperature next to 0 would be 0, and every score infinite.
        scores_N = scores_N.double() / config.remasking_temperature + noise_N
    probabilities_N = predictions.chosen_probability()
    values = [predictions.tokens_N, probabilities_N] + [scores_N] * (scores_N is not probabilities_N)
    # float64 holds every token id, and float32 without rounding.
    return torch.stack([values_N.double() for values_N in values])


def judge(rated: Tensor | OnItsWay, config: SamplerConfig) -> Judged:
    """Bring ``rate``'s numbers to the CPU, which waits for a pass here and, to rehearse, for most of it before.

    Raises:
        ValueError: the model's logits leave no token to choose: there are NaN among them, or no finite one; or a
            policy gives NaN.
    """
    tokens, probabilities, *others = rated.tolist()
    scores = others[0] if others else probabilities
    if isnan(sum(probabilities)):
        raise ValueError(
            "the model's logits are NaN, or -inf for every token that may be chosen; check its weights, and its dtype: "
            "float16 overflows where bfloat16 does not"
        )
    if any(map(isnan, scores)):
        raise ValueError(f"remasking={config.remasking!r} scored a prediction as NaN, which has no place in an order")
    return Judged(list(map(int, tokens)), scores, probabilities)


def select_commits(judged: Judged, scored: Scored, quotas: Sequence[int], config: SamplerConfig) -> list[int]:
    """The candidates to commit: the ``quotas`` best of each row by policy, and all that are sure enough.

    Args:
        judged: what was predicted at the scored positions.
        scored: which of them may be committed.
        quotas: per row, tokens to commit at least, as far as there are candidates.
        config: threshold, factor and quirks are read.

    Returns:
        Numbers of scored positions, each once.
    """
    chosen: set[int] = set()
    for row, quota in zip(scored.candidates, quotas, strict=True):
        if config.quirks.topk_ties:
            chosen.update(_topk(judged.scores, scored, row, quota))
        else:
            chosen.update(_best(judged.scores, row, quota))
        if config.threshold is not None:
            chosen.update(above(judged.probabilities, row, config.threshold))
        if config.factor is not None:
            chosen.update(_within_factor(judged.probabilities, row, config.factor))
    return sorted(chosen)


def select_edits(judged: Judged, scored: Scored, tokens_N: numpy.ndarray, config: SamplerConfig) -> list[int]:
    """Scored positions that are no candidates, and surely get another token than is there.

    Args:
        judged, scored: as of ``select_commits``.
        tokens_N: all of the canvas, row after row.
        config: ``editing_threshold`` is read.
    """
    before = tokens_N[scored.places].tolist()
    editable = sorted(set(range(len(before))).difference(*scored.candidates))
    sure = above(judged.probabilities, editable, config.editing_threshold)
    return [n for n in sure if judged.tokens[n] != before[n]]


def above(probabilities: Sequence[float], numbers: Sequence[int], threshold: float) -> list[int]:
    """Those of the scored positions whose probability is above a threshold.

    Both are numbers of float32, in which 0.3 is not above 0.3 whatever they are in float64.
    """
    threshold = _float32(threshold)
    return [n for n in numbers if probabilities[n] > threshold]


def _best(values: Sequence[float], numbers: Sequence[int], count: int) -> Sequence[int]:
    """The highest; the lowest position first among those that differ by what rounding may make of equal ones."""
    if count >= len(numbers):
        return numbers
    # Masks without a text before them are all alike, and which is ahead by a bit depends on the batch.
    if count == 1:
        highest = max(values[n] for n in numbers)
        return [next(n for n in numbers if isclose(values[n], highest, **_ROUNDING))]
    order, start = sorted(numbers, key=values.__getitem__, reverse=True), 0
    while start < count:
        highest = values[order[start]]
        differ = (n for n in range(start + 1, len(order)) if not isclose(values[order[n]], highest, **_ROUNDING))
        end = next(differ, len(order))
        order[start:end] = sorted(order[start:end])
        start = end
    return order[:count]


def _within_factor(probabilities: Sequence[float], row: Sequence[int], factor: float) -> list[int]:
    """The n most confident positions, (n' + 1) * (1 - probability) <= factor for each n' up to n, in float32."""
    best, factor = sorted(row, key=probabilities.__getitem__, reverse=True), _float32(factor)
    for place, number in enumerate(best):
        if not _float32((place + 2) * _float32(1 - probabilities[number])) <= factor:
            return best[:place]
    return best


def _float32(value: float) -> float:
    return c_float(value).value


def _topk(scores: Sequence[float], scored: Scored, row: Sequence[int], quota: int) -> list[int]:
    """The best of a row as ``torch.topk`` finds them on its canvas, which is -inf elsewhere."""
    number_at = {place % scored.width: n for place, n in zip(scored.at(row), row, strict=True)}
    scores_T = torch.full((scored.width,), -torch.inf, dtype=torch.float64, device="cpu")
    for position, n in number_at.items():
        scores_T[position] = scores[n]
    best = scores_T.topk(min(quota, scored.width)).indices.tolist()
    return [number_at[position] for position in best if position in number_at]
