"""All components of a process as metrics for Prometheus: a collector for prometheus_client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from batchmill.telemetry.instruments import Distribution, InstrumentKind, Value
from batchmill.telemetry.registry import Family, Registry, default_registry


class PrometheusCollector(Collector):
    """Shows all components of a registry; register it with prometheus_client once.

    >>> from prometheus_client import CollectorRegistry
    >>> pages = CollectorRegistry()
    >>> pages.register(PrometheusCollector())
    """

    def __init__(self, registry: Registry = default_registry) -> None:
        self._registry = registry

    def describe(self) -> list[Metric]:
        """Nothing: which metrics there are depends on which components there are."""
        return []

    def collect(self) -> Iterator[Metric]:
        """A metric family for each instrument that has a value."""
        for family in self._registry.collect():
            yield metric_family(family)


def metric_family(family: Family[Any]) -> Metric:
    """The values of one instrument as prometheus_client has them."""
    kind, instrument = family.kind, family.instrument
    name, text = kind.prometheus_name(instrument), instrument.help
    labels = kind.label_names(instrument)
    metric: Any
    match instrument.kind:
        case InstrumentKind.COUNTER:
            metric = CounterMetricFamily(name, text, labels=labels)
        case InstrumentKind.HISTOGRAM:
            metric = HistogramMetricFamily(name, text, labels=labels)
        case _:
            metric = GaugeMetricFamily(name, text, labels=labels)
    for key, value in sorted(family.values.items()):
        _add(metric, list(key), value)
    shown: Metric = metric
    return shown


def _add(metric: Any, labels: list[str], value: Value) -> None:
    if not isinstance(value, Distribution):
        metric.add_metric(labels, value)
        return
    counted = 0
    buckets = []
    for bound, count in zip((*value.bounds, float("inf")), value.counts, strict=True):
        counted += count
        buckets.append((floatToGoString(bound), counted))  # type: ignore[no-untyped-call]
    metric.add_metric(labels, buckets, sum_value=value.sum)
