"""Values as rows of plain columns: the same in Arrow, in pandas and in Spark.

A row is one number: a metric with labels, such as a percentile, has a row for each label.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from batchmill.extras import require_extra
from batchmill.sources import UnknownNameError, bucket_start
from batchmill.store.results import StoredMetric, Value

if TYPE_CHECKING:
    import pyarrow as pa

    from batchmill.store.reading.reader import StoreReader
    from batchmill.store.sql.values import Selection

_ROWS = 10_000
"""How many values are held as Python objects at a time."""


def frame_schema() -> pa.Schema:
    """The columns of a frame of values."""
    require_extra("a frame of values", "aggregate", "pyarrow")
    import pyarrow as pa

    return pa.schema(
        [
            ("metric", pa.string()),
            ("source", pa.string()),
            ("entity_id", pa.string()),
            ("entity_name", pa.string()),
            ("layers", pa.list_(pa.string())),
            ("grain", pa.string()),
            ("time", pa.timestamp("us", "UTC")),
            ("label", pa.string()),
            ("value", pa.float64()),
        ]
    )


def frame_rows(metric: str, source: str, values: Iterable[Value]) -> Iterator[dict[str, Any]]:
    """The rows of some values of a metric."""
    for value in values:
        numbers = value.value if isinstance(value.value, dict) else {None: value.value}
        for label, number in numbers.items():
            yield {
                "metric": metric,
                "source": source,
                "entity_id": value.entity_id,
                "entity_name": value.entity_name,
                "layers": sorted(value.layers),
                "grain": value.grain.value,
                "time": bucket_start(value.bucket),
                "label": label,
                "value": float(number),
            }


def frame_metrics(store: StoreReader, names: Sequence[str]) -> list[StoredMetric]:
    """The metrics of these names, or all that are computed; of each the newest version."""
    stored = sorted(store.metrics(include_retired=True), key=lambda metric: metric.active)
    known = {metric.name: metric for metric in stored}
    for name in names:
        if name not in known:
            raise UnknownNameError("metric", name, tuple(known))
    return [known[name] for name in names or [m.name for m in stored if m.active]]


def read_arrow(store: StoreReader, names: Sequence[str], selection: Selection) -> pa.Table:
    """The selected values of some metrics, or of all that are computed, as a table."""
    schema = frame_schema()
    import pyarrow as pa

    batches = []
    for metric in frame_metrics(store, names):
        rows = frame_rows(metric.name, metric.source, store.iter_values(metric.name, selection))
        while some := list(islice(rows, _ROWS)):
            batches.append(pa.RecordBatch.from_pylist(some, schema))
    return pa.Table.from_batches(batches, schema)
