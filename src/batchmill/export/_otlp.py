"""Values as OTLP metrics.

Each metric is two: ``batchmill.NAME`` is its total, a gauge; ``batchmill.NAME.increment`` is what
one commit added. The latter is a sum of delta temporality where adding up makes sense (counts and
sums), and else a gauge: an average of averages is nobody's average. A point spans its minute, from
its start to its end; a value with labels has one point for each. What a point is about is told by
its attributes: ``batchmill.entity.kind``, ``.id``, ``.name``, ``batchmill.layer`` and
``batchmill.label``.
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

from batchmill.export._values import ExportedValue, Number, labelled
from batchmill.sources import bucket_end, bucket_start

PREFIX = "batchmill."
INCREMENT = ".increment"
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
    known: dict[str, tuple[Metric, Metric]] = {}
    for each in values:
        pair = known.get(each.metric)
        if pair is None:
            total, increment = scope.metrics.add(), scope.metrics.add()
            pair = known[each.metric] = total, increment
            total.name, increment.name = names(each.metric)
            total.description = f"{each.function}, by minute"
            increment.description = f"{each.function}, of what one commit added to a minute"
            if each.function in COUNTS | SUMS:
                increment.sum.aggregation_temporality = (
                    AggregationTemporality.AGGREGATION_TEMPORALITY_DELTA
                )
                increment.sum.is_monotonic = each.function in COUNTS
        attributes = _about(each)
        _add(pair[0].gauge.data_points, each, each.total, attributes)
        summed = pair[1].HasField("sum")
        points = pair[1].sum.data_points if summed else pair[1].gauge.data_points
        _add(points, each, each.increment, attributes)
    return request


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
