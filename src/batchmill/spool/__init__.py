"""The spool: what was taken in, on disk as Parquet, before anybody is told that it was.

Loads without pyarrow, so that it can say which extra is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchmill._lazy import lazy_names
from batchmill.spool._batches import SPAN_COLUMNS, SPAN_SOURCE, EventBatch, SpanBatch
from batchmill.spool._errors import (
    BadRowsError,
    MissingSpoolError,
    Overloaded,
    SpoolClosedError,
    SpoolWriteError,
)
from batchmill.spool._level import Level
from batchmill.spool._settings import SpoolSettings
from batchmill.spool._thresholds import Judgement, Measure
from batchmill.spool._unread import Unread, unread

if TYPE_CHECKING:
    from batchmill.spool._rows import span_table
    from batchmill.spool._spool import Spool, SpoolStats

__all__ = [
    "BadRowsError",
    "EventBatch",
    "Judgement",
    "Level",
    "Measure",
    "MissingSpoolError",
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

_NEED_PYARROW = {"Spool": "_spool", "SpoolStats": "_spool", "span_table": "_rows"}

__getattr__ = lazy_names(__name__, _NEED_PYARROW, MissingSpoolError)
