"""Values as OTLP metrics.

Each metric becomes two: ``batchmill.NAME`` is its total, a gauge; ``batchmill.NAME.increment`` is
what one commit added. The latter is a sum of delta temporality for counts and sums, and else a
gauge: an average of averages is nobody's average. A point covers its minute, from its start to its
end; a value with labels has one point for each. Attributes say what a point is about:
``batchmill.entity.kind``, ``.id``, ``.name``, ``batchmill.layer`` and ``batchmill.label``.

The increments of each commit are a metric of their own within a request, with ``batchmill.commit``
in its metadata (not in attributes, which would make a series of each commit): by this a receiver
tells what came twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    AggregationTemporality,
    Metric,
    NumberDataPoint,
)

from batchmill.export.values import ExportedValue, Number, labelled
from batchmill.sources import bucket_end, bucket_start

PREFIX = "batchmill."
INCREMENT = ".increment"
COMMIT = "batchmill.commit"
COUNTS = frozenset({"count", "cpm", "labelCount", "histogram"})
"""Functions whose increments add up, and never fall."""
SUMS = frozenset({"sum", "sumDouble"})
"""Functions whose increments add up."""
_INT64_END = 2**63


def to_otlp(values: Iterable[ExportedValue]) -> ExportMetricsServiceRequest:
    """All values as one request."""
    request = ExportMetricsServiceRequest()
    resource = request.resource_metrics.add()
    resource.resource.attributes.append(_text("service.name", "batchmill"))
    scope = resource.scope_metrics.add()
    scope.scope.name = "batchmill"
    totals: dict[str, Metric] = {}
    increments: dict[tuple[str, str], Metric] = {}
    for value in values:
        total = totals.get(value.metric)
        if total is None:
            total = totals[value.metric] = scope.metrics.add()
            total.name = f"{PREFIX}{value.metric}"
            total.description = f"{value.function}, by minute"
        increment = increments.get((value.metric, value.commit))
        if increment is None:
            increment = increments[value.metric, value.commit] = scope.metrics.add()
            _describe_increment(increment, value)
        attributes = _attributes(value)
        _add_points(total.gauge.data_points, value, value.total, attributes)
        data = increment.sum if increment.HasField("sum") else increment.gauge
        _add_points(data.data_points, value, value.increment, attributes)
    return request


def _describe_increment(metric: Metric, value: ExportedValue) -> None:
    metric.name = f"{PREFIX}{value.metric}{INCREMENT}"
    metric.description = f"{value.function}, of what one commit added to a minute"
    if value.commit:
        metric.metadata.append(_text(COMMIT, value.commit))
    if value.function in COUNTS | SUMS:
        delta = AggregationTemporality.AGGREGATION_TEMPORALITY_DELTA
        metric.sum.aggregation_temporality = delta
        metric.sum.is_monotonic = value.function in COUNTS


def plain(label: str) -> str:
    """A label without the mark of its kind, which the function implies.

    >>> plain("{p=50}"), plain("{n=GET}"), plain("100")
    ('50', 'GET', '100')
    """
    return label[3:-1] if label[:3] in ("{p=", "{n=") and label.endswith("}") else label


def _add_points(
    points: Any, value: ExportedValue, by_label: Number, attributes: list[KeyValue]
) -> None:
    start, end = _span(value.bucket)
    for label, number in labelled(by_label).items():
        point: NumberDataPoint = points.add()
        point.start_time_unix_nano = start
        point.time_unix_nano = end
        point.attributes.extend(attributes)
        if label is not None:
            point.attributes.append(_text("batchmill.label", plain(label)))
        if isinstance(number, int) and -_INT64_END <= number < _INT64_END:
            point.as_int = number
        else:
            point.as_double = float(number)


def _attributes(value: ExportedValue) -> list[KeyValue]:
    attributes = [
        _text("batchmill.entity.kind", value.entity_kind),
        _text("batchmill.entity.id", value.entity_id),
        _text("batchmill.entity.name", value.entity_name),
    ]
    if value.layers:
        attributes.append(_text("batchmill.layer", ",".join(sorted(value.layers))))
    return attributes


def _text(key: str, value: str) -> KeyValue:
    # What protobuf cannot hold, half of a surrogate pair, becomes a question mark.
    return KeyValue(
        key=key, value=AnyValue(string_value=value.encode("utf-8", "replace").decode("utf-8"))
    )


@lru_cache(maxsize=4096)
def _span(bucket: int) -> tuple[int, int]:
    """Start and end of a minute, in nanoseconds since 1970."""
    start, end = bucket_start(bucket), bucket_end(bucket)
    return int(start.timestamp()) * 10**9, int(end.timestamp()) * 10**9
