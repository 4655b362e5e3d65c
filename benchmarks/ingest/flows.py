"""Benefit and cost of a FlowDispatcher keyed by trace id in front of the spool.

Spans of one trace come from several senders, each with its own export interval. The
benefit is how often both spans of a call between two services reach the pipeline in one
micro-batch. The segments show it: a micro-batch reads those finished since the previous one.
"""

from __future__ import annotations

import contextlib
import heapq
import random
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

import pyarrow.parquet as pq

from batchmill.spool import SpanBatch
from benchmarks.ingest.bodies import SEED, Made, trace
from benchmarks.ingest.flows_roads import DIRECT, FLOWS, ROADS, open_road
from benchmarks.ingest.receiver import scratch
from benchmarks.kit.report import Table, say, spread

DELAYS_S = (0.2, 1.0, 5.0)
"""How often a sender exports; 5 s is what OpenTelemetry's SDKs do unless told otherwise."""
TRIGGERS_S = (1.0, 5.0)
"""How often the pipeline looks: under ``batchmill run``, and alone."""
SENDERS = 4
PHASES = 8
"""Places at which a micro-batch may begin; the share is the mean over them."""
IN_FLIGHT = 180
"""Requests of 500: nearly two segments."""
_KINDS = ("INTERNAL", "INTERNAL", "SERVER", "CLIENT", "PRODUCER", "CONSUMER")


@dataclass
class Rate:
    """How quickly spans became durable."""

    spans_s: float
    cpu_us: float
    """For each span, the writing of segments included."""


@dataclass
class Flows:
    """Shares by delay and road, and rates by road."""

    seconds: float
    rate: float
    shares: dict[float, dict[str, dict[str, float]]] = field(default_factory=dict)
    """By the senders' delay, the road, and what counts as together."""
    relations: dict[float, int] = field(default_factory=dict)
    rates: dict[str, list[Rate]] = field(default_factory=lambda: {name: [] for name in ROADS})

    def gains(self) -> list[float]:
        """What the dispatcher adds to the share in a micro-batch, in points, for each case."""
        return [
            100 * (roads[FLOWS][key] - roads[DIRECT][key])
            for roads in self.shares.values()
            for key in map(_named, TRIGGERS_S)
        ]

    def costs(self) -> list[float]:
        """Spans a second with the dispatcher to without, within each round."""
        both = zip(self.rates[FLOWS], self.rates[DIRECT], strict=True)
        return [ours.spans_s / theirs.spans_s for ours, theirs in both]

    def tables(self) -> list[Table]:
        keys = ["segment", *map(_named, TRIGGERS_S)]
        rows = [
            [f"every {delay:g} s, {name}", *(f"{100 * shares[key]:.1f} %" for key in keys)]
            for delay, roads in self.shares.items()
            for name, shares in roads.items()
        ]
        best = max(self.gains(), key=abs)
        worth = "not worth it" if best < 1 else "consider using it"
        cost = [
            [
                name,
                f"{median(round_.spans_s for round_ in rounds):,.0f}",
                spread((round_.spans_s / 1000 for round_ in rounds), 1),
                f"{median(round_.cpu_us for round_ in rounds):.1f}",
            ]
            for name, rounds in self.rates.items()
        ]
        return [
            Table(
                "Calls whose two spans arrive together",
                f"Traces over {SENDERS} senders, each with its own export interval;"
                f" {self.rate:,.0f} spans/s for {self.seconds:g} s, the same requests at the same"
                " times on both paths, the spool's linger 200 ms. Shares of calls between two"
                " services whose spans are in one segment, and in one micro-batch (mean over"
                f" {PHASES} possible start times). The dispatcher changes the share by at most"
                f" {best:+.1f} points: {worth}. It keeps spans in order, but cannot make late spans"
                " arrive earlier, and a segment has the spans of all senders anyway.",
                ["senders export", *keys],
                rows,
            ),
            Table(
                "Cost of the dispatcher",
                "Spans per second from decoded requests of 500 spans to durable, at full load,"
                f" {len(self.costs())} rounds in turn. With the dispatcher to without:"
                f" {median(self.costs()):.2f}x ({spread(self.costs())}).",
                ["path", "spans/s", "thousands", "cpu us per span"],
                cost,
            ),
        ]

    def as_json(self) -> dict[str, Any]:
        rates = {name: [vars(round_) for round_ in rounds] for name, rounds in self.rates.items()}
        return {**vars(self), "rates": rates, "gains": self.gains(), "costs": self.costs()}


def measure(*, seconds: float, rate: float, rounds: int, round_s: float) -> Flows:
    """Both roads at the same time for the shares, in turns for the rates."""
    result = Flows(seconds, rate)
    with scratch() as folder:
        say(f"flows: {seconds:g} s at {rate:,.0f} spans/s, {len(DELAYS_S)} export intervals")
        roads = [(delay, name) for delay in DELAYS_S for name in ROADS]
        _pace(folder, {delay: _requests(delay, rate, seconds) for delay in DELAYS_S})
        for delay, name in roads:
            spans = _read(folder / f"{delay}-{name}")
            relations = _relations(spans)
            result.relations[delay] = len(relations)
            result.shares.setdefault(delay, {})[name] = _shares(relations)
        ready = _full_requests()
        for number in range(rounds):
            say(f"flows: cost, round {number + 1} of {rounds}")
            for name in list(ROADS)[:: 1 if number % 2 else -1]:
                result.rates[name].append(_drive(folder / f"{number}-{name}", name, ready, round_s))
    return result


