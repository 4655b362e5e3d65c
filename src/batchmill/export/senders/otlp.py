"""Values as OTLP metrics.

Each metric is two: ``batchmill.NAME`` is its total, a gauge; ``batchmill.NAME.increment`` is what
one commit added. The latter is a sum of delta temporality where adding up makes sense (counts and
sums), and else a gauge: an average of averages is nobody's average. A point spans its minute, from
its start to its end; a value with labels has one point for each. What a point is about is told by
its attributes: ``batchmill.entity.kind``, ``.id``, ``.name``, ``batchmill.layer`` and
``batchmill.label``.

The increments of each commit are a metric of their own within a request, whose metadata (not its
attributes, which would make a series of each) have ``batchmill.commit``: what came twice can be
told by it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

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
_MOST = 2**63


def to_otlp(values: Iterable[ExportedValue]) -> ExportMetricsServiceRequest:
    """All values as one request."""
    request = ExportMetricsServiceRequest()
    resource = request.resource_metrics.add()
    resource.resource.attributes.append(_text("service.name", "batchmill"))
    scope = resource.scope_metrics.add()
    scope.scope.name = "batchmill"
    totals: dict[str, Metric] = {}
    increments: dict[tuple[str, str], Metric] = {}
    for each in values:
        total = totals.get(each.metric)
        if total is None:
            total = totals[each.metric] = scope.metrics.add()
            _describe_total(total, each)
        increment = increments.get((each.metric, each.commit))
        if increment is None:
            increment = increments[each.metric, each.commit] = scope.metrics.add()
            _describe_increment(increment, each)
        attributes = _about(each)
        _add(total.gauge.data_points, each, each.total, attributes)
        data = increment.sum if increment.HasField("sum") else increment.gauge
        _add(data.data_points, each, each.increment, attributes)
    return request


def _describe_total(metric: Metric, value: ExportedValue) -> None:
    metric.name, _ = names(value.metric)
    metric.description = f"{value.function}, by minute"


def _describe_increment(metric: Metric, value: ExportedValue) -> None:
    _, metric.name = names(value.metric)
    metric.description = f"{value.function}, of what one commit added to a minute"
    if value.commit:
        metric.metadata.append(_text(COMMIT, value.commit))
    if value.function in COUNTS | SUMS:
        delta = AggregationTemporality.AGGREGATION_TEMPORALITY_DELTA
        metric.sum.aggregation_temporality = delta
        metric.sum.is_monotonic = value.function in COUNTS


def names(metric: str) -> tuple[str, str]:
    """What a metric's total and its increments are called."""
    return f"{PREFIX}{metric}", f"{PREFIX}{metric}{INCREMENT}"


def plain(label: str) -> str:
    """A label without what tells which kind it is: the function does.

    >>> plain("{p=50}"), plain("{n=GET}"), plain("100")
    ('50', 'GET', '100')
    """
    return label[3:-1] if label[:3] in ("{p=", "{n=") and label.endswith("}") else label


def _add(points: object, each: ExportedValue, value: Number, attributes: list[KeyValue]) -> None:
    start, end = _span(each.bucket)
    for label, number in labelled(value).items():
        point: NumberDataPoint = points.add()  # type: ignore[attr-defined]
        point.start_time_unix_nano = start
        point.time_unix_nano = end
        point.attributes.extend(attributes)
        if label is not None:
            point.attributes.append(_text("batchmill.label", plain(label)))
        if isinstance(number, int) and -_MOST <= number < _MOST:
            point.as_int = number
        else:
            point.as_double = float(number)


def _about(each: ExportedValue) -> list[KeyValue]:
    found = [
        _text("batchmill.entity.kind", each.entity_kind),
        _text("batchmill.entity.id", each.entity_id),
        _text("batchmill.entity.name", each.entity_name),
    ]
    if each.layers:
        found.append(_text("batchmill.layer", ",".join(sorted(each.layers))))
    return found


def _text(key: str, value: str) -> KeyValue:
    # What protobuf cannot hold, half of a surrogate pair, becomes a question mark.
    return KeyValue(
        key=key, value=AnyValue(string_value=value.encode("utf-8", "replace").decode("utf-8"))
    )


@lru_cache(maxsize=4096)
def _span(bucket: int) -> tuple[int, int]:
    return tuple(  # type: ignore[return-value]
        int(each.timestamp()) * 1_000_000_000 for each in (bucket_start(bucket), bucket_end(bucket))
    )
