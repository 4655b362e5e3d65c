"""Compare Kafka with the spool in one run: throughput and time to commit.

    python -m benchmarks.kafka [--quick]

Real processes: senders, ``batchmill ingest``, ``batchmill pipeline`` on Spark, SQLite; and a
broker from the jars of the tests (``python -m tests.kit.jvm jars``). No time is asserted.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from benchmarks import RESULTS
from benchmarks.ingest.receiver import rss_mib, scratch
from benchmarks.ingest.road import Drive, ingest_of, pipeline_of
from benchmarks.ingest.road_result import Step
from benchmarks.ingest.senders import Senders, percentile
from benchmarks.kit.machine import machine, machine_line
from benchmarks.kit.report import Table, say, spread, write_json

DEFAULT_JSON = RESULTS / "kafka.json"
SPOOL, KAFKA = "spool", "Kafka"
PARTITIONS = 4


@dataclass
class Turn:
    """One road for some time."""

    steady: Step
    flooded: int
    """Spans that were sent as fast as they were taken."""
    flood_s: float
    """Until the store had them all."""
    counted: int
    acknowledged: int
    ingest_mib: float

    @property
    def through(self) -> float:
        """Spans a second from the sender into the store, under a flood."""
        return self.flooded / self.flood_s

    def as_json(self) -> dict[str, Any]:
        return {
            "steady": {key: value for key, value in self.steady.as_json().items() if key != "lags"},
            "flooded": self.flooded,
            "flood_s": self.flood_s,
            "through": self.through,
            "acknowledged": self.acknowledged,
            "counted": self.counted,
            "ingest_mib": self.ingest_mib,
        }


@dataclass
class Roads:
    """The turns of each road."""

    turns: dict[str, list[Turn]] = field(default_factory=lambda: {SPOOL: [], KAFKA: []})

    def tables(self) -> list[Table]:
        rows = []
        for name, turns in self.turns.items():
            times = sorted(seconds for turn in turns for seconds in turn.steady.times())
            answers = sorted(seconds for turn in turns for seconds in turn.steady.answers)
            rows.append(
                [
                    name,
                    f"{median(turn.steady.rate for turn in turns):,.0f}",
                    *(f"{percentile(answers, share) * 1000:.0f}" for share in (0.5, 0.99)),
                    *(f"{percentile(times, share):.1f}" for share in (0.5, 0.95)),
                    f"{median(turn.through for turn in turns):,.0f}",
                    spread((turn.through / 1000 for turn in turns), 1),
                    f"{median(turn.ingest_mib for turn in turns):.0f}",
                    str(sum(turn.acknowledged - turn.counted for turn in turns)),
                ]
            )
        ratios = [
            theirs.through / ours.through
            for theirs, ours in zip(self.turns[KAFKA], self.turns[SPOOL], strict=True)
        ]
        return [
            Table(
                "Kafka compared with the spool",
                "Steady load: response time in ms, from sent to committed in s. Full load: spans"
                " per second until the store has all of them; Kafka to the spool"
                f" {median(ratios):.2f}x ({spread(ratios)}).",
                [
                    *(
                        "path",
                        "steady, spans/s",
                        "response, p50",
                        "p99",
                        "to committed, p50",
                        "p95",
                    ),
                    *("full load, spans/s", "thousands", "ingest, MiB", "lost"),
                ],
                rows,
            )
        ]

    def as_json(self) -> dict[str, Any]:
        return {name: [turn.as_json() for turn in turns] for name, turns in self.turns.items()}


def measure(
    *, rounds: int, warm_up_s: float, steady_s: float, rate: float, flood_s: float
) -> Roads:
    """Take turns."""
    from tests.kit.servers.kafka import broker_missing, private_broker

    if (missing := broker_missing()) is not None:
        raise SystemExit(missing)
    result = Roads()
    with private_broker() as broker:
        for number in range(rounds):
            for name in (SPOOL, KAFKA)[:: 1 if number % 2 == 0 else -1]:
                say(f"round {number + 1} of {rounds}: {name}")
                to = f"kafka://{broker.bootstrap}/{broker.new_topic(PARTITIONS)}"
                with _road(to if name == KAFKA else None) as (drive, pid):
                    drive.step(rate, warm_up_s, "warm-up")
                    steady = drive.step(rate, steady_s, "steady")
                    drive.await_read()
                    spans, took = drive.flood(flood_s)
                    counted = drive.store.counted()
                    turn = Turn(steady, spans, took, counted, drive.acknowledged, rss_mib(pid))
                    result.turns[name].append(turn)
    return result


@contextlib.contextmanager
def _road(topic: str | None) -> Iterator[tuple[Drive, int]]:
    reads = () if topic is None else ("--source", topic)
    to = () if topic is None else ("--to", topic)
    with scratch() as home, pipeline_of(home, *reads) as pipeline, ingest_of(home, *to) as ingest:
        senders = Senders()
        try:
            yield Drive(home, senders, ingest, pipeline), ingest.pid
        finally:
            senders.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it, print it, write it down."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kafka", description="compare Kafka with the spool"
    )
    parser.add_argument("--quick", action="store_true", help="a run of minutes, too short to quote")
    parser.add_argument("--json", type=Path, default=DEFAULT_JSON, help="file for the results")
    options = parser.parse_args(arguments)
    started = perf_counter()
    print(machine_line())
    size: dict[str, Any] = (
        {"rounds": 1, "warm_up_s": 20, "steady_s": 20, "rate": 2_000.0, "flood_s": 5}
        if options.quick
        else {"rounds": 2, "warm_up_s": 30, "steady_s": 45, "rate": 2_000.0, "flood_s": 10}
    )
    roads = measure(**size)
    for table in roads.tables():
        print("\n" + table.render(), flush=True)
    write_json(options.json, {"machine": machine(), "size": size, "roads": roads.as_json()})
    say(f"took {perf_counter() - started:.0f} s; results are in {options.json}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
