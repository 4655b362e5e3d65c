"""Final values: from merged states to the number, or the labelled numbers, a metric stands for.

Each function takes the metric's arguments, its merged states and the minutes of the bucket, and
answers None where no row matched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from batchmill.oal.numbers import (
    RANKS,
    exact_double,
    exact_sum,
    most_frequent,
    percentiles,
    truncated,
)

SCALE = 10_000
"""Shares are whole numbers out of this many: two digits behind the percent's point."""
_RANK_LABELS = tuple(f"{{p={rank}}}" for rank in RANKS)
LABELS = 50
"""How many labels are kept unless a metric says otherwise."""


def count(args: Sequence[Any], states: Sequence[Any], minutes: int) -> int | None:
    """The count as it is."""
    return states[0] or None


def per_minute(args: Sequence[Any], states: Sequence[Any], minutes: int) -> int | None:
    """The count for each minute of the bucket."""
    return truncated(states[0], minutes) if states[0] else None


def total(args: Sequence[Any], states: Sequence[Any], minutes: int) -> int | float | None:
    """The sum as it is; a float only where doubles were summed."""
    (merged,) = states
    return merged if merged is None or isinstance(merged, int) else exact_double(merged)


def double_total(args: Sequence[Any], states: Sequence[Any], minutes: int) -> float | None:
    """The sum as a float."""
    (merged,) = states
    return None if merged is None else exact_double(exact_sum(merged))


def average(args: Sequence[Any], states: Sequence[Any], minutes: int) -> int | None:
    """Sum by count, in whole numbers."""
    merged, rows = states
    return truncated(merged or 0, rows) if rows else None


def double_average(args: Sequence[Any], states: Sequence[Any], minutes: int) -> float | None:
    """Sum by count, as a float; rounded once."""
    merged, rows = states
    if not rows:
        return None
    return exact_double(exact_sum(merged or 0) / rows)


def greatest(args: Sequence[Any], states: Sequence[Any], minutes: int) -> int | None:
    """The greatest value, never below 0."""
    return None if states[0] is None else max(0, states[0])


def double_greatest(args: Sequence[Any], states: Sequence[Any], minutes: int) -> float | None:
    """The greatest value as a float, never below 0."""
    return None if states[0] is None else max(0.0, float(states[0]))


def least(args: Sequence[Any], states: Sequence[Any], minutes: int) -> int | None:
    """The least value."""
    merged: int | None = states[0]
    return merged


def double_least(args: Sequence[Any], states: Sequence[Any], minutes: int) -> float | None:
    """The least value as a float."""
    return None if states[0] is None else float(states[0])


def percent(args: Sequence[Any], states: Sequence[Any], minutes: int) -> int | None:
    """The share of rows that match."""
    matches, rows = states
    return truncated((matches or 0) * SCALE, rows) if rows else None


def rate(args: Sequence[Any], states: Sequence[Any], minutes: int) -> int | None:
    """One count by another; 0 where there is nothing to divide by."""
    numerator, denominator, rows = states
    if not rows:
        return None
    return truncated((numerator or 0) * SCALE, denominator) if denominator else 0


def apdex(args: Sequence[Any], states: Sequence[Any], minutes: int) -> int | None:
    """The score: the satisfied count whole, the tolerated half."""
    satisfied, tolerated, rows = states
    score = (satisfied or 0) * SCALE + truncated((tolerated or 0) * SCALE, 2)
    return truncated(score, rows) if rows else None


def percentile2(args: Sequence[Any], states: Sequence[Any], minutes: int) -> dict[str, int] | None:
    """The value at each rank, labelled ``{p=50}`` and so on."""
    if not states[0]:
        return None
    return dict(zip(_RANK_LABELS, percentiles(states[0], args[0]), strict=True))


def percentile(args: Sequence[Any], states: Sequence[Any], minutes: int) -> dict[str, int] | None:
    """The value at each rank, numbered from 0 (the old form)."""
    if not states[0]:
        return None
    return {str(index): each for index, each in enumerate(percentiles(states[0], args[0]))}


def histogram(args: Sequence[Any], states: Sequence[Any], minutes: int) -> dict[str, int] | None:
    """The count of each bucket, named by its lower edge; the empty ones too."""
    if not states[0]:
        return None
    step, steps = args
    tally = {int(number): rows for number, rows in states[0].items()}
    return {str(number * step): tally.get(number, 0) for number in range(steps + 1)}


def label_counts(args: Sequence[Any], states: Sequence[Any], minutes: int) -> dict[str, int] | None:
    """The count of each label, of the labels that are seen most."""
    tally: Mapping[str, int] = states[0]
    if not tally:
        return None
    cap = args[1] if len(args) > 1 else LABELS
    return {_named(label): tally[label] for label in most_frequent(tally, cap)}


def label_averages(
    args: Sequence[Any], states: Sequence[Any], minutes: int
) -> dict[str, int] | None:
    """The average for each label, of those seen most; 1 where it lies between 0 and 1."""
    sums: Mapping[str, tuple[int, int]] = states[0]
    if not sums:
        return None
    kept = most_frequent({label: rows for label, (_, rows) in sums.items()}, LABELS)
    return {
        _named(label): 1 if 0 < sums[label][0] < sums[label][1] else truncated(*sums[label])
        for label in kept
    }


def _named(label: str) -> str:
    return f"{{n={label}}}"
