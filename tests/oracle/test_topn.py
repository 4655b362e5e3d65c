"""The oracle's slow statements, against records worked by hand."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from tests.oracle.catalog import Row
from tests.oracle.kit import NOON, b64, span
from tests.oracle.topn import Runs, expected_topn, normalise


def query(span_id: str, ms: int, text: str = "select 1", system: str = "mysql", **more: Any) -> Row:
    """A client span that runs a statement."""
    attributes = {"db.system": system, "db.statement": text}
    return span(span_id, "CLIENT", ms=ms, attributes=attributes, **more)


def test_slow_is_strictly_above_the_threshold() -> None:
    """mysql has the default of 200, mongodb 100; each slow one is in two streams."""
    spans = [query("1", 200), query("2", 201), query("3", 101, system="mongodb")]
    found = expected_topn(spans)
    minute = {key[0::3]: top for key, top in found.items() if key[1] == "minute"}
    kept = {key: [record.latency for record in top.records] for key, top in minute.items()}
    assert kept == {
        ("top_n_database_statement", f"{b64('mysql')}.0"): [201],
        ("top_n_database_statement", f"{b64('mongodb')}.0"): [101],
        ("top_n_service_database_statement", "YQ==.1"): [201, 101],
    }


def test_cache_commands() -> None:
    """Reads and writes have streams of their own, others none; redis is slow above 10."""
    spans = [
        query("1", 11, "GET k", "redis"),
        query("2", 11, "SET k", "memcached"),
        query("3", 21, "SET k", "memcached"),
        query("4", 99, "PING", "redis"),
    ]
    found = expected_topn(spans)
    assert {(key[0], key[3]) for key in found} == {
        ("top_n_cache_read_command", f"{b64('redis')}.0"),
        ("top_n_cache_write_command", f"{b64('memcached')}.0"),
    }


def test_equal_latencies() -> None:
    """The earlier start wins, then the smaller trace id, then the smaller span id."""
    later = NOON + timedelta(seconds=1)
    spans = [
        query("1", 300, "late", time=later, trace_id="a"),
        query("3", 300, "second span", trace_id="b"),
        query("2", 300, "first span", trace_id="b"),
        query("4", 300, "first trace", trace_id="a"),
        query("5", 301, "slowest", time=later),
    ]
    top = expected_topn(spans, n=4)[
        "top_n_database_statement", "day", 20260301, f"{b64('mysql')}.0"
    ]
    texts = [record.statement for record in top.records]
    assert texts == ["slowest", "first trace", "first span", "second span"]


def test_runs_of_kept_statements() -> None:
    """All executions of a kept text count, slow or not; those of other texts do not."""
    spans = [
        query("1", 900, "select 1"),
        query("2", 300, "select  2"),
        query("3", 400, "delete"),
        query("4", 100, "select 3"),
    ]
    top = expected_topn(spans, n=1)[
        "top_n_database_statement", "hour", 2026030112, f"{b64('mysql')}.0"
    ]
    assert [record.latency for record in top.records] == [900]
    assert top.runs == {"select ?": Runs(3, 1300)}


def test_statements_are_cut() -> None:
    """A statement has at most 2000 characters; without one the span's name stands in."""
    spans = [query("1", 300, "ü" * 2001), query("2", 299, " ")]
    (top,) = (
        top
        for key, top in expected_topn(spans).items()
        if key[:2] == ("top_n_service_database_statement", "day")
    )
    assert [record.statement for record in top.records] == ["ü" * 2000, "n2"]


@pytest.mark.parametrize(
    ("statement", "text"),
    [
        ("SELECT  *\n FROM t2 where a = 12 ", "SELECT * FROM t2 where a = ?"),
        ("a = 'x''y' and b = '' and c=1.50", "a = ? and b = ? and c=?"),
        ("x IN (1, 'b',3) and y in ( ? )", "x IN (?) and y in (?)"),
        ("x in(1,2) and f(1, 2)", "x in (?) and f(?, ?)"),
        ("t_2024.c1 = -5", "t_2024.c1 = -?"),
    ],
)
def test_normalised_statements(statement: str, text: str) -> None:
    """Literals are question marks, lists of them one; letter case and names stay."""
    assert normalise(statement) == text
