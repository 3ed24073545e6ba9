"""Scores that decide which predictions are committed and which positions stay masked.

A policy is a function from ``Predictions`` to one float score per candidate; the highest are committed first, the
lowest position among equals. Scores within 1e-6 of each other (of their size, above 1) are equal, see ``selection.py``.
``register_remasking`` adds one under a name for ``SamplerConfig.remasking``.

Shape letters: N candidate positions of all rows in row-major order, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Predictions:
    """What the model proposes for the candidates of one step.

    Attributes:
        tokens_N: int64, the token chosen at each candidate.
        probabilities_NV: float32, before temperature, top-k and top-p; forbidden tokens have 0. Tempered ones round to
            1.0, and the order of commitment would then be an accident of ties (``tempered_confidence`` asks for it).
        draw_uniform_N: fresh numbers in [0, 1), one per candidate.
    """

    tokens_N: Tensor
    probabilities_NV: Tensor
    draw_uniform_N: Callable[[], Tensor]

    def chosen_probability(self) -> Tensor:
        """Float32 [N], the model's probability of each chosen token."""
        return self._chosen_N

    @cached_property
    def _chosen_N(self) -> Tensor:
        # The order of commitment and thresholds both read it.
        return self.probabilities_NV.gather(1, self.tokens_N[:, None]).squeeze(1)


RemaskingPolicy = Callable[[Predictions], Tensor]
REMASKING_POLICIES: dict[str, RemaskingPolicy] = {}


def register_remasking(name: str) -> Callable[[RemaskingPolicy], RemaskingPolicy]:
    """Decorator that makes a policy known as ``SamplerConfig(remasking=name)``."""

    def register(policy: RemaskingPolicy) -> RemaskingPolicy:
        REMASKING_POLICIES[name] = policy
        return policy

    return register


@register_remasking("confidence")
def confidence(predictions: Predictions) -> Tensor:
    """Probability of the chosen token, in [0, 1] (Chang et al. 2022, MaskGIT; Nie et al. 2025, LLaDA)."""
    return predictions.chosen_probability()


@register_remasking("margin")
def margin(predictions: Predictions) -> Tensor:
    """Probability of the best token minus that of the second, in [0, 1] (Kim et al. 2025, top-k margin)."""
    best_N2 = predictions.probabilities_NV.topk(2).values
    return best_N2[:, 0] - best_N2[:, 1]


@register_remasking("entropy")
def entropy(predictions: Predictions) -> Tensor:
    """Negative entropy of the distribution, in nats, in [-ln V, 0]."""
    return -torch.special.entr(predictions.probabilities_NV).sum(dim=-1)


@register_remasking("random")
def random_order(predictions: Predictions) -> Tensor:
    """Uniform numbers: the unmasking order of the reverse process itself."""
    return predictions.draw_uniform_N()
