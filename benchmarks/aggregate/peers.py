"""The contenders of the aggregation benchmark: what takes calls and merges them into metrics."""

from __future__ import annotations

import importlib
import itertools
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

from batchmill import presets
from batchmill.queue import BatchQueue, BufferStrategy
from batchmill.workers import Embedded
from benchmarks.aggregate.data import (
    APDEX_MS,
    PRECISION,
    STEP,
    STEPS,
    BenchCall,
    Key,
    Results,
    ServiceTotals,
    States,
    WrongResult,
    check,
    minute_of,
    script,
    service_totals,
    stored_results,
)
from benchmarks.queue.third_party import MissingPeer

CHUNK = 1_000
"""Calls in a list for ``emit_many``."""
QUEUE_SIZE = 20_000
"""As in batchmill's own queue."""
BOUNDS = [STEP * (place + 1) - 1 for place in range(STEPS)]
"""The same buckets as the metric's, by their greatest whole number."""
TIMEOUT_S = 300


class Aggregation(Protocol):
    """Takes calls and merges them."""

    def feed(self, calls: Sequence[BenchCall]) -> None:
        """Take all calls, in order."""

    def finish(self) -> None:
        """Return when every call is merged."""

    def check(self, expected: Results) -> None:
        """Raise unless the states are those expected; the last call."""


class Mill:
    """``Embedded`` into SQLite, to the merged states in L2 or to the end of the last commit.

    To the merged states, nothing is committed before the check: ``l2_period_s`` is long. A full
    queue makes ``emit`` wait, as ``emit_many`` does with a timeout; by default ``emit`` drops the
    event instead.
    """

    def __init__(self, *, metrics: int = 1, committed: bool) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._url = f"sqlite:///{self._folder.name}/metrics.db"
        self._committed = committed
        self._count = 0
        settings: dict[str, Any] = {} if committed else {"l2_period_s": 3600.0}
        self.mill = Embedded(
            oal=script(metrics),
            store=self._url,
            handle_sigterm=False,
            l1_queue={"strategy": BufferStrategy.BLOCKING},
            **settings,
        )

    def feed(self, calls: Sequence[BenchCall]) -> None:
        """One call at a time."""
        emit = self.mill.emit
        for call in calls:
            emit(call)
        self._count += len(calls)

    def finish(self) -> None:
        """Merge, or merge and commit, all that was accepted."""
        if self._committed:
            in_time = self.mill.flush(TIMEOUT_S)
        else:
            in_time = self.mill._l1.flush(TIMEOUT_S)
            for worker in self.mill._workers.values():
                in_time = worker.flush(TIMEOUT_S) and in_time
            in_time = self.mill._l2.flush(TIMEOUT_S) and in_time
        if not in_time:
            raise WrongResult("batchmill did not finish in time")

    def check(self, *expected: Results) -> None:
        """Compare the store with it, and the counters with the calls."""
        with self._folder:
            closed = self.mill.close()
            stats = self.mill.stats()
            counted = (stats.accepted, stats.committed, stats.dropped, stats.invalid, stats.failed)
            if not closed or counted != (self._count, self._count, {}, {}, 0):
                raise WrongResult(f"batchmill: {stats}")
            for number, results in enumerate(expected):
                check("batchmill", stored_results(self._url, number), results)


class MillMany(Mill):
    """The same with ``emit_many``, in lists of 1,000 calls."""

    def feed(self, calls: Sequence[BenchCall]) -> None:
        """A list at a time; a full queue makes it wait."""
        emit_many = self.mill.emit_many
        for start in range(0, len(calls), CHUNK):
            emit_many(calls[start : start + CHUNK], timeout=TIMEOUT_S)
        self._count += len(calls)


