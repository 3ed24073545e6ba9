import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nemo_dllm.collections.diffusion.objectives import (
    CosineSchedule,
    GeometricSchedule,
    LinearSchedule,
    PolynomialSchedule,
    Schedule,
    get_schedule,
    of_time,
    register_schedule,
    schedules,
)

GOLDEN = load_file(Path(__file__).parents[1] / "golden" / "objective" / "schedules.safetensors")
TOLERANCE = {"float32": 1e-6, "float64": 1e-12}
NAMES = ("linear", "cosine", "polynomial", "geometric")
OBJECTS = [*map(get_schedule, NAMES), PolynomialSchedule(0.5), PolynomialSchedule(3.0), GeometricSchedule(1e-3, 8.0)]


def interior(dtype=torch.float64):
    return torch.linspace(0.001, 0.999, 997, dtype=dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_reference_table(name, dtype):
    schedule, t = get_schedule(name), GOLDEN[f"t.{dtype}"]
    computed = {
        "alpha": schedule.alpha(t),
        "alpha_derivative": schedule.alpha_derivative(t),
        "weight": schedule.weight(t, epsilon=1e-6),
    }
    for quantity, value in computed.items():
        expected = GOLDEN[f"{name}.{quantity}.{dtype}"]
        assert value.dtype == expected.dtype
        torch.testing.assert_close(value, expected, rtol=TOLERANCE[dtype], atol=0, msg=quantity)


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_reference_reverse_rates_for_numbers_and_tensors(name):
    schedule, s, t = get_schedule(name), GOLDEN["reverse.s"], GOLDEN["reverse.t"]
    expected = GOLDEN[f"{name}.reverse_mask_prob"]
    assert [schedule.reverse_mask_rate(*pair) for pair in zip(s.tolist(), t.tolist(), strict=True)] == expected.tolist()
    assert torch.equal(schedule.reverse_mask_rate(s, t).double(), expected)


def test_reverse_rate_rounds_as_the_reference_does():
    # Seven masks left after step 1 of 3: the exact 3.5 would round to 4, the float32 rate gives 3.
    assert round(7 * (1 - LinearSchedule().reverse_mask_rate(1 / 3, 2 / 3))) == 3


@pytest.mark.parametrize(
    ("schedule", "t", "alpha", "derivative", "weight"),
    [
        (LinearSchedule(), 0.25, 0.75, -1.0, 4.0),
        (CosineSchedule(), 0.5, 1 - math.sqrt(0.5), -math.pi / 2 * math.sqrt(0.5), math.pi / 2),
        (PolynomialSchedule(), 0.5, 0.75, -1.0, 4.0),
        (PolynomialSchedule(0.5), 0.25, 0.5, -1.0, 2.0),
        # sigma(1/2) = sqrt(1e-5 * 20) = 0.0141421, ln(20 / 1e-5) = 14.5086577
        (GeometricSchedule(), 0.5, 0.98595743, -0.20230108, 14.4063077),
    ],
)
def test_values_by_hand(schedule, t, alpha, derivative, weight):
    assert schedule.alpha(t) == pytest.approx(alpha, rel=1e-5)
    assert schedule.mask_rate(t) == pytest.approx(1 - alpha, rel=1e-5)
    assert schedule.alpha_derivative(t) == pytest.approx(derivative, rel=1e-5)
    assert schedule.weight(t) == pytest.approx(weight, rel=1e-5)


@pytest.mark.parametrize("schedule", OBJECTS, ids=repr)
def test_formulas_agree_with_each_other(schedule):
    t = interior().requires_grad_()
    alpha = schedule.alpha(t)
    (slope,) = torch.autograd.grad(alpha.sum(), t)
    derivative, rate, weight = schedule.alpha_derivative(t), schedule.mask_rate(t), schedule.weight(t)
    torch.testing.assert_close(derivative, slope, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(rate, 1 - alpha, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(weight * rate, -derivative, rtol=1e-12, atol=0)
    assert (derivative <= 0).all()


@pytest.mark.parametrize(
    ("schedule", "integral"),
    [
        (LinearSchedule(), 1.0),
        (CosineSchedule(), 1.0),
        (PolynomialSchedule(), 1.0),
        (PolynomialSchedule(3.0), 1.0),
        # Its ends are only near 1 and 0.
        (GeometricSchedule(), math.exp(-1e-5) - math.exp(-20.0)),
    ],
    ids=repr,
)
def test_total_weight_of_a_token_is_one(schedule, integral):
    t = torch.linspace(0, 1, 200_001, dtype=torch.float64)
    assert torch.trapezoid(-schedule.alpha_derivative(t), t).item() == pytest.approx(integral, abs=1e-8)
    assert schedule.alpha(0.0) - schedule.alpha(1.0) == pytest.approx(integral, abs=1e-7)


@pytest.mark.parametrize("schedule", OBJECTS, ids=repr)
def test_small_times_lose_no_precision_in_float32(schedule):
    t = torch.logspace(-7, -1, 61, dtype=torch.float32)
    torch.testing.assert_close(schedule.mask_rate(t), schedule.mask_rate(t.double()).float(), rtol=2e-6, atol=0)
    torch.testing.assert_close(schedule.weight(t), schedule.weight(t.double()).float(), rtol=2e-6, atol=0)
    # The naive form is off by more than that, so the check above can fail.
    assert ((1 - schedule.alpha(t)) / schedule.mask_rate(t) - 1).abs().max() > 1e-5


def test_polynomial_weight_where_the_power_underflows():
    assert PolynomialSchedule(4.0).weight(1e-12) == pytest.approx(4e12)


def test_precision_of_the_input():
    schedule = CosineSchedule()
    for method in (schedule.alpha, schedule.alpha_derivative, schedule.mask_rate, schedule.weight):
        assert isinstance(method(0.3), float)
        assert method(0.3) == method(torch.tensor(0.3)).item()
        assert method(torch.tensor([0.5], dtype=torch.bfloat16)).dtype == torch.float32
        assert method(torch.tensor([0.5], dtype=torch.float64)).dtype == torch.float64
        assert method(torch.full((2, 3), 0.5)).shape == (2, 3)
    assert isinstance(schedule.reverse_mask_rate(0, 1), float)
    assert isinstance(schedule.reverse_mask_rate(torch.tensor(0.2), 0.4), torch.Tensor)


@pytest.mark.parametrize("t", [-0.001, 1.001, math.nan, torch.tensor([0.5, 1.5])])
@pytest.mark.parametrize("method", ["alpha", "alpha_derivative", "mask_rate", "weight"])
def test_times_outside_the_unit_interval(method, t):
    with pytest.raises(ValueError, match=r"t=.* is outside \[0, 1\]"):
        getattr(LinearSchedule(), method)(t)


@pytest.mark.parametrize(
    ("s", "t", "message"),
    [
        (0.5, 0.5, r"s=0.5, t=0.5: the reverse step needs 0 <= s < t <= 1"),
        (0.6, 0.5, "needs 0 <= s < t <= 1"),
        (torch.tensor([0.1, 0.6]), torch.tensor([0.5, 0.5]), "needs 0 <= s < t <= 1"),
        (-0.1, 0.5, r"s=-0.1 is outside \[0, 1\]"),
        (0.5, 1.1, r"t=1.1 is outside \[0, 1\]"),
    ],
)
def test_reverse_step_ranges(s, t, message):
    with pytest.raises(ValueError, match=message):
        LinearSchedule().reverse_mask_rate(s, t)


def test_names():
    assert get_schedule("CoSine") == CosineSchedule()
    assert [type(get_schedule(name)).__name__.lower() for name in NAMES] == [f"{name}schedule" for name in NAMES]
    schedule = PolynomialSchedule(3.0)
    assert get_schedule(schedule) is schedule
    with pytest.raises(ValueError, match="schedule='quadratic' is unknown; known: cosine, geometric, linear, poly"):
        get_schedule("Quadratic")
    with pytest.raises(ValueError, match="schedule=3 is neither a Schedule nor a name; known names: cosine, geometric"):
        get_schedule(3)


def test_a_user_adds_a_schedule_with_one_call(monkeypatch):
    @dataclass(frozen=True)
    class SineSchedule(Schedule):
        """alpha(t) = 1 - sin(pi t / 2)**2."""

        @of_time
        def alpha(self, t):
            return torch.cos(math.pi / 2 * t) ** 2

        @of_time
        def alpha_derivative(self, t):
            return -math.pi / 2 * torch.sin(math.pi * t)

        @of_time
        def mask_rate(self, t):
            return torch.sin(math.pi / 2 * t) ** 2

    monkeypatch.setattr(schedules, "_FACTORIES", dict(schedules._FACTORIES))
    register_schedule("Sine", SineSchedule)
    schedule = get_schedule("sine")
    assert schedule.mask_rate(0.5) == pytest.approx(0.5)
    assert schedule.weight(0.5) == pytest.approx(math.pi)
    assert schedule.reverse_mask_rate(0.5, 1.0) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="schedule 'SINE' is already registered; choose another name"):
        register_schedule("SINE", SineSchedule)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: PolynomialSchedule(0), "power=0 must be positive"),
        (lambda: GeometricSchedule(beta_min=0.0), "beta_min=0.0, beta_max=20.0: need 0 < beta_min < beta_max"),
        (lambda: GeometricSchedule(beta_max=1e-6), "need 0 < beta_min < beta_max"),
    ],
)
def test_schedule_parameters(build, message):
    with pytest.raises(ValueError, match=message):
        build()
