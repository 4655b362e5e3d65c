"""Events a second from produce to merged state, and how the time grows with the metrics."""

from __future__ import annotations

import gc
import random
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter, process_time
from typing import Any

from benchmarks.aggregate.data import (
    BenchCall,
    Results,
    expected_growth,
    expected_results,
    make_calls,
)
from benchmarks.aggregate.peers import (
    CONTENDERS,
    EMIT,
    EMIT_MANY,
    Aggregation,
    MillMany,
)
from benchmarks.kit.report import Table, said, say, spread
from benchmarks.queue.third_party import MissingPeer
from benchmarks.queue.work import SEED

ENTITIES = 1_000
MINUTES = 3
MORE = 10
"""How many times the six metrics, where the growth is measured."""


@dataclass(frozen=True)
class Turn:
    """One run of a contender."""

    seconds: float
    cpu_seconds: float
    """Of all threads of the process."""


@dataclass(kw_only=True)
class Throughput:
    """The turns of the contenders, in repeats."""

    calls: int
    repeats: int
    turns: dict[str, list[Turn]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def rates(self, name: str) -> list[float]:
        """Calls a second."""
        return [self.calls / turn.seconds for turn in self.turns[name]]

    def ratios(self, name: str, peer: str, *, cpu: bool = False) -> list[float]:
        """How many times as fast as the peer, within each repeat; or by processor time."""
        pairs = zip(self.turns[name], self.turns[peer], strict=True)
        if cpu:
            return [theirs.cpu_seconds / mine.cpu_seconds for mine, theirs in pairs]
        return [theirs.seconds / mine.seconds for mine, theirs in pairs]

    def tables(self) -> list[Table]:
        """A line for each contender."""
        rows = []
        for name, turns in self.turns.items():
            rates = [rate / 1e3 for rate in self.rates(name)]
            cpu_ns = [turn.cpu_seconds / self.calls * 1e9 for turn in turns]
            row = [
                name,
                f"{median(rates):,.0f}",
                spread(rates, 0),
                f"{median(cpu_ns):,.0f}",
                spread(cpu_ns, 0),
            ]
            for mine in (EMIT_MANY, EMIT):
                ratios = self.ratios(mine, name)
                row += ["", ""] if mine == name else [f"{median(ratios):.1f}x", spread(ratios, 1)]
            rows.append(row)
        return [
            Table(
                "Throughput, thousand events/s from produce to merged state",
                f"Median of {self.repeats} interleaved repeats of {self.calls:,} events,"
                f" {ENTITIES:,} entities, {MINUTES} minutes, six metrics; one producer. All events"
                " were counted, and all states compared. 'committed' is to the end of the last"
                " commit to SQLite, with commits every 0.5 s; the others are to the states in"
                " memory. The instruments of prometheus_client and OpenTelemetry know no minutes"
                f" and no percentiles. CPU: of all threads. {said(self.missing)}",
                [
                    "contender",
                    "k/s",
                    "min..max",
                    "CPU ns",
                    "min..max",
                    "emit_many ahead",
                    "min..max",
                    "emit ahead",
                    "min..max",
                ],
                rows,
            )
        ]

    def as_json(self) -> dict[str, Any]:
        """Every turn."""
        return {
            "events": self.calls,
            "missing": self.missing,
            "events_per_s": {name: self.rates(name) for name in self.turns},
            "cpu_ns_per_event": {
                name: [turn.cpu_seconds / self.calls * 1e9 for turn in turns]
                for name, turns in self.turns.items()
            },
        }


@dataclass(kw_only=True)
class Growth:
    """The turns with six metrics and with ten times as many."""

    calls: int
    few: list[Turn] = field(default_factory=list)
    many: list[Turn] = field(default_factory=list)

    def ratios(self, *, cpu: bool = False) -> list[float]:
        """How many times as long the more metrics take, within each repeat."""
        pairs = zip(self.few, self.many, strict=True)
        if cpu:
            return [more.cpu_seconds / less.cpu_seconds for less, more in pairs]
        return [more.seconds / less.seconds for less, more in pairs]

    def tables(self) -> list[Table]:
        """A line for each number of metrics."""
        rows = []
        for metrics, turns in ((6, self.few), (6 * MORE, self.many)):
            seconds = [turn.seconds for turn in turns]
            cpu_ns = [turn.cpu_seconds / self.calls * 1e9 for turn in turns]
            rows.append(
                [
                    f"{metrics} metrics",
                    f"{median(seconds):.2f}",
                    spread(seconds),
                    f"{median(cpu_ns):,.0f}",
                    spread(cpu_ns, 0),
                ]
            )
        wall, cpu = self.ratios(), self.ratios(cpu=True)
        return [
            Table(
                f"Growth: {MORE} times the metrics",
                f"emit_many of {self.calls:,} events to merged state; every further six metrics"
                " count the calls above another latency, so that they share no state."
                f" {median(wall):.2f}x the time ({spread(wall)}), {median(cpu):.2f}x the processor"
                f" time ({spread(cpu)}).",
                ["", "seconds", "min..max", "CPU ns/event", "min..max"],
                rows,
            )
        ]

    def as_json(self) -> dict[str, Any]:
        """Every turn."""
        return {
            "events": self.calls,
            "seconds": {
                "6 metrics": [turn.seconds for turn in self.few],
                f"{6 * MORE} metrics": [turn.seconds for turn in self.many],
            },
            "ratios": self.ratios(),
            "cpu_ratios": self.ratios(cpu=True),
        }


def measure(*, repeats: int, calls: int) -> Throughput:
    """Let the contenders take turns on the same calls."""
    result = Throughput(calls=calls, repeats=repeats)
    work = make_calls(calls, entities=ENTITIES, minutes=MINUTES)
    expected = expected_results(work)
    rng = random.Random(SEED)
    for repeat in range(repeats):
        for name in rng.sample(list(CONTENDERS), len(CONTENDERS)):
            if name in result.missing:
                continue
            say(f"aggregate: throughput, repeat {repeat + 1}, {name}")
            try:
                peer = CONTENDERS[name]()
            except MissingPeer as missing:
                result.missing[name] = str(missing)
                continue
            result.turns.setdefault(name, []).append(_turn(peer, work))
            peer.check(expected)
    result.turns = {name: result.turns[name] for name in CONTENDERS if name in result.turns}
    return result


def measure_growth(*, repeats: int, calls: int) -> Growth:
    """Take turns with few and with many metrics."""
    result = Growth(calls=calls)
    work = make_calls(calls, entities=ENTITIES, minutes=MINUTES)
    expected = expected_growth(work, MORE)
    cases: list[tuple[int, list[Turn], list[Results]]] = [
        (1, result.few, expected[:1]),
        (MORE, result.many, expected),
    ]
    for repeat in range(repeats):
        for metrics, turns, own in cases if repeat % 2 else cases[::-1]:
            say(f"aggregate: growth, repeat {repeat + 1}, {6 * metrics} metrics")
            mill = MillMany(metrics=metrics, committed=False)
            turns.append(_turn(mill, work))
            mill.check(*own)
    return result


def _turn(peer: Aggregation, calls: list[BenchCall]) -> Turn:
    gc.collect()
    gc.freeze()  # collections need not walk over the calls
    try:
        cpu, started = process_time(), perf_counter()
        peer.feed(calls)
        peer.finish()
        return Turn(perf_counter() - started, process_time() - cpu)
    finally:
        gc.unfreeze()
