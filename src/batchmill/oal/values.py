"""Final values: computes the value of a metric from its merged states.

Each function of a metric takes its arguments, its merged states and the minutes of the bucket, and
returns None where no row matched. Whole numbers are divided as Java does, doubles summed exactly.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate
from operator import itemgetter
from typing import Any, TypeAlias

Args: TypeAlias = Sequence[Any]
States: TypeAlias = Sequence[Any]

RANKS = (50, 75, 90, 95, 99)
"""The ranks that percentiles are computed for."""
SCALE = 10_000
"""Shares are whole numbers out of this many: percent with two decimals."""
LABELS = 50
"""How many labels are kept unless a metric says otherwise."""

LOG_BITS = 6
"""A doubling of the value is 2^6 buckets of :func:`log_bucket`: each is less than 2 % wide."""

_LIMB_BITS = 30


def count(args: Args, states: States, minutes: int) -> int | None:
    """The number of rows."""
    return states[0] or None


def per_minute(args: Args, states: States, minutes: int) -> int | None:
    """The number of rows per minute of the bucket."""
    return truncated(states[0], minutes) if states[0] else None


def total(args: Args, states: States, minutes: int) -> int | float | None:
    """The sum; a float only where doubles were summed."""
    (merged,) = states
    return merged if merged is None or isinstance(merged, int) else exact_double(merged)


def double_total(args: Args, states: States, minutes: int) -> float | None:
    """The sum as a float."""
    (merged,) = states
    return None if merged is None else exact_double(exact_sum(merged))


def average(args: Args, states: States, minutes: int) -> int | None:
    """Sum divided by count, in whole numbers."""
    merged, rows = states
    return truncated(merged or 0, rows) if rows else None


def double_average(args: Args, states: States, minutes: int) -> float | None:
    """Sum divided by count, as a float; rounded once."""
    merged, rows = states
    if not rows:
        return None
    return exact_double(exact_sum(merged or 0) / rows)


def greatest(args: Args, states: States, minutes: int) -> int | None:
    """The greatest value, never below 0."""
    return None if states[0] is None else max(0, states[0])


def double_greatest(args: Args, states: States, minutes: int) -> float | None:
    """The greatest value as a float, never below 0."""
    return None if states[0] is None else max(0.0, float(states[0]))


def least(args: Args, states: States, minutes: int) -> int | None:
    """The least value."""
    merged: int | None = states[0]
    return merged


def double_least(args: Args, states: States, minutes: int) -> float | None:
    """The least value as a float."""
    return None if states[0] is None else float(states[0])


def percent(args: Args, states: States, minutes: int) -> int | None:
    """The share of rows that match."""
    matches, rows = states
    return truncated((matches or 0) * SCALE, rows) if rows else None


def rate(args: Args, states: States, minutes: int) -> int | None:
    """One count divided by another; 0 where the other is 0."""
    numerator, denominator, rows = states
    if not rows:
        return None
    return truncated((numerator or 0) * SCALE, denominator) if denominator else 0


def apdex(args: Args, states: States, minutes: int) -> int | None:
    """The score: satisfied rows count in full, tolerated ones half."""
    satisfied, tolerated, rows = states
    score = (satisfied or 0) * SCALE + truncated((tolerated or 0) * SCALE, 2)
    return truncated(score, rows) if rows else None


def percentile2(args: Args, states: States, minutes: int) -> dict[str, int] | None:
    """The value at each rank, labelled ``{p=50}`` and so on."""
    if not states[0]:
        return None
    return _ranked(bucket * args[0] for bucket in ranked_buckets(states[0]))


def percentile_log(args: Args, states: States, minutes: int) -> dict[str, int] | None:
    """The value at each rank, of buckets that grow with the value."""
    return _ranked(map(log_floor, ranked_buckets(states[0]))) if states[0] else None


def percentile(args: Args, states: States, minutes: int) -> dict[str, int] | None:
    """The value at each rank, numbered from 0 (the old form)."""
    if not states[0]:
        return None
    buckets = enumerate(ranked_buckets(states[0]))
    return {str(index): bucket * args[0] for index, bucket in buckets}


def histogram(args: Args, states: States, minutes: int) -> dict[str, int] | None:
    """The count of each bucket, labelled by its lower edge; empty ones included."""
    if not states[0]:
        return None
    step, steps = args
    tally = {int(number): rows for number, rows in states[0].items()}
    return {str(number * step): tally.get(number, 0) for number in range(steps + 1)}


def label_counts(args: Args, states: States, minutes: int) -> dict[str, int] | None:
    """The count of each label, for the most frequent labels."""
    tally: Mapping[str, int] = states[0]
    if not tally:
        return None
    cap = args[1] if len(args) > 1 else LABELS
    return {_named(label): tally[label] for label in most_frequent(tally, cap)}


def label_averages(args: Args, states: States, minutes: int) -> dict[str, int] | None:
    """The average for each of the most frequent labels; 1 where it lies between 0 and 1."""
    sums: Mapping[str, tuple[int, int]] = states[0]
    if not sums:
        return None
    kept = most_frequent({label: rows for label, (_, rows) in sums.items()}, LABELS)
    return {
        _named(label): 1 if 0 < sums[label][0] < sums[label][1] else truncated(*sums[label])
        for label in kept
    }


def _ranked(values: Iterable[int]) -> dict[str, int]:
    return {f"{{p={rank}}}": value for rank, value in zip(RANKS, values, strict=True)}


def _named(label: str) -> str:
    return f"{{n={label}}}"


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
    """A finite float as the four limbs of a :class:`DoubleSum`; the part below 2^-90 is cut off.

    A float of at least 2^-38 has no such part: it is 53 bits long.

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


def log_bucket(value: int) -> int:
    """The number of the bucket that a value falls into, of buckets that grow with the value.

    Up to 127 every value has a bucket of its own; from there on, a doubling of the value is 64
    buckets of equal width. A value below 0 counts as 0.

    >>> log_bucket(127), log_bucket(128), log_bucket(129), log_bucket(130)
    (127, 128, 128, 129)
    """
    value = max(0, value)
    shift = max(0, value.bit_length() - LOG_BITS - 1)
    return (shift << LOG_BITS) + (value >> shift)


def log_floor(bucket: int) -> int:
    """The least value in a bucket of :func:`log_bucket`.

    >>> log_floor(129), log_floor(log_bucket(1_000_000))
    (130, 999424)
    """
    shift = max(0, (bucket >> LOG_BITS) - 1)
    return bucket - (shift << LOG_BITS) << shift


def ranked_buckets(tally: Mapping[Any, int]) -> tuple[int, ...]:
    """The bucket that each rank falls into, in the order of :data:`RANKS`.

    A rank lies in the first bucket, going up, at which the running count reaches the rank's share
    of all rows, rounded half up to a whole number.
    """
    # JSON has no numbers for keys.
    numbered = tally if isinstance(next(iter(tally)), int) else {int(k): tally[k] for k in tally}
    buckets = sorted(numbered.items())
    running = list(accumulate(map(itemgetter(1), buckets)))
    shares = [(running[-1] * rank + 50) // 100 for rank in RANKS]
    return tuple(buckets[bisect_left(running, share)][0] for share in shares)


def most_frequent(counts: Mapping[str, int], cap: int) -> list[str]:
    """The labels with the highest counts, ties by name, at most ``cap``; in order of name."""
    ranked = sorted(counts, key=lambda label: (-counts[label], label))
    return sorted(ranked[:cap])