class Prometheus:
    """``prometheus_client``: a counter by service and success, a histogram by service.

    Both know no minutes and no percentiles. ``labels()`` is called for every call, as its
    documentation shows it.
    """

    def __init__(self) -> None:
        client = _import("prometheus_client", "prometheus-client")
        self._registry = client.CollectorRegistry()
        self._counter = client.Counter(
            "calls", "Calls", ["service", "status"], registry=self._registry
        )
        self._histogram = client.Histogram(
            "latency", "Latency", ["service"], buckets=BOUNDS, registry=self._registry
        )

    def feed(self, calls: Sequence[BenchCall]) -> None:
        """Both instruments, for one call at a time."""
        counter, histogram = self._counter.labels, self._histogram.labels
        for call in calls:
            counter(call.service, call.status).inc()
            histogram(call.service).observe(call.latency)

    def finish(self) -> None:
        """Nothing waits."""

    def check(self, expected: Results) -> None:
        """Compare the services' samples with it."""
        totals: dict[str, ServiceTotals] = {}
        for family in self._registry.collect():
            for sample in family.samples:
                own = totals.setdefault(sample.labels["service"], ServiceTotals())
                if sample.name == "calls_total":
                    own.calls[sample.labels["status"] == "True"] = int(sample.value)
                elif sample.name == "latency_sum":
                    own.total = int(sample.value)
                elif sample.name == "latency_bucket":
                    own.histogram[len(own.histogram)] = int(sample.value)
        for own in totals.values():
            cumulated = [0, *own.histogram.values()]
            counts = (after - before for before, after in itertools.pairwise(cumulated))
            own.histogram = {place: count for place, count in enumerate(counts) if count}
        _check_totals("prometheus_client", totals, expected)


class PrometheusKept(Prometheus):
    """The same, with the labelled children kept in a dict of the application's own."""

    def feed(self, calls: Sequence[BenchCall]) -> None:
        """Both instruments, for one call at a time."""
        counters: dict[tuple[str, bool], Any] = {}
        histograms: dict[str, Any] = {}
        for call in calls:
            counter = counters.get((call.service, call.status))
            if counter is None:
                counter = self._counter.labels(call.service, call.status)
                counters[call.service, call.status] = counter
            counter.inc()
            histogram = histograms.get(call.service)
            if histogram is None:
                histogram = histograms[call.service] = self._histogram.labels(call.service)
            histogram.observe(call.latency)


class OpenTelemetry:
    """The metrics SDK of OpenTelemetry: the same two instruments, read once, after the run."""

    def __init__(self) -> None:
        metrics = _import("opentelemetry.sdk.metrics", "opentelemetry-sdk")
        export = _import("opentelemetry.sdk.metrics.export", "opentelemetry-sdk")
        self._reader = export.InMemoryMetricReader()
        self._provider = metrics.MeterProvider([self._reader], shutdown_on_exit=False)
        meter = self._provider.get_meter("benchmark")
        self._counter = meter.create_counter("calls")
        self._histogram = meter.create_histogram(
            "latency", explicit_bucket_boundaries_advisory=BOUNDS
        )

    def feed(self, calls: Sequence[BenchCall]) -> None:
        """Both instruments, for one call at a time."""
        add, record = self._counter.add, self._histogram.record
        for call in calls:
            add(1, {"service": call.service, "status": call.status})
            record(call.latency, {"service": call.service})

    def finish(self) -> None:
        """Nothing waits."""

    def check(self, expected: Results) -> None:
        """Compare the services' data points with it."""
        totals: dict[str, ServiceTotals] = {}
        (resource,) = self._reader.get_metrics_data().resource_metrics
        self._provider.shutdown()
        for metric in resource.scope_metrics[0].metrics:
            for point in metric.data.data_points:
                own = totals.setdefault(point.attributes["service"], ServiceTotals())
                if metric.name == "calls":
                    own.calls[point.attributes["status"]] = point.value
                else:
                    counts = enumerate(point.bucket_counts)
                    own.total = point.sum
                    own.histogram = {place: count for place, count in counts if count}
        _check_totals("OpenTelemetry", totals, expected)


