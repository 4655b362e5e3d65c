"""Reads the metrics of a store, and kept spans, as DataFrames."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from batchmill.errors import ConfigError
from batchmill.sources import Grain, bucket_start
from batchmill.spark.shuffle import columns_of
from batchmill.store import (
    Selection,
    Store,
    frame_metrics,
    frame_rows,
    frame_schema,
    open_store,
)
from batchmill.traces import SCHEMA

_HOUR = r"/hour=([0-9T-]+)/"
_FILE = "sqlite:///"
_ROWS = 10_000
"""How many values a task holds at a time."""
_DAYS = 7
"""So many of the newest days of a PostgreSQL store are read by a task each, for every metric."""


@dataclass(frozen=True)
class _Slice:
    """What one task reads."""

    metric: str
    source: str
    selection: Selection


@dataclass(frozen=True)
class _ReadValues:
    """Reads slices of a store, whose numbers are the input."""

    url: str = field(repr=False)
    slices: Sequence[_Slice]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The values as rows."""
        for batch in batches:
            for number in batch[0].to_pylist():
                own = self.slices[number]
                with open_store(self.url, create=False) as store:
                    values = store.iter_values(own.metric, own.selection)
                    rows = frame_rows(own.metric, own.source, values)
                    while some := list(islice(rows, _ROWS)):
                        yield pa.RecordBatch.from_pylist(some, frame_schema())


def metrics(
    spark: SparkSession,
    store: str,
    *names: str,
    grain: Grain | str = Grain.MINUTE,
    start: datetime | int | None = None,
    end: datetime | int | None = None,
    entity: str | None = None,
    layer: str | None = None,
    covered: bool = False,
) -> DataFrame:
    """The values of some metrics in a store, or of all that are computed, as a DataFrame.

    Its columns are ``metric``, ``source``, ``entity_id``, ``entity_name``, ``layers``, ``grain``,
    ``time`` (the start of the minute, hour or day), ``label`` and ``value``. A metric with labels,
    such as a percentile, has a row for each of them; for others ``label`` is null. Values are
    doubles: whole numbers beyond 2^53 are rounded.

    ``start`` and ``end`` are moments or buckets, both included; ``entity`` is an id or a name. With
    ``covered``, ``cpm()`` of an hour or a day is divided by its minutes that have data. The names
    are checked at once, values are read by Spark's tasks when the frame is used: they must be able
    to reach the store, which for SQLite means to run on its machine.
    """
    is_file = store.startswith(_FILE)
    url = _FILE + str(Path(store.removeprefix(_FILE)).resolve()) if is_file else store
    chosen = Selection(
        grain=Grain(grain), start=start, end=end, layer=layer, entity=entity, covered=covered
    )
    with open_store(url, create=False) as opened:
        slices = list(_slices(opened, names, chosen, divided=not is_file))
    numbers = spark.range(0, len(slices), 1, max(1, len(slices)))
    return numbers.mapInArrow(_ReadValues(url, slices), columns_of(spark, frame_schema()))


def spans(
    spark: SparkSession,
    folder: str | Path,
    *,
    start: datetime | None = None,
    end: datetime | None = None,
) -> DataFrame:
    """The kept spans of a folder, such as ``batchmill-data/traces``, as a DataFrame.

    Its columns are those of :data:`batchmill.traces.SCHEMA`, and ``hour``, the hour in which a span
    began as text (``2026-11-17T19``). With ``start`` and ``end``, both included, only files of
    their hours are read. A span that arrived in the last seconds may be missing: it is sorted into
    its hour first. Files are merged and dropped while the pipeline runs: read again, or copy the
    frame, if a file is gone before it was read. Tasks must be able to open the folder.
    """
    place = kept_folder(folder)
    first, last = _moment(start), _moment(end)
    hours = [
        str(path)
        for path in sorted(place.glob("hour=*"))
        if (first is None or path.name >= f"hour={first.astimezone(UTC):%Y-%m-%dT%H}")
        and (last is None or path.name <= f"hour={last.astimezone(UTC):%Y-%m-%dT%H}")
    ]
    columns = columns_of(spark, SCHEMA)
    if not hours:
        return spark.createDataFrame([], columns.add("hour", "string"))
    reader = spark.read.schema(columns).option("basePath", str(place))
    frame = reader.parquet(*hours)
    frame = frame.withColumn("hour", F.regexp_extract(F.input_file_name(), _HOUR, 1))
    if first is not None:
        frame = frame.where(F.col("time") >= F.lit(first))
    return frame if last is None else frame.where(F.col("time") <= F.lit(last))


def kept_folder(folder: str | Path) -> Path:
    """A folder of kept spans; ConfigError if there is none."""
    place = Path(folder).resolve()
    if not place.is_dir():
        raise ConfigError("folder", str(folder), "a folder of kept spans: that of keep_spans")
    return place


def _slices(
    store: Store, names: Sequence[str], chosen: Selection, *, divided: bool
) -> Iterator[_Slice]:
    spans = _days(store.newest_minute(), chosen) if divided else [chosen]
    for metric in frame_metrics(store, names):
        for selection in spans:
            yield _Slice(metric.name, metric.source, selection)


def _days(newest: int | None, chosen: Selection) -> list[Selection]:
    """A selection divided at the midnights before the newest minute."""
    if newest is None:
        return [chosen]
    midnight = bucket_start(newest).replace(hour=0, minute=0)
    cuts = [midnight - timedelta(days=back) for back in reversed(range(_DAYS))]
    first, last = _moment(chosen.start), _moment(chosen.end)
    cuts = [cut for cut in cuts if (first is None or cut > first) and (last is None or cut <= last)]
    starts = [chosen.start, *cuts]
    ends = [*(cut - timedelta(microseconds=1) for cut in cuts), chosen.end]
    return [replace(chosen, start=start, end=end) for start, end in zip(starts, ends, strict=True)]


def _moment(bound: datetime | int | None) -> datetime | None:
    if bound is None:
        return None
    moment = bucket_start(bound) if isinstance(bound, int) else bound
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
