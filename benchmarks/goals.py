"""The goals, each with the value that this run measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks import contenders
from benchmarks.idle import Idle
from benchmarks.latency import Latency
from benchmarks.memory import Memory
from benchmarks.rebalance import REBALANCED, STATIC, Rebalance
from benchmarks.report import Result, Table
from benchmarks.standings import Throughput


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A figure that has to be at least, or at most, a limit."""

    what: str
    value: float | None
    """None where a peer was missing."""
    limit: float
    at_least: bool
    unit: str

    @property
    def verdict(self) -> str:
        """In a word."""
        if self.value is None:
            return "not measured"
        met = self.value >= self.limit if self.at_least else self.value <= self.limit
        return "met" if met else "MISSED"

    def row(self) -> list[str]:
        """A line of the table."""
        measured = "-" if self.value is None else f"{_figure(self.value)}{self.unit}"
        bound = f"{'>=' if self.at_least else '<='} {_figure(self.limit)}{self.unit}"
        return [self.what, bound, measured, self.verdict]

    def as_json(self) -> dict[str, Any]:
        """What to keep."""
        return {**vars(self), "verdict": self.verdict}


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def goals_of(results: dict[str, Result]) -> list[Goal]:
    """The goals that these results say something about."""
    goals: list[Goal] = []
    for result in results.values():
        match result:
            case Throughput():
                goals += _throughput_goals(result)
            case Latency():
                p99 = result.p99_ratio()
                goals.append(_at_most("p99 latency to queue.Queue's, 1,000 items/s", p99, 1))
            case Idle():
                percent = result.worst_of_fifty()
                goals.append(_at_most("50 idle queues, of a core", percent, 0.5, " %"))
            case Memory():
                size = result.worst_of_mill()
                goals.append(_at_most("memory per queued item, beyond it", size, 24, " B"))
            case Rebalance():
                goals += _rebalance_goals(result)
    return goals


def table_of(goals: list[Goal]) -> Table:
    """All goals with their verdicts."""
    return Table(
        "Goals",
        "Throughput: the median over 1, 4 and 16 producers. 'tight' has the peer's bound in all;"
        " without it batchmill has that bound in each partition."
        " A missed goal does not fail the run.",
        ["goal", "limit", "measured", ""],
        [goal.row() for goal in goals],
    )


def _throughput_goals(result: Throughput) -> Iterator[Goal]:
    for name, peer, limit in (
        (contenders.MILL, contenders.QUEUE, 12.0),
        (contenders.MILL_TIGHT, contenders.QUEUE, 12.0),
        (contenders.MILL, contenders.OPENTELEMETRY, 3.0),
        (contenders.MILL, contenders.SIMPLE_QUEUE_PLAIN, 1.3),
        (contenders.MILL, contenders.SIMPLE_QUEUE, 1.3),
        (contenders.MILL_BULK, contenders.QUEUE, 60.0),
        (contenders.MILL_BULK_TIGHT, contenders.QUEUE, 60.0),
        (contenders.MILL_MIXED, contenders.MILL_LOOP, 2.0),
    ):
        ratio = result.ratio(name, peer)
        value = None if ratio is None else ratio.median
        yield _at_least(f"{name} to {peer}", value, limit, "x")


def _rebalance_goals(result: Rebalance) -> list[Goal]:
    static, rebalanced = result.load_ratio(STATIC), result.load_ratio(REBALANCED)
    return [
        _at_least("max/min load, static (or there is no case)", static, 1.25),
        _at_most("max/min load, rebalanced", rebalanced, 1.1),
        _at_least("throughput, rebalanced to static", median(result.gains()), 1.15),
    ]


def _at_least(what: str, value: float | None, limit: float, unit: str = "x") -> Goal:
    return Goal(what=what, value=value, limit=limit, at_least=True, unit=unit)


def _at_most(what: str, value: float | None, limit: float, unit: str = "x") -> Goal:
    return Goal(what=what, value=value, limit=limit, at_least=False, unit=unit)
