"""The benchmark of flows in front of the spool writes real spans."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from benchmarks.ingest.flows import _full_requests
from benchmarks.ingest.flows_roads import ROADS, open_road
from tests.kit.threads import PATIENCE_S


@pytest.mark.parametrize("name", ROADS)
def test_a_request_is_durable_on_both_paths(tmp_path: Path, name: str) -> None:
    """Every span of it, once: what is compared is the same work."""
    request = _full_requests()[0]
    with open_road(tmp_path, name) as road:
        road.submit(request).result(PATIENCE_S)
    rows = [
        row
        for path in tmp_path.glob("Span/[!.]*.parquet")
        for row in pq.read_table(path, columns=["span_id"]).column(0).to_pylist()
    ]
    assert sorted(rows) == sorted(request.columns["span_id"])
