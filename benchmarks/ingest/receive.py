"""Acknowledged spans per second and their cost, compared with an OpenTelemetry Collector."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from batchmill.spool import SpoolSettings
from batchmill.wording import count_of
from benchmarks.ingest.receiver import OURS, Running, receivers, scratch
from benchmarks.ingest.senders import GRPC, HTTP, JSON, Load, Senders, Sent, percentile
from benchmarks.kit.report import Table, say, spread

SPANS = 500
"""A request."""
FEW, MANY = 8, 96
"""Connections that mostly wait for the linger, and connections that keep the receiver busy."""
CASES = ((HTTP, MANY), (GRPC, MANY), (JSON, MANY), (HTTP, FEW))
"""Protocol and connections."""
BUSY = CASES[0]
WARM_UP_S = 2.0
LINGER_S = SpoolSettings().linger_s

Case = tuple[str, int]


@dataclass
class Turn:
    """One receiver, for some seconds."""

    rate: float
    p50: float
    p99: float
    cpu_us: float
    """Of the receiver, for each span: the same figure as processor-seconds a million spans."""
    sender_cpu_us: float
    refused: int


@dataclass
class Receive:
    """The turns of each case, by receiver."""

    seconds: float
    turns: dict[Case, dict[str, list[Turn]]] = field(default_factory=dict)

    def rates(self, case: Case, name: str = OURS) -> list[float]:
        return [turn.rate for turn in self.turns[case][name]]

    def costs(self, case: Case, name: str = OURS) -> list[float]:
        return [turn.cpu_us for turn in self.turns[case][name]]

    def gains(self, case: Case, name: str) -> list[float]:
        """How many times the rate of another receiver, within each round."""
        both = zip(self.rates(case), self.rates(case, name), strict=True)
        return [ours / other for ours, other in both]

    def savings(self, case: Case, name: str) -> list[float]:
        """How many times the processor time of another receiver, within each round."""
        both = zip(self.costs(case), self.costs(case, name), strict=True)
        return [ours / other for ours, other in both]

    def tables(self) -> list[Table]:
        rounds = len(self.turns[BUSY][OURS])
        rows = [
            [
                f"{name_of(case)}: {name}",
                f"{median(turn.rate for turn in turns):,.0f}",
                spread((turn.rate / 1000 for turn in turns), 1),
                f"{median(turn.p50 for turn in turns) * 1000:.0f}",
                f"{median(turn.p99 for turn in turns) * 1000:.0f}",
                f"{median(turn.cpu_us for turn in turns):.2f}",
                spread((turn.cpu_us for turn in turns), 2),
                f"{median(self.savings(case, name)):.2f}x" if name != OURS else "",
                f"{median(turn.sender_cpu_us for turn in turns):.2f}",
            ]
            for case, contenders in self.turns.items()
            for name, turns in contenders.items()
        ]
        return [
            Table(
                "Receiving",
                f"Acknowledged spans per second, ten attributes each, {SPANS} in a request,"
                f" {count_of(rounds, 'round')} of {self.seconds:g} s, the receivers in turn; two"
                " sender processes on the same two cores, each connection waits for the response"
                " before it sends again. batchmill responds when the segment is synced; so with few"
                f" connections this measures mostly the linger of {LINGER_S * 1000:.0f} ms. The"
                " Collector aggregates (batch processor, spanmetrics, Prometheus exporter) and"
                " keeps nothing durable. Response times in ms; processor time in seconds a million"
                " spans, and batchmill's to the other's.",
                [
                    *("case", "spans/s", "thousands", "p50", "p99"),
                    *("cpu", "range", "batchmill to it", "sender"),
                ],
                rows,
            )
        ]

    def as_json(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "cases": [
                {
                    "case": name_of(case),
                    **{name: [vars(turn) for turn in turns] for name, turns in contenders.items()},
                }
                for case, contenders in self.turns.items()
            ],
        }


@dataclass
class Steady:
    """The receiver's memory while it takes all it can, and its response times at half of that."""

    seconds: float
    rate: float
    mib: list[float]
    """Resident memory, every half second."""
    half: Turn
    half_load: float

    def third(self, number: int) -> float:
        """The median of the first, second or last third."""
        size = max(1, len(self.mib) // 3)
        return median(self.mib[number * size : (number + 1) * size])

    def growth(self) -> float:
        """From the middle to the end."""
        return self.third(2) / self.third(1)

    def tables(self) -> list[Table]:
        row = [f"{self.third(number):.0f}" for number in range(3)]
        half = [f"{self.half.p50 * 1000:.0f}", f"{self.half.p99 * 1000:.0f}"]
        return [
            Table(
                "Memory of the receiver",
                f"Resident MiB during {self.seconds:g} s of {name_of(BUSY)}, at"
                f" {self.rate:,.0f} acknowledged spans a second: medians of the thirds.",
                ["", "start", "middle", "end", "most", "end to middle"],
                [["RSS", *row, f"{max(self.mib):.0f}", f"{self.growth():.3f}x"]],
            ),
            Table(
                "Response times at half load",
                f"{name_of(BUSY)}, {self.half_load:,.0f} spans/s; the linger is"
                f" {LINGER_S * 1000:.0f} ms.",
                ["p50 ms", "p99 ms"],
                [half],
            ),
        ]

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "half": vars(self.half), "growth": self.growth()}


