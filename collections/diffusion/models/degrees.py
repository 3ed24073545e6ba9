"""Over how many ranks a strategy spreads each part of a model, and the nearest sizes where one does not fit."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

STRATEGY = "trainer.strategy."
MODEL = "model.config."
TENSOR = f"{STRATEGY}tensor_model_parallel_size"
PIPELINE = f"{STRATEGY}pipeline_model_parallel_size"
VIRTUAL = f"{STRATEGY}virtual_pipeline_model_parallel_size"
CONTEXT = f"{STRATEGY}context_parallel_size"
EXPERT = f"{STRATEGY}expert_model_parallel_size"
EXPERT_TENSOR = f"{STRATEGY}expert_tensor_parallel_size"
SEQUENCE = f"{STRATEGY}sequence_parallel"
_OPTIONAL = (VIRTUAL, EXPERT_TENSOR)


@dataclass(frozen=True)
class Degrees:
    """Over how many ranks a strategy spreads each part of a model."""

    tensor: int
    pipeline: int
    virtual: int
    """Model chunks of a pipeline stage."""
    context: int
    expert: int
    expert_tensor: int
    sequence: bool
    """Sequence parallelism, over the tensor-parallel ranks."""

    @property
    def model_ranks(self) -> int:
        """Ranks that hold a copy of the model together."""
        return self.tensor * self.pipeline * self.context

    @classmethod
    def of(cls, strategy) -> "Degrees":
        """Those of NeMo's ``MegatronStrategy``.

        Raises:
            ValueError: for what is no degree.
        """
        parallelism = strategy.parallelism
        for field in (TENSOR, PIPELINE, VIRTUAL, CONTEXT, EXPERT, EXPERT_TENSOR):
            degree = getattr(parallelism, field.removeprefix(STRATEGY))
            if field not in _OPTIONAL or degree is not None:
                # Megatron's pipelines have no single chunk: with it, it looks for several and finds none.
                check_size(field, degree, smallest=2 if field == VIRTUAL else 1, or_none=field in _OPTIONAL)
        if not isinstance(parallelism.sequence_parallel, bool):
            raise ValueError(f"{SEQUENCE}={parallelism.sequence_parallel!r} must be True or False")
        return cls(
            tensor=parallelism.tensor_model_parallel_size,
            pipeline=parallelism.pipeline_model_parallel_size,
            virtual=parallelism.virtual_pipeline_model_parallel_size or 1,
            context=parallelism.context_parallel_size,
            expert=parallelism.expert_model_parallel_size,
            expert_tensor=parallelism.expert_tensor_parallel_size or parallelism.tensor_model_parallel_size,
            sequence=parallelism.sequence_parallel,
        )


def check_size(field: str, size: object, *, smallest: int = 1, or_none: bool = False) -> None:
    """Check that a size is a whole number of at least ``smallest``.

    Args:
        field: its name.
        size: its value.
        smallest: what it must be at least.
        or_none: whether None, which is not looked at here, is a setting as well; who says 0 means it.

    Raises:
        ValueError: names the field, the value and the nearest that is one.
    """
    whole = isinstance(size, int) and not isinstance(size, bool)
    if whole and size >= smallest:
        return
    try:
        nearest = round(float(size))
    except (TypeError, ValueError, OverflowError):
        nearest = 1
    if nearest < smallest:
        nearest = None if or_none else smallest
    kind = f"at least {smallest}" if whole else f"a whole number of at least {smallest}"
    raise ValueError(f"{field}={size!r} must be {kind}{', or None' if or_none else ''}; set {field}={nearest}")


def check_divisible(whole: str, size: int, part: str, degree: int, *, all_of: Iterable[int] = ()) -> None:
    """Check that a degree divides a size.

    Args:
        whole, size: name and value of what is divided.
        part, degree: name and value of what divides it.
        all_of: sizes that the degree must divide besides; the nearest one that an error names does.

    Raises:
        ValueError: names both, and the nearest degree that divides all sizes.
    """
    if size % degree:
        nearest = nearest_divisor(math.gcd(size, *all_of), degree)
        raise ValueError(f"{whole}={size} is not divisible by {part}={degree}; set {part}={nearest}")


def nearest_divisor(size: int, degree: int) -> int:
    """Of the numbers that divide ``size``, the one nearest to ``degree``."""
    return nearest_fitting(degree, lambda divisor: size % divisor == 0)


def nearest_fitting(value: int, fits: Callable[[int], bool]) -> int:
    """Of the numbers that fit, among which has to be 1, the one nearest to ``value``; the smaller of two."""
    near = ((value - distance, value + distance) for distance in range(value))
    return next(number for pair in near for number in pair if fits(number))


def nearest_of(value: int, fitting: Iterator[int]) -> int:
    """The smaller of two that are as near."""
    return min(fitting, key=lambda candidate: (abs(candidate - value), candidate))
