"""Whether something grew without end: a verdict on a series of samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Series = Sequence[tuple[float, float]]
"""Moments in seconds and values."""


@dataclass(frozen=True, kw_only=True)
class Bound:
    """How much a series may grow after the warm-up, and how large it may become.

    The time after the warm-up is divided in halves. What three quarters of the samples of the
    second half stay below may be ``ratio`` times that of the first half, and ``slack`` more. So a
    single peak decides nothing, and bursts, which both halves have, cancel out.
    """

    ratio: float = 1.2
    slack: float = 0.0
    most: float = math.inf
    """No sample may be larger, the warm-up included."""
    per_second: bool = False
    """What is compared is the growth per second: for a store, which grows with time by design."""

    def problem(self, series: Series, from_s: float) -> str | None:
        """What is wrong with a series; None if nothing is."""
        peak = max((value for _, value in series), default=0.0)
        if peak > self.most:
            return f"was {_number(peak)}, and may be {_number(self.most)}"
        halves = _halves(series, from_s)
        if halves is None:
            return None
        before, after = (_slope(half) if self.per_second else _high(half) for half in halves)
        limit = max(0.0, before) * self.ratio + self.slack
        if after <= limit:
            return None
        unit = " a second" if self.per_second else ""
        return (
            f"grew from {_number(before)} to {_number(after)}{unit}; "
            f"up to {_number(limit)}{unit} is allowed"
        )


def problems(
    samples: Mapping[str, Series], bounds: Mapping[str, Bound], from_s: float
) -> list[str]:
    """What grew beyond its bound; a bound is for all series whose name begins with its own.

    The longest such name counts. A series without a bound is a problem, too: nobody has thought of
    it.
    """
    texts = []
    for name, series in samples.items():
        prefixes = [prefix for prefix in bounds if name.startswith(prefix)]
        if not prefixes:
            texts.append(f"{name}: has no bound")
        elif (text := bounds[max(prefixes, key=len)].problem(series, from_s)) is not None:
            texts.append(f"{name}: {text}")
    return texts


def _halves(series: Series, from_s: float) -> tuple[Series, Series] | None:
    """The samples after the warm-up, in two halves of equal time; None if there are too few."""
    judged = [sample for sample in series if sample[0] >= from_s]
    if not judged:
        return None
    middle = (judged[0][0] + judged[-1][0]) / 2
    before = [sample for sample in judged if sample[0] < middle]
    after = [sample for sample in judged if sample[0] >= middle]
    return (before, after) if min(len(before), len(after)) >= 5 else None


def _high(series: Series) -> float:
    """What three quarters of the samples are not above."""
    values = sorted(value for _, value in series)
    return values[(3 * (len(values) - 1)) // 4]


def _slope(series: Series) -> float:
    """The growth per second from the first to the last sample."""
    (start, first), (end, last) = series[0], series[-1]
    return (last - first) / (end - start)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
