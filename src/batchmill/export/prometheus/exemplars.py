"""Histograms of a minute whose buckets have exemplars: traces that show what is in a bucket.

OpenMetrics allows exemplars for counters and for the buckets of histograms, not for gauges, and so
not for the percentiles that are on the page. Hence two histograms beside them, of the same minute:
the calls that services served, from the states of their percentiles, with kept spans as examples;
and the slowest statements of databases and caches, which have trace ids in the store.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client.core import Exemplar, Metric
from prometheus_client.utils import floatToGoString

from batchmill.aggregate import CACHE_READ, CACHE_WRITE, DATABASE
from batchmill.errors import BatchmillError
from batchmill.export.prometheus.series import RESERVED, Labels, end_s, entity_labels
from batchmill.oal import log_floor
from batchmill.sources import Grain, bucket_start
from batchmill.store import Buckets, BucketValues, EntityValues, Snapshot, Store, StoredMetric

if TYPE_CHECKING:
    from batchmill.traces import SpanExample, SpanReader

log = logging.getLogger("batchmill.export")

LATENCY = f"{RESERVED[0]}service_latency_seconds"
STATEMENTS = f"{RESERVED[0]}slow_statement_seconds"
MOST_SERVICES = 100
"""The busiest services have a histogram."""
MOST_STATEMENTS = 1_000
"""Of each stream of slow statements, so many are read."""
MOST_CHARACTERS = 128
"""OpenMetrics: of all names and values of an exemplar's labels together."""
_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_BOUNDS_US = tuple(round(bound * 1_000_000) for bound in _BOUNDS_S)
_LES = (*map(floatToGoString, _BOUNDS_S), "+Inf")
_PERCENTILE, _FUNCTION = "service_percentile_micros", "percentileLog"
_STREAMS = (DATABASE, CACHE_READ, CACHE_WRITE)


