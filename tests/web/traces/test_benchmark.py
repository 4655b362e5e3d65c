"""The spans that `benchmarks.traces` makes: its searches find some."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("opentelemetry")
pytest.importorskip("duckdb")

from batchmill.traces import SpanKeeper, SpanReader, TraceQuery
from batchmill.web.meaning import MetricNames
from benchmarks.traces.search import SEGMENT, make_segments

START_S = 1_800_000_000.0


def test_spans_are_found_by_endpoint_and_by_what_they_call(tmp_path: Path) -> None:
    """Some have ids in their names, and some call the database."""
    (segment,) = make_segments(tmp_path / "made", SEGMENT, START_S, 60)
    keeper = SpanKeeper(tmp_path / "traces", clock=lambda: START_S + 60)
    keeper.take(segment)
    keeper.tend(everything=True)
    assert keeper.stats.spans == SEGMENT
    reader = SpanReader(tmp_path / "traces", MetricNames())
    end_us = int(START_S + 120) * 1_000_000
    for query in (
        TraceQuery(start_us=0, end_us=end_us, name="GET /item/{id}"),
        TraceQuery(start_us=0, end_us=end_us, peer="db:5432"),
    ):
        assert len(reader.search(query).traces) == query.limit
