"""Acknowledged spans per second, compared with the same receiver that only decodes and drops."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.ingest_receiver import DROPS, STORES, Running, receiver, scratch
from benchmarks.ingest_senders import GRPC, HTTP, Load, Senders, Sent, percentile
from benchmarks.report import Table, say, spread

FEW = 8
"""Connections that mostly wait for the linger."""
MANY = {500: 64, 2000: 32}
"""Connections that keep the receiver busy, by the spans of a request."""
CASES = [
    (protocol, spans, connections)
    for few in (True, False)
    for protocol in (HTTP, GRPC)
    for spans, connections in ((each, FEW if few else MANY[each]) for each in MANY)
]
"""Protocol, spans a request, connections."""
WARM_UP_S = 2.0

Case = tuple[str, int, int]


@dataclass
class Turn:
    """One receiver, for some seconds."""

    rate: float
    p50: float
    p99: float
    cpu_us: float
    """Of the receiver, for each span."""
    sender_cpu_us: float
    refused: int


@dataclass
class Receive:
    """The turns of each case, by receiver."""

    seconds: float
    turns: dict[Case, dict[str, list[Turn]]] = field(default_factory=dict)

    def ratios(self, case: Case) -> list[float]:
        """How many times the spans a second of the one that drops, within each round."""
        both = zip(self.turns[case][STORES], self.turns[case][DROPS], strict=True)
        return [ours.rate / theirs.rate for ours, theirs in both]

    def ratio(self, case: Case) -> float:
        return median(self.ratios(case))

    def tables(self) -> list[Table]:
        rounds = len(next(iter(self.turns.values()))[STORES])
        rows = []
        for case, turns in self.turns.items():
            ratios = self.ratios(case)
            for name in (STORES, DROPS):
                found = turns[name]
                ours = name == STORES
                rows.append(
                    [
                        f"{name_of(case)}, {name}",
                        f"{median(each.rate for each in found):,.0f}",
                        spread((each.rate / 1000 for each in found), 1),
                        f"{median(ratios):.2f}x" if ours else "",
                        spread(ratios) if ours else "",
                        f"{median(each.p50 for each in found) * 1000:.0f}",
                        f"{median(each.p99 for each in found) * 1000:.0f}",
                        f"{median(each.cpu_us for each in found):.1f}",
                        f"{median(each.sender_cpu_us for each in found):.1f}",
                    ]
                )
        return [
            Table(
                "Receiving",
                f"Acknowledged spans per second, ten attributes each, {rounds} rounds of"
                f" {self.seconds:g} s, the receivers in turn; two sender processes on the same"
                " machine, each connection waits for the response before it sends again. 'into"
                " the spool' responds when the segment is synced; so with few connections this"
                " measures mostly the linger of 200 ms. Response times in ms, CPU time in us per"
                " span.",
                ["case", "spans/s", "thousands", "ratio", "range", "p50", "p99", "cpu", "sender"],
                rows,
            )
        ]

    def as_json(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "cases": [
                {
                    "case": name_of(case),
                    "ratios": self.ratios(case),
                    **{name: [vars(each) for each in found] for name, found in turns.items()},
                }
                for case, turns in self.turns.items()
            ],
        }


@dataclass
class Memory:
    """The receiver's resident memory while it takes all it can."""

    seconds: float
    rate: float
    mib: list[float]
    """Every half second."""

    def third(self, number: int) -> float:
        """The median of the first, second or last third."""
        size = max(1, len(self.mib) // 3)
        return median(self.mib[number * size : (number + 1) * size])

    def growth(self) -> float:
        """From the middle to the end."""
        return self.third(2) / self.third(1)

    def tables(self) -> list[Table]:
        row = [f"{self.third(number):.0f}" for number in range(3)]
        return [
            Table(
                "Memory of the receiver",
                f"Resident MiB during {self.seconds:g} s of {name_of((HTTP, 500, MANY[500]))}, at"
                f" {self.rate:,.0f} acknowledged spans a second: medians of the thirds.",
                ["", "start", "middle", "end", "most", "end to middle"],
                [["RSS", *row, f"{max(self.mib):.0f}", f"{self.growth():.3f}x"]],
            )
        ]

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "growth": self.growth()}


def name_of(case: Case) -> str:
    """In words."""
    protocol, spans, connections = case
    return f"{protocol}, {connections} connections, {spans:,} spans"


def measure(*, rounds: int, seconds: float) -> Receive:
    """Take turns."""
    result = Receive(seconds)
    with scratch() as folder, _senders() as senders, contextlib.ExitStack() as stack:
        made = {
            name: stack.enter_context(receiver(_home(folder, number), name))
            for number, name in enumerate((STORES, DROPS))
        }
        for case in CASES:
            turns = result.turns[case] = {name: [] for name in made}
            for number in range(rounds):
                say(f"receiving: {name_of(case)}, round {number + 1} of {rounds}")
                # Who goes first changes.
                for name in list(made)[:: 1 if number % 2 else -1]:
                    turns[name].append(_turn(senders, made[name], case, seconds))
    return result


def measure_memory(*, seconds: float) -> Memory:
    """Keep the receiver busy, and watch."""
    with (
        scratch() as folder,
        _senders() as senders,
        receiver(_home(folder, 0), STORES) as found,
    ):
        case = (HTTP, 500, MANY[500])
        _turn(senders, found, case, min(5.0, seconds))  # what it loads at first use
        found.memory.clear()
        say(f"memory of the receiver: {seconds:g} s")
        turn = _turn(senders, found, case, seconds)
        return Memory(seconds, turn.rate, list(found.memory))


def _turn(senders: Senders, found: Running, case: Case, seconds: float) -> Turn:
    protocol, spans, connections = case
    load = Load(
        protocol=protocol, address=found.address(protocol), spans=spans,
        connections=connections, seconds=WARM_UP_S + seconds,
    )  # fmt: skip
    before = found.cpu_s()
    sent = checked(senders.run(load))
    cpu = found.cpu_s() - before
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


def _home(folder: Path, number: int) -> Path:
    home = folder / str(number)
    home.mkdir()
    return home


@contextlib.contextmanager
def _senders() -> Iterator[Senders]:
    made = Senders()
    try:
        yield made
    finally:
        made.close()
