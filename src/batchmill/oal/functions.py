"""The aggregation functions: what each may measure, which arguments it takes, and what it computes.

A function is a pair of pure functions: one gives the states that rows are reduced to, the other
computes the final value from merged states. To add a function, add it to :data:`FUNCTIONS`.

A row whose measured value is null does not count for a function that measures numbers. Functions
that take anything (counts, shares, labels) count every row that passes the filters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from batchmill.oal import values
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
    LogBucketed,
    State,
    Sum,
    Tally,
)

Arg: TypeAlias = Condition | Path | int
"""An argument of a function: a condition, the path to a value, or a number."""

Value: TypeAlias = int | float | dict[str, int] | None
"""A final value; a dict has one number for each label. None: no row matched."""

Measures: TypeAlias = Literal["anything", "whole", "number"]
"""What may stand in ``from(...)``: anything or ``*``, a whole number, any number."""

MOST_STEPS = 10_000
"""A histogram has no more steps than this: every bucket is there, empty or not."""


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter of a function."""

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
    """The function to use instead where the measured value is a double."""

    def takes(self, count: int) -> bool:
        """Whether it can be called with so many arguments."""
        return sum(not param.optional for param in self.params) <= count <= len(self.params)


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
    return (*(Count(all_of((*where, condition))) for condition in args), Count(where))


def _apdex(where: Where, value: Path, args: tuple[Path, Path]) -> tuple[State, ...]:
    name, status = args
    return (
        ApdexCount(where, "satisfied", value, status, name),
        ApdexCount(where, "tolerated", value, status, name),
        Count(measured(where, value)),
    )


def _buckets(where: Where, value: Path, args: tuple[int]) -> tuple[State, ...]:
    return (Tally(where, Bucketed(value, args[0])),)


def _log_buckets(where: Where, value: Path, args: Sequence[Arg]) -> tuple[State, ...]:
    return (Tally(where, LogBucketed(value)),)


def _steps(where: Where, value: Path, args: tuple[int, int]) -> tuple[State, ...]:
    return (Tally(where, Clamped(value, *args)),)


def _labels(where: Where, value: Path | None, args: Sequence[Any]) -> tuple[State, ...]:
    return (Tally(where, Label(args[0])),)


def _label_sums(where: Where, value: Path | None, args: tuple[Path, Path]) -> tuple[State, ...]:
    return (LabelSum(where, *args),)


_PRECISION = (Param("precision", "count"),)
_LABEL = Param("label", "label")

FUNCTIONS: Mapping[str, Function] = {
    function.name: function
    for function in (
        Function("count", "anything", (), _count, values.count),
        Function("cpm", "anything", (), _count, values.per_minute),
        Function("sum", "number", (), _sum, values.total),
        Function("sumDouble", "number", (), _sum, values.double_total),
        Function("longAvg", "whole", (), _average, values.average, instead="doubleAvg"),
        Function("doubleAvg", "number", (), _average, values.double_average),
        Function("max", "whole", (), _greatest, values.greatest, instead="maxDouble"),
        Function("maxDouble", "number", (), _greatest, values.double_greatest),
        Function("min", "whole", (), _least, values.least, instead="minDouble"),
        Function("minDouble", "number", (), _least, values.double_least),
        Function(
            "percent", "anything", (Param("condition", "condition"),), _shares, values.percent
        ),
        Function(
            "rate",
            "anything",
            (Param("numerator", "condition"), Param("denominator", "condition")),
            _shares,
            values.rate,
        ),
        Function(
            "apdex",
            "whole",
            (Param("name", "text"), Param("status", "bool")),
            _apdex,
            values.apdex,
        ),
        Function("percentile2", "whole", _PRECISION, _buckets, values.percentile2, labelled=True),
        Function("percentile", "whole", _PRECISION, _buckets, values.percentile, labelled=True),
        Function("percentileLog", "whole", (), _log_buckets, values.percentile_log, labelled=True),
        Function(
            "histogram",
            "whole",
            (Param("step", "count"), Param("steps", "count", most=MOST_STEPS)),
            _steps,
            values.histogram,
            labelled=True,
        ),
        Function(
            "labelCount",
            "anything",
            (_LABEL, Param("cap", "count", optional=True)),
            _labels,
            values.label_counts,
            labelled=True,
        ),
        Function(
            "labelAvg",
            "anything",
            (_LABEL, Param("value", "whole")),
            _label_sums,
            values.label_averages,
            labelled=True,
        ),
    )
}
"""Every function of the language, by name."""
