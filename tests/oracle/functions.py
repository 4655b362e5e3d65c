"""Every function's final value, straight from the rows of one bucket: no states, no merging."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from tests.oracle.catalog import Row
from tests.oracle.rows import holds, value_at
from tests.oracle.script import Argument, Condition, Field, Metric

Number = int | float
Value = Number | dict[str, Number]

RANKS = (50, 75, 90, 95, 99)
DEFAULT_APDEX_MS = 500
DEFAULT_LABEL_CAP = 50


@dataclass(frozen=True)
class Bucket:
    """One metric's rows of one entity and bucket: all of them passed the filters."""

    metric: Metric
    rows: Sequence[Row]
    minutes: int
    apdex_thresholds: Mapping[str, int]

    def measured(self) -> list[Number]:
        """The values of the metric's field, nulls left out."""
        values = (value_at(row, self.metric.field) for row in self.rows)
        return [value for value in values if value is not None]

    def number(self, index: int) -> int:
        argument = self.metric.arguments[index]
        if isinstance(argument, int):
            return argument
        raise TypeError(f"{self.metric.name}: argument {index} is no number")

    def field(self, index: int) -> Field:
        argument = self.metric.arguments[index]
        if isinstance(argument, Field):
            return argument
        raise TypeError(f"{self.metric.name}: argument {index} is no field")

    def matching(self, index: int) -> int:
        argument: Argument = self.metric.arguments[index]
        if isinstance(argument, Condition):
            return sum(holds(row, argument) for row in self.rows)
        raise TypeError(f"{self.metric.name}: argument {index} is no condition")


def final_value(bucket: Bucket) -> Value | None:
    """The metric's value; None where no row passed, or none had what the function measures."""
    return _FUNCTIONS[bucket.metric.function](bucket) if bucket.rows else None


def truncated(numerator: int, denominator: int) -> int:
    """Java's integer division."""
    quotient = abs(numerator) // abs(denominator)
    return quotient if (numerator < 0) == (denominator < 0) else -quotient


def _mean(values: Sequence[Number]) -> Fraction:
    if all(isinstance(value, int) for value in values):
        return Fraction(int(sum(values)), len(values))
    return sum((Fraction(value) for value in values), Fraction()) / len(values)


def _steps(value: Number, size: int) -> int:
    """How many whole steps of a size a value is, toward zero."""
    if isinstance(value, int):
        return truncated(value, size)
    return math.trunc(Fraction(value) / size)


def _long_avg(bucket: Bucket) -> Value | None:
    values = bucket.measured()
    return math.trunc(_mean(values)) if values else None


def _double_avg(bucket: Bucket) -> Value | None:
    values = bucket.measured()
    return float(_mean(values)) if values else None


def _sum(bucket: Bucket) -> Value | None:
    values = bucket.measured()
    if not values:
        return None
    return math.fsum(values) if any(isinstance(value, float) for value in values) else sum(values)


def _sum_double(bucket: Bucket) -> Value | None:
    values = bucket.measured()
    return math.fsum(values) if values else None


def _max(bucket: Bucket) -> Value | None:
    return max(0, *values) if (values := bucket.measured()) else None


def _max_double(bucket: Bucket) -> Value | None:
    return float(max(0.0, *values)) if (values := bucket.measured()) else None


def _min(bucket: Bucket) -> Value | None:
    return min(values) if (values := bucket.measured()) else None


def _min_double(bucket: Bucket) -> Value | None:
    return float(min(values)) if (values := bucket.measured()) else None


def _count(bucket: Bucket) -> Value:
    return len(bucket.rows)


def _cpm(bucket: Bucket) -> Value:
    return len(bucket.rows) // bucket.minutes


def _percent(bucket: Bucket) -> Value:
    return bucket.matching(0) * 10000 // len(bucket.rows)


def _rate(bucket: Bucket) -> Value:
    numerator, denominator = bucket.matching(0), bucket.matching(1)
    return numerator * 10000 // denominator if denominator else 0


