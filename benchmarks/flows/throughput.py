"""Signals a second from dispatch to handled, every flow in order, against hashing peers."""

from __future__ import annotations

import gc
import random
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

from benchmarks.flows.peers import (
    BATCH_MAX,
    ExecutorFlows,
    FlowPeer,
    FlowSignal,
    Handler,
    MillFlows,
    QueueFlows,
)
from benchmarks.kit.report import Table, say, spread
from benchmarks.queue.work import SEED

MILL = "batchmill"
EXECUTORS = "executor per worker, by hash"
QUEUES = "queue.Queue per worker, by hash"
WORKERS = 4
SIGNALS_PER_FLOW = 10
CONCURRENT_FLOWS = 200
PRODUCER_COUNTS = (1, 4)

CONTENDERS: dict[str, Callable[[Handler], FlowPeer]] = {
    MILL: lambda handler: MillFlows(handler, WORKERS),
    EXECUTORS: lambda handler: ExecutorFlows(handler, WORKERS),
    QUEUES: lambda handler: QueueFlows(handler, WORKERS),
}


class Sink:
    """A handler that keeps what it gets."""

    def __init__(self) -> None:
        self.arrived: list[FlowSignal] = []

    def __call__(self, batch: list[FlowSignal]) -> None:
        self.arrived.extend(batch)  # atomic: several workers may call this at once


class SpinningSink(Sink):
    """The same, and some microseconds of Python for each signal."""

    def __call__(self, batch: list[FlowSignal]) -> None:
        for _ in batch:
            sum(range(200))
        self.arrived.extend(batch)


HANDLERS: dict[str, type[Sink]] = {"keeps the signal": Sink, "+ a few us of work": SpinningSink}


@dataclass(kw_only=True)
class Throughput:
    """Rates in signals a second, by handler, producers and contender; one a repeat."""

    repeats: int
    rates: dict[tuple[str, int], dict[str, list[float]]] = field(default_factory=dict)

    def ratios(self, case: tuple[str, int], peer: str) -> list[float]:
        """How many times as fast as the peer, within each repeat."""
        both = zip(self.rates[case][MILL], self.rates[case][peer], strict=True)
        return [mine / theirs for mine, theirs in both]

    def worst_ratio(self, peer: str) -> float:
        """The smallest of the cases' medians."""
        return min(median(self.ratios(case, peer)) for case in self.rates)

    def tables(self) -> list[Table]:
        """One line for each handler, number of producers and contender."""
        rows = []
        for (handler, producers), per_name in self.rates.items():
            for name, rates in per_name.items():
                ratios = [] if name == MILL else self.ratios((handler, producers), name)
                rows.append(
                    [
                        name,
                        handler,
                        str(producers),
                        f"{median(rates) / 1e3:,.0f}",
                        spread((rate / 1e3 for rate in rates), digits=0),
                        f"{median(ratios):.2f}x" if ratios else "",
                        spread(ratios) if ratios else "",
                    ]
                )
        return [
            Table(
                "Throughput, thousand signals/s from dispatch to handled",
                f"Median of {self.repeats} interleaved repeats. {WORKERS} workers, flows of"
                f" {SIGNALS_PER_FLOW} signals, {CONCURRENT_FLOWS} at a time; batches of at most"
                f" {BATCH_MAX} (the executors take one signal a call and have no bound). Every"
                " signal arrived once and in its flow's order. 'Ahead' is batchmill's ratio to the"
                " line, taken within a repeat.",
                ["contender", "handler", "producers", "k/s", "min..max", "ahead", "min..max"],
                rows,
            )
        ]

    def as_json(self) -> dict[str, Any]:
        """Every rate."""
        return {
            f"{handler}, {producers} producers": per_name
            for (handler, producers), per_name in self.rates.items()
        }


def measure(*, repeats: int, flows: int) -> Throughput:
    """Let the contenders take turns on the same signals."""
    result = Throughput(repeats=repeats)
    rng = random.Random(SEED)
    for handler, sink in HANDLERS.items():
        for producers in PRODUCER_COUNTS:
            say(f"flows: throughput, {handler}, {producers} producers")
            work = build_work(producers, flows, rng)
            per_name: dict[str, list[float]] = {name: [] for name in CONTENDERS}
            for _ in range(repeats):
                for name in rng.sample(list(CONTENDERS), len(CONTENDERS)):
                    per_name[name].append(_run(CONTENDERS[name], sink(), work))
            result.rates[handler, producers] = per_name
    return result


def build_work(producers: int, flows: int, rng: random.Random) -> list[list[FlowSignal]]:
    """Each producer's signals: its own flows, some hundred at a time, interleaved."""
    per_producer = flows // producers
    return [_interleaved(producer, per_producer, rng) for producer in range(producers)]


def _interleaved(producer: int, flows: int, rng: random.Random) -> list[FlowSignal]:
    made: list[FlowSignal] = []
    sent: defaultdict[int, int] = defaultdict(int)
    alive = list(range(min(CONCURRENT_FLOWS, flows)))
    started = len(alive)
    while alive:
        place = rng.randrange(len(alive))
        flow = alive[place]
        number = sent[flow]
        sent[flow] = number + 1
        last = number + 1 == SIGNALS_PER_FLOW
        made.append(FlowSignal((producer, flow), number, last))
        if last:
            if started < flows:
                alive[place] = started
                started += 1
            else:
                alive[place] = alive[-1]
                alive.pop()
    return made


def _run(build: Callable[[Handler], FlowPeer], sink: Sink, work: list[list[FlowSignal]]) -> float:
    gc.collect()
    peer = build(sink)
    barrier = threading.Barrier(len(work) + 1)

    def produce(signals: list[FlowSignal]) -> None:
        put = peer.put
        barrier.wait()
        for signal in signals:
            put(signal)

    threads = [threading.Thread(target=produce, args=(signals,)) for signals in work]
    for thread in threads:
        thread.start()
    barrier.wait()
    started = perf_counter()
    for thread in threads:
        thread.join()
    peer.finish()
    seconds = perf_counter() - started
    _check(sink.arrived, work)
    return len(sink.arrived) / seconds


def _check(arrived: list[FlowSignal], work: list[list[FlowSignal]]) -> None:
    """Raise unless every signal arrived once, each flow's in order."""
    numbers: defaultdict[Any, list[int]] = defaultdict(list)
    for signal in arrived:
        numbers[signal.flow_id].append(signal.number)
    if len(arrived) != sum(map(len, work)) or any(
        flow != list(range(SIGNALS_PER_FLOW)) for flow in numbers.values()
    ):
        raise RuntimeError("signals were lost, doubled or out of order")