def name_of(case: Case) -> str:
    """In words."""
    protocol, connections = case
    return f"{protocol}, {connections} connections"


def measure(*, rounds: int, seconds: float) -> Receive:
    """Take turns."""
    result = Receive(seconds)
    with scratch() as folder, _senders() as senders, receivers(folder) as running:
        for case in CASES:
            turns = result.turns[case] = {name: [] for name in running}
            for number in range(rounds):
                say(f"receiving: {name_of(case)}, round {number + 1} of {rounds}")
                # Who goes first changes.
                for name in list(running)[:: 1 if number % 2 else -1]:
                    turns[name].append(_turn(senders, running[name], case, seconds))
    return result


def measure_steady(*, seconds: float, half_s: float) -> Steady:
    """Keep the receiver busy and watch its memory; then half as busy, and take the time."""
    with scratch() as folder, _senders() as senders, receivers(folder, (OURS,)) as running:
        ours = running[OURS]
        _turn(senders, ours, BUSY, min(5.0, seconds))  # what it loads at first use
        ours.memory.clear()
        say(f"memory of the receiver: {seconds:g} s")
        busy = _turn(senders, ours, BUSY, seconds)
        memory = list(ours.memory)
        half_load = busy.rate / 2
        say(f"response times at half load: {half_s:g} s")
        half = _turn(senders, ours, BUSY, half_s, half_load)
        return Steady(seconds, busy.rate, memory, half, half_load)


def _turn(
    senders: Senders, running: Running, case: Case, seconds: float, rate: float = 0.0
) -> Turn:
    protocol, connections = case
    load = Load(
        protocol=protocol, address=running.address(protocol), spans=SPANS,
        connections=connections, seconds=WARM_UP_S + seconds, rate=rate,
    )  # fmt: skip
    before = running.cpu_s()
    sent = checked(senders.run(load))
    cpu = running.cpu_s() - before
    waits = sent.waits(WARM_UP_S)
    return Turn(
        rate=sent.rate(WARM_UP_S),
        p50=percentile(waits, 0.5),
        p99=percentile(waits, 0.99),
        cpu_us=cpu / sent.spans() * 1e6,
        sender_cpu_us=sent.cpu_s / sent.spans() * 1e6,
        refused=sent.refused,
    )


def checked(sent: Sent) -> Sent:
    """Raise if a sender failed: its figures would mislead."""
    if sent.errors:
        raise RuntimeError(f"{len(sent.errors)} senders failed, the first: {sent.errors[0]}")
    return sent


@contextlib.contextmanager
def _senders() -> Iterator[Senders]:
    made = Senders()
    try:
        yield made
    finally:
        made.close()
