"""Segments of deltas and of statements are read, or refused with a reason; without Spark."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("pyspark")

from batchmill.aggregate import (
    ROW_COUNT,
    Aggregator,
    SlowestStatements,
    SlowThresholds,
    Statement,
    TopNThresholds,
    is_statements,
    rows_by_minute,
    statements_to_arrow,
    to_arrow,
)
from batchmill.oal import load
from batchmill.sources import Grain
from batchmill.spark.input.deltas import DeltaReader, UnusableError, events_in, read_statements
from batchmill.spool import delta_file
from tests.kit.pipelines import SMALL, START, endpoint_events, write_deltas
from tests.oracle.generate import to_table
from tests.spark.kit import replaced

ROWS = endpoint_events(20)
FAR = 2**52
"""In the year 2112."""
METADATA = b"batchmill.deltas"


def aggregator(oal: str = SMALL) -> Aggregator:
    """That of Endpoint."""
    metrics = load(oal)
    return Aggregator(metrics.catalog.source("Endpoint"), metrics.by_source()["Endpoint"])


@pytest.fixture
def table(tmp_path: Path) -> pa.Table:
    """A segment of deltas, as a client writes it."""
    return pq.read_table(write_deltas(tmp_path, "Endpoint", ROWS, SMALL), partitioning=None)


def micros(moment: datetime) -> int:
    """Microseconds since 1970."""
    return int(moment.timestamp()) * 1_000_000 + moment.microsecond


def test_deltas_are_those_of_the_rows(table: pa.Table) -> None:
    """All of them, if none is too far ahead."""
    own = aggregator()
    read = DeltaReader(own).read(table, FAR)
    made = own.make(to_table("Endpoint", ROWS)).deltas
    assert (read.ahead, read.ahead_rows) == (None, 0)
    assert to_arrow(read.deltas, own.plan).equals(to_arrow(made, own.plan))
    assert events_in(table) == 20


def test_minutes_that_begin_after_the_latest_start_are_set_aside(table: pa.Table) -> None:
    """As they were written; one that begins at that moment is valid."""
    newest = max(row["time"] for row in ROWS).replace(second=0, microsecond=0)
    count = sum(row["time"] >= newest for row in ROWS)
    reader = DeltaReader(aggregator())
    assert reader.read(table, micros(newest)).ahead is None
    read = reader.read(table, micros(newest) - 1)
    assert read.ahead is not None
    assert read.ahead_rows == count == sum(read.ahead[ROW_COUNT].to_pylist())
    assert read.ahead.schema.equals(table.schema)
    assert sum(rows_by_minute(read.deltas).values()) == 20 - count


SPOILED: dict[str, Callable[[pa.Table], pa.Table]] = {
    "no description": lambda table: table.replace_schema_metadata({METADATA: b"{"}),
    "a number for a description": lambda table: table.replace_schema_metadata({METADATA: b"7"}),
    "a column less": lambda table: table.drop_columns([ROW_COUNT]),
    "a column of another type": lambda table: replaced(
        table, ROW_COUNT, table[ROW_COUNT].cast(pa.int32())
    ),
    "texts for numbers": lambda table: replaced(table, ROW_COUNT, pa.array(["x"] * table.num_rows)),
    "fewer than no events": lambda table: replaced(
        table, ROW_COUNT, pa.array([-1] * table.num_rows, pa.int64())
    ),
}


@pytest.mark.parametrize("spoil", SPOILED)
def test_what_is_not_deltas_is_refused(table: pa.Table, spoil: str) -> None:
    """As of the wrong type, whatever is wrong: no task fails for it."""
    with pytest.raises(UnusableError) as caught:
        DeltaReader(aggregator()).read(SPOILED[spoil](table), FAR)
    assert caught.value.reason == "wrong type"


def test_deltas_of_hours_are_refused() -> None:
    """A client writes minutes; hours are made of them later."""
    own = aggregator()
    hours = own.roll_up(own.make(to_table("Endpoint", ROWS)).deltas, Grain.HOUR)
    file = delta_file(to_arrow(hours, own.plan))
    with pytest.raises(UnusableError, match="deltas by hour, not by minute") as caught:
        DeltaReader(own).read(pq.read_table(pa.BufferReader(file)), FAR)
    assert (caught.value.reason, caught.value.rows) == ("wrong type", 20)


def test_deltas_of_other_metrics_are_refused(table: pa.Table) -> None:
    """With the metric that differs, and the number of events that are not counted."""
    with pytest.raises(UnusableError, match=r"ep_avg: .*, here not defined") as caught:
        DeltaReader(aggregator("ep_cpm = from(Endpoint.*).cpm();")).read(table, FAR)
    assert (caught.value.reason, caught.value.rows) == ("other metrics", 20)


def statements(*moments: datetime) -> pa.Table:
    """A segment of slow statements, one for each moment."""
    slowest = SlowestStatements(50, TopNThresholds())
    slowest.add(Statement(moment, "shop", "orders", 900, "SELECT 1") for moment in moments)
    return statements_to_arrow(slowest)


def test_statements_are_read_and_counted() -> None:
    """As many as ran, not as are kept."""
    read = read_statements(statements(START, START), 50, TopNThresholds(), micros(START))
    assert read.count == 2
    assert read.statements.runs


def test_statements_too_far_ahead_are_refused() -> None:
    """By their minute."""
    ahead = START.astimezone(UTC) + timedelta(minutes=1)
    with pytest.raises(UnusableError) as caught:
        read_statements(statements(START, ahead), 50, TopNThresholds(), micros(START))
    assert (caught.value.reason, caught.value.rows) == ("time too far ahead", 2)


def test_statements_of_other_thresholds_are_refused() -> None:
    """The error says which."""
    limits = TopNThresholds(cache=SlowThresholds(1))
    with pytest.raises(UnusableError, match=r"slow_cache_ms: .*, here \{'default': 1\}") as caught:
        read_statements(statements(START), 50, limits, FAR)
    assert caught.value.reason == "other metrics"


@pytest.mark.parametrize(
    "content",
    [b'{"statements": 7}', b'{"statements": 7, "format": 1}', b'{"statements": {}, "format": 1}'],
)
def test_statements_with_a_description_that_is_not_ours_are_refused(content: bytes) -> None:
    """Whatever it says."""
    table = statements(START).replace_schema_metadata({METADATA: content})
    assert is_statements(table.schema)
    with pytest.raises(UnusableError) as caught:
        read_statements(table, 50, TopNThresholds(), FAR)
    assert caught.value.reason == "wrong type"
