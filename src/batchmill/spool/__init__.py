"""The spool: makes spans and events durable as Parquet segments on disk, for the pipeline to read.

Gives :class:`Spool`; the columns of a span (:data:`SPAN_SCHEMA`, :class:`SpanBatch`), from which
all other schemas of spans are derived; and the contract :class:`SpanSink` with its levels, gauge,
stats and errors, which Kafka's sink fulfils, too. Loads without pyarrow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchmill.extras import lazy_names
from batchmill.spool.gauge import Gauge, GaugedSink
from batchmill.spool.segment import SpoolWriteError, Unread, rows_in, unread
from batchmill.spool.sink import (
    BadRowsError,
    Level,
    Measure,
    Overloaded,
    Pressure,
    SinkSettings,
    SinkStats,
    SpanSink,
    SpoolClosedError,
    SpoolSettings,
)
from batchmill.spool.span import (
    ATTRIBUTE_COLUMNS,
    EVENTS,
    FOREIGN,
    KEPT_COLUMNS,
    RESOURCE_COLUMNS,
    SEGMENT_COLUMNS,
    SPAN_COLUMNS,
    SPAN_SCHEMA,
    SPAN_SOURCE,
    STATUS_MESSAGE,
    EventBatch,
    PackedSpans,
    SpanBatch,
    SpanColumn,
)

if TYPE_CHECKING:
    from batchmill.spool.rows import adapter, delta_file, event_tables, span_table, table_of
    from batchmill.spool.spool import Spool, SpoolStats

__all__ = [
    "ATTRIBUTE_COLUMNS",
    "EVENTS",
    "KEPT_COLUMNS",
    "SEGMENT_COLUMNS",
    "STATUS_MESSAGE",
    "BadRowsError",
    "EventBatch",
    "FOREIGN",
    "Gauge",
    "GaugedSink",
    "Level",
    "Measure",
    "Overloaded",
    "PackedSpans",
    "Pressure",
    "RESOURCE_COLUMNS",
    "SPAN_COLUMNS",
    "SPAN_SCHEMA",
    "SPAN_SOURCE",
    "SinkSettings",
    "SinkStats",
    "SpanBatch",
    "SpanColumn",
    "SpanSink",
    "Spool",
    "SpoolClosedError",
    "SpoolSettings",
    "SpoolStats",
    "SpoolWriteError",
    "Unread",
    "adapter",
    "delta_file",
    "event_tables",
    "rows_in",
    "span_table",
    "table_of",
    "unread",
]

_NEED_PYARROW = {
    "rows": "adapter delta_file event_tables span_table table_of",
    "spool": "Spool SpoolStats",
}

__getattr__ = lazy_names(__name__, _NEED_PYARROW, feature="the spool", extra="spool")
