"""Masking schedules: alpha(t), the share of tokens still clean at diffusion time t.

t = 0 is clean text and t = 1 fully masked, so alpha falls from 1 to 0. A token is masked at time t with probability
1 - alpha(t), and the NELBO weighs its negative log-likelihood by -alpha'(t) / (1 - alpha(t)) (Sahoo et al. 2024,
"Simple and Effective Masked Diffusion Language Models", equation 10; Shi et al. 2024, "Simplified and Generalized
Masked Diffusion for Discrete Data").

A new schedule is a class with three formulas and one call::

    @dataclass(frozen=True)
    class SineSchedule(Schedule):
        @of_time
        def alpha(self, t): ...
        @of_time
        def alpha_derivative(self, t): ...
        @of_time
        def mask_rate(self, t): ...

    register_schedule("sine", SineSchedule)
"""

import functools
import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from nemo_dllm.collections.diffusion.objectives.registry import look_up

Time = TypeVar("Time", Tensor, float)


def of_time(formula: Callable[..., Tensor]) -> Callable[..., Time]:
    """Let a formula on time tensors take every kind of time, in one precision.

    The formula gets t in float32 (float64 stays float64), whatever the model's precision. A python number gives a
    python float, computed in float32 as well, so both ways agree. ``ValueError`` when t leaves [0, 1] or is NaN.
    """

    @functools.wraps(formula)
    def evaluate(self, t: Time, *args, **kwargs) -> Time:
        value = formula(self, _as_time("t", t), *args, **kwargs)
        return value if isinstance(t, Tensor) else value.item()

    return evaluate


def _as_time(name: str, value: Tensor | float) -> Tensor:
    time = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float32)
    time = time if time.dtype == torch.float64 else time.float()
    if not ((time >= 0) & (time <= 1)).all():
        raise ValueError(f"{name}={value} is outside [0, 1]; 0 is clean text, 1 is fully masked")
    return time


@runtime_checkable
class Schedule(Protocol):
    """alpha(t) and what follows from it. Times are tensors of any shape or python numbers, in [0, 1].

    A subclass gives alpha, alpha_derivative and mask_rate, each under ``@of_time``.
    """

    @abstractmethod
    def alpha(self, t: Time) -> Time:
        """Probability that a token is still clean at t, in [0, 1]."""

    @abstractmethod
    def alpha_derivative(self, t: Time) -> Time:
        """d alpha / dt, not positive. Its integral over [0, 1] is alpha(1) - alpha(0)."""

    @abstractmethod
    def mask_rate(self, t: Time) -> Time:
        """1 - alpha(t), the probability that a token is masked, without the cancellation of that form near t = 0."""

    @of_time
    def weight(self, t: Tensor, epsilon: float = 0.0) -> Tensor:
        """NELBO weight -alpha'(t) / (1 - alpha(t) + epsilon) of a masked token's negative log-likelihood.

        With ``epsilon`` 0 it diverges like 1/t at t = 0 (geometric does not): draw t from above 0. A positive
        ``epsilon`` is the guard of public trainers, kept for parity with them.
        """
        # Their guard sits on 1 - alpha(t) as it rounds, and that rounding is part of the number to reproduce.
        rate = self.mask_rate(t) if epsilon == 0 else 1 - self.alpha(t)
        return -self.alpha_derivative(t) / (rate + epsilon)

    @of_time
    def complement_weight(self, t: Tensor, epsilon: float = 0.0) -> Tensor:
        """NELBO weight -alpha'(t) / (alpha(t) + epsilon) of a token that is masked exactly where the mask of t is not.

        The mask rate of that complement is alpha(t); the weight follows from the change of variables. It diverges at
        t = 1: draw t from below 1.
        """
        return -self.alpha_derivative(t) / (self.alpha(t) + epsilon)

    def time_of_mask_rate(self, rate: Tensor) -> Tensor:
        """The time in [0, 1] at which the mask rate is ``rate``, by bisection; the nearest end where it never is."""
        low, high = torch.zeros_like(rate), torch.ones_like(rate)
        for _ in range(25):
            middle = (low + high) / 2
            later = self.mask_rate(middle) < rate
            low, high = torch.where(later, middle, low), torch.where(later, high, middle)
        return high

    def reverse_mask_rate(self, s: Time, t: Time) -> Time:
        """(1 - alpha(s)) / (1 - alpha(t)): probability that a token masked at t is still masked at s, 0 <= s < t <= 1.

        ``ValueError`` when a time leaves [0, 1] or s >= t anywhere.
        """
        earlier, later = _as_time("s", s), _as_time("t", t)
        if not (earlier < later).all():
            raise ValueError(f"s={s}, t={t}: the reverse step needs 0 <= s < t <= 1")
        # As written, in float32: samplers round (count * rate), and a more exact rate would move ties.
        rate = (1 - self.alpha(earlier)) / (1 - self.alpha(later))
        return rate if isinstance(s, Tensor) or isinstance(t, Tensor) else rate.item()


