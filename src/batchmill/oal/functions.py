"""The aggregation functions: what each may measure, which arguments it takes, and what it computes.

A function is a pair of pure functions: which states the rows must be reduced to, and what the
final value is once those are merged. Adding one here is all that it takes to add one.

A row whose measured value is null is no measurement to a function that measures numbers. Functions
that take anything (counts, shares, labels) measure nothing: they count every row that passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from batchmill.oal import finish
from batchmill.oal.model import Condition, Path, Where, all_of, measured
from batchmill.oal.states import (
    ApdexCount,
    Bucketed,
    Clamped,
    Count,
    DoubleSum,
    Extreme,
    Label,
    LabelSum,
    State,
    Sum,
    Tally,
)

Arg: TypeAlias = Condition | Path | int
"""An argument of a function: a condition, the path to a value, or a number."""

Value: TypeAlias = int | float | dict[str, int] | None
"""A final value; a dict has one for each label. None: no row matched."""

Measures: TypeAlias = Literal["anything", "whole", "number"]
"""What may stand in ``from(...)``: anything or ``*``, a whole number, any number."""

MOST_STEPS = 10_000
"""A histogram has no more steps than this: every bucket is there, empty or not."""


@dataclass(frozen=True, slots=True)
class Param:
    """What one argument of a function must be."""

    name: str
    kind: Literal["condition", "text", "label", "bool", "whole", "count"]
    optional: bool = False
    most: int = 2**63 - 1
    """The greatest number allowed, of a ``count``; the least is 1."""


@dataclass(frozen=True, slots=True)
class Function:
    """An aggregation function of the language."""

    name: str
    measures: Measures
    params: tuple[Param, ...]
    states: Callable[[Where, Any, Any], tuple[State, ...]]
    """From the filters, the measured path and the arguments, the states that it needs."""
    finish: Callable[[Any, Sequence[Any], int], Value]
    """From the arguments, the merged states and the bucket's minutes, the final value."""
    labelled: bool = False
    instead: str = ""
    """The function to use where the measured value is a double and this one takes none."""


def _count(where: Where, value: Path | None, args: Sequence[Arg]) -> tuple[State, ...]:
    return (Count(where),)


def _total(where: Where, value: Path) -> State:
    return DoubleSum(where, value) if value.type.kind == "double" else Sum(where, value)


def _sum(where: Where, value: Path, args: Sequence[Arg]) -> tuple[State, ...]:
    return (_total(where, value),)


def _average(where: Where, value: Path, args: Sequence[Arg]) -> tuple[State, ...]:
    return (_total(where, value), Count(measured(where, value)))


def _greatest(where: Where, value: Path, args: Sequence[Arg]) -> tuple[State, ...]:
    return (Extreme(where, value, "max"),)


def _least(where: Where, value: Path, args: Sequence[Arg]) -> tuple[State, ...]:
    return (Extreme(where, value, "min"),)


def _shares(where: Where, value: Path | None, args: Sequence[Condition]) -> tuple[State, ...]:
    return (*(Count(all_of((*where, each))) for each in args), Count(where))


def _apdex(where: Where, value: Path, args: tuple[Path, Path]) -> tuple[State, ...]:
    name, status = args
    return (
        ApdexCount(where, "satisfied", value, status, name),
        ApdexCount(where, "tolerated", value, status, name),
        Count(measured(where, value)),
    )


def _buckets(where: Where, value: Path, args: tuple[int]) -> tuple[State, ...]:
    return (Tally(where, Bucketed(value, args[0])),)


def _steps(where: Where, value: Path, args: tuple[int, int]) -> tuple[State, ...]:
    return (Tally(where, Clamped(value, *args)),)


def _labels(where: Where, value: Path | None, args: Sequence[Any]) -> tuple[State, ...]:
    return (Tally(where, Label(args[0])),)


def _label_sums(where: Where, value: Path | None, args: tuple[Path, Path]) -> tuple[State, ...]:
    return (LabelSum(where, *args),)


_PRECISION = (Param("precision", "count"),)
_LABEL = Param("label", "label")

FUNCTIONS: Mapping[str, Function] = {
    each.name: each
    for each in (
        Function("count", "anything", (), _count, finish.count),
        Function("cpm", "anything", (), _count, finish.per_minute),
        Function("sum", "number", (), _sum, finish.total),
        Function("sumDouble", "number", (), _sum, finish.double_total),
        Function("longAvg", "whole", (), _average, finish.average, instead="doubleAvg"),
        Function("doubleAvg", "number", (), _average, finish.double_average),
        Function("max", "whole", (), _greatest, finish.greatest, instead="maxDouble"),
        Function("maxDouble", "number", (), _greatest, finish.double_greatest),
        Function("min", "whole", (), _least, finish.least, instead="minDouble"),
        Function("minDouble", "number", (), _least, finish.double_least),
        Function(
            "percent", "anything", (Param("condition", "condition"),), _shares, finish.percent
        ),
        Function(
            "rate",
            "anything",
            (Param("numerator", "condition"), Param("denominator", "condition")),
            _shares,
            finish.rate,
        ),
        Function(
            "apdex",
            "whole",
            (Param("name", "text"), Param("status", "bool")),
            _apdex,
            finish.apdex,
        ),
        Function("percentile2", "whole", _PRECISION, _buckets, finish.percentile2, labelled=True),
        Function("percentile", "whole", _PRECISION, _buckets, finish.percentile, labelled=True),
        Function(
            "histogram",
            "whole",
            (Param("step", "count"), Param("steps", "count", most=MOST_STEPS)),
            _steps,
            finish.histogram,
            labelled=True,
        ),
        Function(
            "labelCount",
            "anything",
            (_LABEL, Param("cap", "count", optional=True)),
            _labels,
            finish.label_counts,
            labelled=True,
        ),
        Function(
            "labelAvg",
            "anything",
            (_LABEL, Param("value", "whole")),
            _label_sums,
            finish.label_averages,
            labelled=True,
        ),
    )
}
"""Every function of the language, by name."""