def _named(trigger_s: float) -> str:
    return f"micro-batch, {trigger_s:g} s"


def _requests(delay: float, rate: float, seconds: float) -> list[tuple[float, SpanBatch]]:
    """What is sent when, in seconds from the start: each span with its sender's next export."""
    rng = random.Random(f"{SEED}-{delay}")
    phases = [rng.random() * delay for _ in range(SENDERS)]
    due: dict[tuple[int, int], list[Made]] = defaultdict(list)
    at, count = 0.0, 0
    while at < seconds:
        spans = list(trace(rng, 0))
        count += len(spans)
        for span in spans:
            sender = int(span.service.rpartition("-")[2]) % SENDERS
            ended = at + span.took_ns / 1e9
            due[sender, int((ended - phases[sender]) // delay) + 1].append(span)
        at += len(spans) / rate
    return sorted(
        ((phases[sender] + turn * delay, _batch(spans)) for (sender, turn), spans in due.items()),
        key=lambda request: request[0],
    )


def _batch(spans: list[Made]) -> SpanBatch:
    batch = SpanBatch()
    now = time.time_ns() // 1000
    resources: dict[str, dict[str, str]] = {}  # spans of one service share it, as the decoder's do
    for made in spans:
        span = {
            "time": now,
            "end_time": now + made.took_ns // 1000,
            "trace_id": made.trace_id.hex(),
            "span_id": made.span_id.hex(),
            "parent_span_id": made.parent.hex() or None,
            "name": made.name,
            "kind": _KINDS[made.kind],
            "status": "UNSET",
            "service": made.service,
            "resource": resources.setdefault(made.service, {"service.name": made.service}),
            "attributes": {key: str(value) for key, value in made.attributes.items()},
        }
        for name, column in batch.columns.items():
            column.append(span[name])
    return batch


def _full_requests() -> list[SpanBatch]:
    rng = random.Random(SEED)
    made = []
    for _ in range(100):
        spans: list[Made] = []
        while len(spans) < 500:
            spans += trace(rng, 0)
        made.append(_batch(spans[:500]))
    return made


def _pace(folder: Path, requests: dict[float, list[tuple[float, SpanBatch]]]) -> None:
    """Hand each request over at its moment, on both roads."""
    with contextlib.ExitStack() as stack:
        roads = {
            (delay, name): stack.enter_context(open_road(folder / f"{delay}-{name}", name))
            for delay in requests
            for name in ROADS
        }
        began = time.monotonic()
        every = ([(at, delay, batch) for at, batch in due] for delay, due in requests.items())
        for at, delay, batch in heapq.merge(*every, key=lambda request: request[0]):
            time.sleep(max(0.0, began + at - time.monotonic()))
            for name in ROADS:
                roads[delay, name].submit(batch)


def _read(folder: Path) -> Iterator[tuple[str, str, str | None, str, float]]:
    """Each span's ids and service, and when its segment was begun, which also tells it apart."""
    for path in sorted(folder.glob("Span/[!.]*.parquet")):
        table = pq.read_table(path, columns=["trace_id", "span_id", "parent_span_id", "service"])
        at = int(path.name.partition("-")[0]) / 1e6
        for row in zip(*(column.to_pylist() for column in table.columns), strict=True):
            yield (*row, at)


def _relations(
    spans: Iterator[tuple[str, str, str | None, str, float]],
) -> list[tuple[float, float]]:
    """The segments of calling and serving span, for each call from one service to another."""
    rows = list(spans)
    known = {(row[0], row[1]): (row[3], row[4]) for row in rows}
    calls = ((known.get((row[0], row[2] or "")), row[3], row[4]) for row in rows)
    return [(parent[1], at) for parent, service, at in calls if parent and parent[0] != service]


def _shares(relations: list[tuple[float, float]]) -> dict[str, float]:
    shares = {"segment": mean(float(one == other) for one, other in relations)}
    for trigger in TRIGGERS_S:
        places = [trigger * number / PHASES for number in range(PHASES)]
        shares[_named(trigger)] = mean(
            float((one - place) // trigger == (other - place) // trigger)
            for place in places
            for one, other in relations
        )
    return shares


def _drive(folder: Path, name: str, requests: list[SpanBatch], seconds: float) -> Rate:
    """As many as are taken, with so many under way that the linger does not matter."""
    room = threading.Semaphore(IN_FLIGHT)
    failures: list[BaseException] = []

    def done(answer: Future[Any]) -> None:
        error = answer.exception()
        failures.extend([] if error is None else [error])
        room.release()

    with open_road(folder, name) as road:
        began, cpu, spans = time.perf_counter(), time.process_time(), 0
        while time.perf_counter() - began < seconds:
            batch = requests[spans // len(requests[0]) % len(requests)]
            room.acquire()
            road.submit(batch).add_done_callback(done)
            spans += len(batch)
        for _ in range(IN_FLIGHT):
            room.acquire()
        took, used = time.perf_counter() - began, time.process_time() - cpu
    if failures:
        raise failures[0]
    return Rate(spans / took, used / spans * 1e6)
