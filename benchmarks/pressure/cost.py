"""The cost of one submit: without thresholds, with thresholds, and when a threshold decides."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter_ns
from typing import Any

from batchmill.batcher import BatcherSettings, ItemResult, MicroBatcher
from batchmill.pressure import QueueFullError, QueueThresholdSettings, ThresholdLevel, strategies
from benchmarks.kit.report import Table, say, spread
from benchmarks.queue.work import SEED

PLAIN = "no thresholds"
BELOW = "below WARNING"

CRITICAL_AT = 100


@dataclass(frozen=True, kw_only=True)
class Case:
    """Thresholds, how many items wait before the clock runs, and what each submit must answer."""

    thresholds: Callable[[int], QueueThresholdSettings | None]
    """From the number of submits."""
    waiting: int = 1
    answer: Callable[[ItemResult[int]], bool] = lambda result: result.is_success


def _rejected(result: ItemResult[int]) -> bool:
    error = result.error
    return isinstance(error, QueueFullError) and error.level is ThresholdLevel.CRITICAL


def _dropped(result: ItemResult[int]) -> bool:
    return result.is_dropped and result.level is ThresholdLevel.CRITICAL


def _full(**settings: Any) -> QueueThresholdSettings:
    return QueueThresholdSettings(max_queue_size=CRITICAL_AT, **settings)


CASES: dict[str, Case] = {
    PLAIN: Case(thresholds=lambda submits: None),
    BELOW: Case(thresholds=lambda submits: QueueThresholdSettings(max_queue_size=4 * submits)),
    "at WARNING, accepted": Case(
        thresholds=lambda submits: QueueThresholdSettings(
            max_queue_size=4 * submits, warning_threshold=1
        )
    ),
    "at CRITICAL, reject()": Case(
        thresholds=lambda submits: _full(critical_handler=strategies.reject()),
        waiting=CRITICAL_AT,
        answer=_rejected,
    ),
    "at CRITICAL, drop()": Case(
        thresholds=lambda submits: _full(critical_handler=strategies.drop()),
        waiting=CRITICAL_AT,
        answer=_dropped,
    ),
    "the same with a listener": Case(
        thresholds=lambda submits: _full(critical_handler=strategies.drop(), listeners=(id,)),
        waiting=CRITICAL_AT,
        answer=_dropped,
    ),
}


@dataclass(kw_only=True)
class Cost:
    """Nanoseconds of a submit by case, one figure a repeat."""

    submits: int
    times: dict[str, list[float]] = field(default_factory=dict)

    def ratios(self, case: str) -> list[float]:
        """How many times the cost of a submit without thresholds, within each repeat."""
        both = zip(self.times[case], self.times[PLAIN], strict=True)
        return [this / plain for this, plain in both]

    def ratio(self, case: str) -> float:
        """The median of the ratios."""
        return median(self.ratios(case))

    def tables(self) -> list[Table]:
        """A line a case."""
        rows = []
        for case, times in self.times.items():
            compared = case != PLAIN
            rows.append(
                [
                    case,
                    f"{median(times) / 1e3:.2f}",
                    spread(time / 1e3 for time in times),
                    f"{self.ratio(case):.2f}x" if compared else "",
                    spread(self.ratios(case)) if compared else "",
                ]
            )
        return [
            Table(
                "Cost of one submit, microseconds",
                f"{self.submits:,} submits by one thread, median of {len(self.times[PLAIN])}"
                " interleaved repeats; no batch is sent while the clock runs. 'Ratio' is to 'no"
                " thresholds' in the same repeat. Every answer was checked.",
                ["submit", "us", "min..max", "ratio", "min..max"],
                rows,
            )
        ]

    def as_json(self) -> dict[str, Any]:
        """Every time."""
        return {"submits": self.submits, "nanoseconds": self.times}


def measure(*, repeats: int, submits: int) -> Cost:
    """Let the cases take turns."""
    result = Cost(submits=submits, times={name: [] for name in CASES})
    rng = random.Random(SEED)
    say("pressure: cost of a submit")
    for _ in range(repeats):
        for name in rng.sample(list(CASES), len(CASES)):
            result.times[name].append(_run(CASES[name], submits))
    return result


def _run(case: Case, submits: int) -> float:
    """Nanoseconds of a submit to a batcher that sends nothing before it is closed."""
    gc.collect()
    config = BatcherSettings(batch_size=1_000_000, linger_ms=600_000)
    items = list(range(submits))
    with MicroBatcher[int](list, config, case.thresholds(submits)) as batcher:
        for item in range(case.waiting):
            batcher.submit(item)
        submit = batcher.submit
        started = perf_counter_ns()
        futures = [submit(item) for item in items]
        taken = perf_counter_ns() - started
    results = [future.result(timeout=60) for future in futures]
    if [result.item for result in results] != items or not all(map(case.answer, results)):
        raise RuntimeError("a submit was answered wrongly")
    return taken / submits
