"""Spans that are kept for people who look at traces: files, search, and traces by id.

:class:`SpanKeeper` takes committed segments, and keeps their spans within limits of age and size;
:class:`SpanReader` finds traces in them. :mod:`batchmill.traces.layout` says where they lie.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchmill.extras import lazy_names

if TYPE_CHECKING:
    from batchmill.traces.keeper import KeepStats, SpanKeeper
    from batchmill.traces.layout import SCHEMA, KeepSettings
    from batchmill.traces.query import SpanMeaning, TraceQuery
    from batchmill.traces.reader import SpanExample, SpanReader, TraceSummary
    from batchmill.traces.trace import Trace, TraceSpan

__all__ = [
    "SCHEMA",
    "KeepSettings",
    "KeepStats",
    "SpanExample",
    "SpanKeeper",
    "SpanMeaning",
    "SpanReader",
    "Trace",
    "TraceQuery",
    "TraceSpan",
    "TraceSummary",
]

_MODULES = {
    "keeper": "KeepStats SpanKeeper",
    "layout": "SCHEMA KeepSettings",
    "query": "SpanMeaning TraceQuery",
    "reader": "SpanExample SpanReader TraceSummary",
    "trace": "Trace TraceSpan",
}

__getattr__ = lazy_names(__name__, _MODULES, feature="reading kept spans", extra="aggregate")
