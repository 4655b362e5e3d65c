"""The arithmetic of final values: whole numbers as Java divides them, doubles summed exactly."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import accumulate
from operator import itemgetter
from typing import Any

RANKS = (50, 75, 90, 95, 99)
"""The ranks that percentiles are taken at."""

_LIMB_BITS = 30


def truncated(dividend: int, divisor: int) -> int:
    """A quotient rounded toward zero.

    >>> truncated(7, 2), truncated(-7, 2)
    (3, -3)
    """
    quotient = abs(dividend) // abs(divisor)
    return quotient if (dividend < 0) is (divisor < 0) else -quotient


def exact_double(merged: Fraction | Sequence[int]) -> float:
    """The float nearest to a merged :class:`DoubleSum`, rounded once, half to even.

    A sum beyond what a float can hold is infinite.
    """
    exact = exact_sum(merged)
    try:
        return exact.numerator / exact.denominator
    except OverflowError:
        return float("inf") if exact > 0 else float("-inf")


def exact_sum(merged: int | Fraction | Sequence[int]) -> Fraction:
    """A merged sum, of whole numbers or of doubles, without any rounding."""
    if isinstance(merged, (int, Fraction)):
        return Fraction(merged)
    scaled = 0
    for limb in merged:
        scaled = (scaled << _LIMB_BITS) + limb
    return Fraction(scaled, 1 << (_LIMB_BITS * 3))


def double_limbs(value: float) -> tuple[int, int, int, int]:
    """A finite float as the four limbs of a :class:`DoubleSum`; what is below 2^-90 is cut off.

    A float of at least 2^-38 has nothing below that: it is 53 bits long.

    >>> double_limbs(2.5)
    (2, 536870912, 0, 0)
    """
    limbs = []
    rest = Fraction(value)
    for _ in range(4):
        whole = int(rest)
        limbs.append(whole)
        rest = (rest - whole) * (1 << _LIMB_BITS)
    return (limbs[0], limbs[1], limbs[2], limbs[3])


def percentiles(tally: Mapping[Any, int], precision: int) -> tuple[int, ...]:
    """The floor of the bucket that each rank falls into, in the order of :data:`RANKS`.

    A rank's roof is its share of the rows, rounded half up in whole numbers: the rank lies in the
    first bucket, going up, with which the running count reaches it.
    """
    if not tally:
        return ()
    # JSON has no numbers for keys.
    numbered = tally if isinstance(next(iter(tally)), int) else {int(k): tally[k] for k in tally}
    buckets = sorted(numbered.items())
    running = list(accumulate(map(itemgetter(1), buckets)))
    roofs = [(running[-1] * rank + 50) // 100 for rank in RANKS]
    return tuple(buckets[bisect_left(running, roof)][0] * precision for roof in roofs)


def most_frequent(counts: Mapping[str, int], cap: int) -> list[str]:
    """The labels with the highest counts, ties by name, at most ``cap``; in order of name."""
    ranked = sorted(counts, key=lambda label: (-counts[label], label))
    return sorted(ranked[:cap])
