"""Random orders and mixtures of any size without a table: what stands at a place is computed when it is asked for."""

import hashlib
import math
from collections.abc import Sequence
from fractions import Fraction
from numbers import Real
from typing import NamedTuple

_ROUNDS = 6


def permuted(index: int, size: int, seed: tuple[int, ...]) -> int:
    """Element `index` of a pseudo-random permutation of 0 to size - 1.

    A Feistel network over the next larger power of four, walked until it comes back into the range (Black and Rogaway,
    2002, Ciphers with Arbitrary Finite Domains).

    Args:
        index: in [0, size).
        size: at least 1.
        seed: integers that choose the permutation.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    half_mask = (1 << half_bits) - 1
    while True:
        left, right = index >> half_bits, index & half_mask
        for round_number in range(_ROUNDS):
            left, right = right, left ^ (random_integer(*seed, round_number, right) & half_mask)
        index = left << half_bits | right
        if index < size:
            return index


def random_integer(*seed: int) -> int:
    """An integer in [0, 2^64) that depends on the arguments alone."""
    return int.from_bytes(hashlib.blake2b(repr(seed).encode(), digest_size=8).digest(), "big")


class Place(NamedTuple):
    """Which of several sources a sample comes from, and how many samples of that source came before it."""

    source: int
    position: int


class Blend:
    """Mixes endless sources evenly: after n samples each source had its share of n, to within one sample per source.

    Args:
        weights: positive numbers, in any unit.

    Raises:
        ValueError: a weight is not positive.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        listed = weights if isinstance(weights, Sequence) else ()
        if not listed or not all(isinstance(weight, Real) and 0 < weight < math.inf for weight in listed):
            raise ValueError(f"weights={weights} must be positive numbers; leave out what has no weight")
        exact = [Fraction(weight) for weight in weights]
        # Each source's share of what the sources before it leave over.
        self._shares = [weight / sum(exact[number:]) for number, weight in enumerate(exact)]

    def place(self, index: int) -> Place:
        """Where sample `index` comes from."""
        for source, share in enumerate(self._shares):
            before = index * share.numerator // share.denominator
            if (index + 1) * share.numerator // share.denominator > before:
                return Place(source, before)
            index -= before
        raise AssertionError("the last source's share is all that is left")

    def counts(self, num_samples: int) -> list[int]:
        """How many of the first samples come from each source."""
        counts = []
        for share in self._shares:
            counts.append(num_samples * share.numerator // share.denominator)
            num_samples -= counts[-1]
        return counts
