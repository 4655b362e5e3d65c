"""What the tests of the oracle share: rows, spans, and a metric's values."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.oracle.catalog import Row
from tests.oracle.functions import Value
from tests.oracle.metrics import expected_metrics
from tests.oracle.script import Condition, read_script
from tests.oracle.spans import spans_to_events

NOON = datetime(2026, 3, 1, 12, 0, 30, tzinfo=UTC)


def service(**fields: Any) -> Row:
    """A row of Service."""
    return {"time": NOON, "name": "a", "layer": "GENERAL", **fields}


def services(field: str, values: Sequence[Any]) -> list[Row]:
    """Rows of Service that differ in one field."""
    return [service(**{field: value}) for value in values]


def values_of(
    formula: str,
    rows: list[Row],
    grain: str = "minute",
    source: str = "Service",
    thresholds: Mapping[str, int] | None = None,
) -> list[Value]:
    """A metric's values of one grain."""
    expected = expected_metrics(f"m = {formula};", {source: rows}, thresholds or {})
    return [value for key, value in expected.items() if key[1] == grain]


def value_of(formula: str, rows: list[Row], **options: Any) -> Value:
    """A metric's only value of one grain."""
    (value,) = values_of(formula, rows, **options)
    return value


def condition(text: str) -> Condition:
    """A condition, read from its text."""
    (metric,) = read_script(f"m = from(Service.*).filter({text}).count();")
    (filter_,) = metric.filters
    return filter_


def b64(name: str) -> str:
    """A name as ids hold it."""
    return base64.b64encode(name.encode()).decode()


def span(span_id: str, kind: str, svc: str | None = "a", **fields: Any) -> Row:
    """A span of 10 ms, unless told."""
    elapsed = timedelta(milliseconds=fields.pop("ms", 10))
    base = {
        "trace_id": "t",
        "span_id": span_id,
        "parent_span_id": None,
        "name": f"n{span_id}",
        "kind": kind,
        "time": NOON,
        "status": "UNSET",
        "service": svc,
        "resource": {},
        "attributes": {},
    } | fields
    return {"end_time": base["time"] + elapsed, **base}


def rows_of(spans: list[Row], source: str, *fields: str) -> list[tuple[Any, ...]]:
    """These fields of the rows of a source that spans give."""
    rows = spans_to_events(spans).events.get(source, [])
    return [tuple(row[field] for field in fields) for row in rows]