def _apdex(bucket: Bucket) -> Value | None:
    name, status = bucket.field(0), bucket.field(1)
    satisfied = tolerated = total = 0
    for row in bucket.rows:
        threshold = bucket.apdex_thresholds.get(value_at(row, name), DEFAULT_APDEX_MS)
        latency = value_at(row, bucket.metric.field)
        if latency is None:
            continue
        total += 1
        if value_at(row, status) is not True or latency > 4 * threshold:
            continue
        if latency > threshold:
            tolerated += 1
        else:
            satisfied += 1
    return (satisfied * 10000 + tolerated * 10000 // 2) // total if total else None


def _ranked(bucket: Bucket) -> list[int] | None:
    """The floors at each rank: of the n-th smallest value, n being the rank's roof."""
    precision = bucket.number(0)
    numbers = sorted(_steps(value, precision) for value in bucket.measured())
    if not numbers:
        return None
    # Half up: (total * rank / 100) + 1/2, floored.
    roofs = [(2 * len(numbers) * rank + 100) // 200 for rank in RANKS]
    return [numbers[roof - 1] * precision for roof in roofs]


def _percentile(bucket: Bucket) -> Value | None:
    floors = _ranked(bucket)
    return None if floors is None else {str(key): floor for key, floor in enumerate(floors)}


def _percentile2(bucket: Bucket) -> Value | None:
    floors = _ranked(bucket)
    if floors is None:
        return None
    return {f"{{p={rank}}}": floor for rank, floor in zip(RANKS, floors, strict=True)}


def log_floor(value: Number) -> int:
    """The floor of a bucket that is a 64th of the power of two below a value, or 1, wide."""
    whole = max(0, math.trunc(value))
    power = 1
    while power * 2 <= whole:
        power *= 2
    width = max(1, power // 64)
    return whole // width * width


def _percentile_log(bucket: Bucket) -> Value | None:
    values = sorted(map(log_floor, bucket.measured()))
    if not values:
        return None
    roofs = {rank: (2 * len(values) * rank + 100) // 200 for rank in RANKS}
    return {f"{{p={rank}}}": values[roof - 1] for rank, roof in roofs.items()}


def _histogram(bucket: Bucket) -> Value | None:
    step, steps = bucket.number(0), bucket.number(1)
    values = bucket.measured()
    if not values:
        return None
    edges = [min(max(_steps(value, step), 0), steps) * step for value in values]
    counted = Counter(edges)
    return {str(edge): counted[edge] for edge in range(0, (steps + 1) * step, step)}


def label_text(value: Any) -> str:
    """A label's name; booleans as the language writes them."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _kept(counts: Mapping[str, int], cap: int) -> list[str]:
    return sorted(counts, key=lambda label: (-counts[label], label))[:cap]


def _label_count(bucket: Bucket) -> Value | None:
    cap = bucket.number(1) if len(bucket.metric.arguments) > 1 else DEFAULT_LABEL_CAP
    labels = [value_at(row, bucket.field(0)) for row in bucket.rows]
    counts = Counter(label_text(label) for label in labels if label is not None)
    return {f"{{n={label}}}": counts[label] for label in _kept(counts, cap)} or None


def _label_avg(bucket: Bucket) -> Value | None:
    values: defaultdict[str, list[Number]] = defaultdict(list)
    for row in bucket.rows:
        label, value = value_at(row, bucket.field(0)), value_at(row, bucket.field(1))
        if label is not None and value is not None:
            values[label_text(label)].append(value)
    counts = {label: len(numbers) for label, numbers in values.items()}
    averages: dict[str, Number] = {}
    for label in _kept(counts, DEFAULT_LABEL_CAP):
        mean = _mean(values[label])
        averages[f"{{n={label}}}"] = 1 if 0 < mean < 1 else math.trunc(mean)
    return averages or None


_FUNCTIONS: dict[str, Callable[[Bucket], Value | None]] = {
    "longAvg": _long_avg,
    "doubleAvg": _double_avg,
    "sum": _sum,
    "sumDouble": _sum_double,
    "max": _max,
    "maxDouble": _max_double,
    "min": _min,
    "minDouble": _min_double,
    "count": _count,
    "cpm": _cpm,
    "percent": _percent,
    "rate": _rate,
    "apdex": _apdex,
    "percentile": _percentile,
    "percentile2": _percentile2,
    "percentileLog": _percentile_log,
    "histogram": _histogram,
    "labelCount": _label_count,
    "labelAvg": _label_avg,
}
