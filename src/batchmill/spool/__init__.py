"""The spool: what was taken in, on disk as Parquet, before anybody is told that it was.

Loads without pyarrow, so that it can say which extra is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchmill.extras import lazy_names
from batchmill.spool.backlog import Unread, unread
from batchmill.spool.batches import SPAN_COLUMNS, SPAN_SOURCE, EventBatch, SpanBatch
from batchmill.spool.errors import (
    BadRowsError,
    Overloaded,
    SpoolClosedError,
    SpoolWriteError,
)
from batchmill.spool.level import Level
from batchmill.spool.settings import SpoolSettings
from batchmill.spool.thresholds import Judgement, Measure

if TYPE_CHECKING:
    from batchmill.spool.rows import span_table
    from batchmill.spool.spool import Spool, SpoolStats

__all__ = [
    "BadRowsError",
    "EventBatch",
    "Judgement",
    "Level",
    "Measure",
    "Overloaded",
    "SPAN_COLUMNS",
    "SPAN_SOURCE",
    "SpanBatch",
    "Spool",
    "SpoolClosedError",
    "SpoolSettings",
    "SpoolStats",
    "SpoolWriteError",
    "Unread",
    "span_table",
    "unread",
]

_NEED_PYARROW = {"Spool": "spool", "SpoolStats": "spool", "span_table": "rows"}

__getattr__ = lazy_names(__name__, _NEED_PYARROW, feature="the spool", extra="spool")