class QueueLoop:
    """A ``queue.Queue`` and a thread that merges each call into a dict of objects."""

    def __init__(self) -> None:
        self._queue: queue.Queue[BenchCall | None] = queue.Queue(QUEUE_SIZE)
        self._results: Results = {}
        self._thread = threading.Thread(target=self._merge)
        self._thread.start()

    def feed(self, calls: Sequence[BenchCall]) -> None:
        """One call at a time; a full queue makes it wait."""
        put = self._queue.put
        for call in calls:
            put(call)

    def finish(self) -> None:
        """Send the thread home behind the last call."""
        self._queue.put(None)
        self._thread.join()

    def check(self, expected: Results) -> None:
        """Compare the states with it."""
        check("queue.Queue and a dict", self._results, expected)

    def _merge(self) -> None:
        get, results = self._queue.get, self._results
        while (call := get()) is not None:
            key = (minute_of(call.time), call.service)
            states = results.get(key)
            if states is None:
                states = results[key] = States()
            latency = call.latency
            states.count += 1
            states.total += latency
            if call.status:
                states.ok += 1
                if latency <= APDEX_MS:
                    states.satisfied += 1
                elif latency <= 4 * APDEX_MS:
                    states.tolerated += 1
            tally, place = states.percentile, latency // PRECISION
            tally[place] = tally.get(place, 0) + 1
            tally, place = states.histogram, min(latency // STEP, STEPS)
            tally[place] = tally.get(place, 0) + 1


class SeedMetric:
    """A metric object of one call, or of all calls that were combined with it."""

    __slots__ = ("key",)

    def __init__(self, key: Key, call: BenchCall) -> None:
        self.key = key

    def combine(self, other: Any) -> None:
        """Add the other one to this."""
        raise NotImplementedError


class SeedCount(SeedMetric):
    """Calls per minute."""

    __slots__ = ("count",)

    def __init__(self, key: Key, call: BenchCall) -> None:
        self.key = key
        self.count = 1

    def combine(self, other: SeedCount) -> None:
        """Add counts."""
        self.count += other.count


class SeedAverage(SeedMetric):
    """The average latency."""

    __slots__ = ("count", "total")

    def __init__(self, key: Key, call: BenchCall) -> None:
        self.key = key
        self.total = call.latency
        self.count = 1

    def combine(self, other: SeedAverage) -> None:
        """Add sums and counts."""
        self.total += other.total
        self.count += other.count


class SeedShare(SeedMetric):
    """The share of successful calls."""

    __slots__ = ("count", "ok")

    def __init__(self, key: Key, call: BenchCall) -> None:
        self.key = key
        self.ok = 1 if call.status else 0
        self.count = 1

    def combine(self, other: SeedShare) -> None:
        """Add counts."""
        self.ok += other.ok
        self.count += other.count


class SeedApdex(SeedMetric):
    """Satisfied and tolerated calls."""

    __slots__ = ("count", "satisfied", "tolerated")

    def __init__(self, key: Key, call: BenchCall) -> None:
        self.key = key
        self.count = 1
        self.satisfied = 1 if call.status and call.latency <= APDEX_MS else 0
        self.tolerated = 1 if call.status and APDEX_MS < call.latency <= 4 * APDEX_MS else 0

    def combine(self, other: SeedApdex) -> None:
        """Add counts."""
        self.count += other.count
        self.satisfied += other.satisfied
        self.tolerated += other.tolerated


class SeedPercentile(SeedMetric):
    """Calls by tens of milliseconds."""

    __slots__ = ("tally",)

    def __init__(self, key: Key, call: BenchCall) -> None:
        self.key = key
        self.tally = {call.latency // PRECISION: 1}

    def combine(self, other: SeedPercentile) -> None:
        """Add tallies."""
        tally = self.tally
        for place, count in other.tally.items():
            tally[place] = tally.get(place, 0) + count


class SeedHistogram(SeedPercentile):
    """Calls by hundreds of milliseconds."""

    __slots__ = ()

    def __init__(self, key: Key, call: BenchCall) -> None:
        self.key = key
        self.tally = {min(call.latency // STEP, STEPS): 1}


class SeedWorker:
    """The handler of a metric class: combines items one by one in a hash map.

    On L1 the map is handed on, item by item, when the period is over; L2's map stays.
    """

    PERIOD_S: ClassVar[float] = 0.5

    def __init__(self, next_queue: BatchQueue[Any] | None) -> None:
        self.cache: dict[Key, SeedMetric] = {}
        self._next = next_queue
        self._sent_s = time.monotonic()

    def consume(self, batch: list[SeedMetric]) -> None:
        """Combine each item with the one that has the same key."""
        cache = self.cache
        for item in batch:
            known = cache.get(item.key)
            if known is None:
                cache[item.key] = item
            else:
                known.combine(item)
        self.on_idle()

    def on_idle(self) -> None:
        """Hand on what is due."""
        if self._next is not None and time.monotonic() - self._sent_s > self.PERIOD_S:
            self.hand_on()

    def hand_on(self) -> None:
        """Hand on everything."""
        assert self._next is not None
        cache, self.cache = self.cache, {}
        for item in cache.values():
            self._next.produce(item)
        self._sent_s = time.monotonic()


class SeedMerge:
    """The seeds' own way: an object for each metric of a call, combined one by one.

    On our queue, with the settings of the two presets, so that only the merge differs. L1 waits
    where it is full: in this benchmark nothing may be dropped.
    """

    CLASSES = (SeedCount, SeedAverage, SeedPercentile, SeedShare, SeedApdex, SeedHistogram)

    def __init__(self) -> None:
        self._l2: BatchQueue[Any] = BatchQueue("seed L2", presets.l2_persistence())
        self._l1: BatchQueue[Any] = BatchQueue(
            "seed L1", presets.l1_aggregation(strategy=BufferStrategy.BLOCKING)
        )
        self._merged = {cls: SeedWorker(None) for cls in self.CLASSES}
        self._workers = {cls: SeedWorker(self._l2) for cls in self.CLASSES}
        for cls in self.CLASSES:
            self._l2.add_handler(cls, self._merged[cls])
            self._l1.add_handler(cls, self._workers[cls])

    def feed(self, calls: Sequence[BenchCall]) -> None:
        """Six objects for each call; a full partition makes it wait."""
        produce, classes = self._l1.produce, self.CLASSES
        for call in calls:
            key = (minute_of(call.time), call.service)
            for cls in classes:
                produce(cls(key, call))

    def finish(self) -> None:
        """Drain L1, hand on what it has merged, drain L2."""
        in_time = self._l1.shutdown()
        for worker in self._workers.values():
            worker.hand_on()
        if not (self._l2.shutdown() and in_time):
            raise WrongResult("the seed's queues did not drain in time")

    def check(self, expected: Results) -> None:
        """Compare the states with it."""
        merged: list[Any] = [self._merged[cls].cache for cls in self.CLASSES]
        count, average, percentile, share, apdex, histogram = merged
        results = {
            key: States(
                count[key].count,
                average[key].total,
                share[key].ok,
                apdex[key].satisfied,
                apdex[key].tolerated,
                percentile[key].tally,
                histogram[key].tally,
            )
            for key in count
        }
        check("the seed's merge", results, expected)


def _check_totals(name: str, totals: dict[str, ServiceTotals], expected: Results) -> None:
    if totals != service_totals(expected):
        raise WrongResult(f"{name}: other counts than expected")


def _import(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPeer(f"{package} is not installed") from error


EMIT, EMIT_MANY = "batchmill emit", "batchmill emit_many"
EMIT_STORED, EMIT_MANY_STORED = f"{EMIT}, committed", f"{EMIT_MANY}, committed"
PROMETHEUS = "prometheus_client"
PROMETHEUS_KEPT = "prometheus_client, children kept"
OPENTELEMETRY = "OpenTelemetry SDK"
LOOP = "queue.Queue, dict of objects"
SEED_MERGE = "the seed's merge, item by item"

CONTENDERS: dict[str, Callable[[], Aggregation]] = {
    EMIT_MANY: lambda: MillMany(committed=False),
    EMIT_MANY_STORED: lambda: MillMany(committed=True),
    EMIT: lambda: Mill(committed=False),
    EMIT_STORED: lambda: Mill(committed=True),
    PROMETHEUS: Prometheus,
    PROMETHEUS_KEPT: PrometheusKept,
    OPENTELEMETRY: OpenTelemetry,
    LOOP: QueueLoop,
    SEED_MERGE: SeedMerge,
}