@dataclass(frozen=True)
class LinearSchedule(Schedule):
    """alpha(t) = 1 - t."""

    @of_time
    def alpha(self, t: Tensor) -> Tensor:
        return 1 - t

    @of_time
    def alpha_derivative(self, t: Tensor) -> Tensor:
        return -torch.ones_like(t)

    @of_time
    def mask_rate(self, t: Tensor) -> Tensor:
        return t.clone()


@dataclass(frozen=True)
class CosineSchedule(Schedule):
    """alpha(t) = 1 - cos(pi/2 (1 - t))."""

    @of_time
    def alpha(self, t: Tensor) -> Tensor:
        return 1 - torch.cos(math.pi / 2 * (1 - t))

    @of_time
    def alpha_derivative(self, t: Tensor) -> Tensor:
        return -(math.pi / 2) * torch.sin(math.pi / 2 * (1 - t))

    @of_time
    def mask_rate(self, t: Tensor) -> Tensor:
        return torch.sin(math.pi / 2 * t)


@dataclass(frozen=True)
class PolynomialSchedule(Schedule):
    """alpha(t) = 1 - t**power, with power > 0."""

    power: float = 2.0

    def __post_init__(self):
        if not self.power > 0:
            raise ValueError(f"power={self.power} must be positive")

    @of_time
    def alpha(self, t: Tensor) -> Tensor:
        return 1 - t**self.power

    @of_time
    def alpha_derivative(self, t: Tensor) -> Tensor:
        return -self.power * t ** (self.power - 1)

    @of_time
    def mask_rate(self, t: Tensor) -> Tensor:
        return t**self.power

    @of_time
    def weight(self, t: Tensor, epsilon: float = 0.0) -> Tensor:
        # The quotient is 0/0 where t**power underflows; its closed form is not.
        return self.power / t if epsilon == 0 else super().weight(t, epsilon)


@dataclass(frozen=True)
class GeometricSchedule(Schedule):
    """alpha(t) = exp(-sigma(t)) with total noise sigma(t) = beta_min**(1 - t) * beta_max**t, 0 < beta_min < beta_max.

    The ends are only near: alpha(0) = exp(-beta_min) = 0.99999 and alpha(1) = exp(-beta_max) = 2e-9 by default, so
    -alpha' integrates to 0.99999 instead of 1.
    """

    beta_min: float = 1e-5
    beta_max: float = 20.0

    def __post_init__(self):
        if not 0 < self.beta_min < self.beta_max:
            raise ValueError(f"beta_min={self.beta_min}, beta_max={self.beta_max}: need 0 < beta_min < beta_max")

    @of_time
    def alpha(self, t: Tensor) -> Tensor:
        return torch.exp(-self._sigma(t))

    @of_time
    def alpha_derivative(self, t: Tensor) -> Tensor:
        sigma = self._sigma(t)
        return -math.log(self.beta_max / self.beta_min) * sigma * torch.exp(-sigma)

    @of_time
    def mask_rate(self, t: Tensor) -> Tensor:
        return -torch.expm1(-self._sigma(t))

    def _sigma(self, t: Tensor) -> Tensor:
        return self.beta_min ** (1 - t) * self.beta_max**t


_FACTORIES: dict[str, Callable[[], Schedule]] = {
    "linear": LinearSchedule,
    "cosine": CosineSchedule,
    "polynomial": PolynomialSchedule,
    "geometric": GeometricSchedule,
}


def register_schedule(name: str, factory: Callable[[], Schedule]) -> None:
    """Make ``get_schedule(name)`` return ``factory()``. Names ignore case; a taken one is a ``ValueError``."""
    key = name.lower()
    if key in _FACTORIES:
        raise ValueError(f"schedule {name!r} is already registered; choose another name")
    _FACTORIES[key] = factory


def get_schedule(schedule: str | Schedule) -> Schedule:
    """Return the schedule of that name (case ignored), or the object itself if it already is one."""
    if isinstance(schedule, str):
        return look_up("schedule", schedule.lower(), _FACTORIES)()
    if not isinstance(schedule, Schedule):
        known = ", ".join(sorted(_FACTORIES))
        raise ValueError(f"schedule={schedule!r} is neither a Schedule nor a name; known names: {known}")
    return schedule