@dataclass(frozen=True, slots=True)
class Histograms:
    """The histograms of a minute."""

    metrics: Sequence[Metric] = ()
    exemplars: int = 0
    """How many exemplars their buckets have."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """By histogram, how many entities are over the limit."""


class HistogramReader:
    """Reads the histograms of a minute: from the store, and examples from kept spans."""

    def __init__(self, spans: SpanReader | None = None) -> None:
        self._spans = spans
        self._failed = False

    def read(self, store: Store, values: BucketValues) -> Histograms:
        """The histograms of the minute that these values are of."""
        metric = next((metric for metric in values.metrics if metric.name == _PERCENTILE), None)
        services = []
        if metric is not None and metric.function == _FUNCTION:  # not redefined
            services = [entity for entity in values.entities if metric.name in entity.values]
            services.sort(key=lambda entity: (-entity.busy, entity.id))
        shown = services[:MOST_SERVICES]
        over = len(services) - len(shown)
        if metric is not None and services:
            over += values.left_out.get(metric.name, 0)

        def work(snapshot: Snapshot) -> list[Metric]:
            tallies = _tallies(snapshot, metric, values.bucket, shown) if metric and shown else {}
            return [self._latencies(shown, tallies, values.bucket), _statements(snapshot, values)]

        metrics = store.read(work)
        count = sum(sample.exemplar is not None for m in metrics for sample in m.samples)
        return Histograms(metrics, count, {LATENCY: over} if over else {})

    def _latencies(
        self,
        services: Sequence[EntityValues],
        tallies: Mapping[str, Mapping[int, int]],
        minute: int,
    ) -> Metric:
        text = "Calls that a service served in this minute, by how long they took."
        family = Metric(LATENCY, text, "gaugehistogram")
        examples = self._examples(minute) if services else {}
        for service in sorted(services, key=lambda service: service.id):
            counts = [0] * len(_LES)
            for bucket, calls in tallies.get(service.id, {}).items():
                counts[bisect_left(_BOUNDS_US, log_floor(bucket))] += calls
            traces = {}
            for place in range(len(_LES)):
                span = examples.get((service.name, place))
                if span is not None:
                    traces[place] = exemplar_of(
                        *(span.trace_id, span.span_id),
                        *(span.duration_us / 1_000_000, span.start_us / 1_000_000),
                    )
            _add(family, entity_labels(service), counts, traces)
        return family

    def _examples(self, minute: int) -> Mapping[tuple[str, int], SpanExample]:
        """Kept spans of a minute, by service and bucket."""
        if self._spans is None:
            return {}
        start_us = int(bucket_start(minute).timestamp()) * 1_000_000
        try:
            examples = self._spans.examples(
                start_us, int(end_s(minute)) * 1_000_000 - 1, _BOUNDS_US
            )
        except (OSError, BatchmillError, ValueError) as error:  # a page without them is better
            if not self._failed:
                log.warning("no exemplars: the kept spans cannot be read: %s", error)
            self._failed = True
            return {}
        self._failed = False
        return examples


def _tallies(
    snapshot: Snapshot, metric: StoredMetric, minute: int, services: Sequence[EntityValues]
) -> dict[str, dict[int, int]]:
    """Of each service, how many calls fell into which bucket of its percentiles."""
    ids = [service.id for service in services]
    keys = {entity.key: entity.id for entity in snapshot.find("service", ids=ids)}
    rows = snapshot.cells([metric], Buckets(Grain.MINUTE, minute, minute), entities=list(keys))
    cells = rows.places[metric.name]
    return {keys[row[1]]: metric.plan.states(row[cells])[0] or {} for row in rows.rows}


def _statements(snapshot: Snapshot, values: BucketValues) -> Metric:
    text = "The slowest statements of this minute that the store keeps, by how long they took."
    family = Metric(STATEMENTS, text, "gaugehistogram")
    minute = Buckets(Grain.MINUTE, values.bucket, values.bucket)
    for stream in _STREAMS:
        counts: dict[tuple[str, str], list[int]] = {}
        traces: dict[tuple[str, str], dict[int, Exemplar]] = {}
        records = snapshot.slowest(stream, minute, n=MOST_STATEMENTS)
        # Prometheus takes the exemplars of a bucket in the order of time: its newest one is shown.
        for record in sorted(records, key=lambda record: (record.time_us, record.trace_id)):
            entity = record.entity_id, record.entity_name
            place = bisect_left(_BOUNDS_US, record.latency * 1000)
            counts.setdefault(entity, [0] * len(_LES))[place] += 1
            exemplar = exemplar_of(
                *(record.trace_id, record.span_id),
                *(record.latency / 1000, record.time_us / 1_000_000),
            )
            if exemplar is not None:
                traces.setdefault(entity, {})[place] = exemplar
        for entity in sorted(counts):
            labels = (("entity_id", entity[0]), ("name", entity[1]), ("stream", stream))
            _add(family, labels, counts[entity], traces.get(entity, {}))
    return family


def _add(
    family: Metric, labels: Labels, counts: Sequence[int], traces: Mapping[int, Exemplar | None]
) -> None:
    """Add the buckets of one entity."""
    for place, (bound, total) in enumerate(zip(_LES, accumulate(counts), strict=True)):
        family.add_sample(
            f"{family.name}_bucket",
            {**dict(labels), "le": bound},
            total,
            exemplar=traces.get(place),
        )


def exemplar_of(trace_id: str, span_id: str, value: float, time_s: float) -> Exemplar | None:
    """An exemplar that names a trace; None where the trace has no id, or one that is too long.

    >>> exemplar_of("4bf92f", "00f0", 0.25, 1709208000.5).labels
    {'trace_id': '4bf92f', 'span_id': '00f0'}
    """
    labels = {"trace_id": trace_id, "span_id": span_id}
    if not span_id or _length(labels) > MOST_CHARACTERS:
        del labels["span_id"]
    if not trace_id or _length(labels) > MOST_CHARACTERS:
        return None
    return Exemplar(labels, value, time_s)


def _length(labels: Mapping[str, str]) -> int:
    return sum(len(name) + len(text) for name, text in labels.items())
