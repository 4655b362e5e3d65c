"""Segments of deltas beside segments of rows: one store, and nothing counted wrongly."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from batchmill import Client
from batchmill.aggregate import (
    ROW_COUNT,
    Statement,
)
from batchmill.client import EdgeSettings
from batchmill.outbox import Outbox
from batchmill.spark import PipelineSettings
from tests.kit.pipelines import (
    EVERY_FUNCTION,
    EVERY_FUNCTION_OF_TWO,
    EVERY_SOURCE,
    FEW_EXAMPLES,
    NOW,
    OF_SPANS,
    SMALL,
    START,
    TWO_SOURCES,
    contents,
    counted,
    differences,
    endpoint_events,
    every_events,
    expected,
    expected_of,
    local,
    pipeline,
    stored,
    top_expected,
    top_of,
    write_deltas,
    write_segment,
)
from tests.oracle.catalog import Row
from tests.oracle.generate import random_spans
from tests.oracle.spans import (
    attributes_of,
    cache_operation,
    database_system,
    destination_of,
    is_cache,
    is_database_call,
    latency_ms,
    service_of,
    spans_to_events,
    statement_of,
)
from tests.oracle.topn import expected_topn

pytestmark = pytest.mark.slow

REASON = "other metrics"


def deal_mixed(
    events: Mapping[str, Sequence[Row]], folder: Path, oal: str, pieces: int, seed: int
) -> list[bool]:
    """Deal rows to processes, each of which aggregates or not; which of them did."""
    rng = random.Random(seed)
    aggregates = [rng.random() < 0.5 for _ in range(pieces)]
    for source, rows in events.items():
        dealt: list[list[Row]] = [[] for _ in range(pieces)]
        for row in rows:
            rng.choice(dealt).append(row)
        for number, some in enumerate(dealt):
            order = rng.randrange(pieces)
            if some and aggregates[number]:
                write_deltas(folder, source, some, oal, str(number), order)
            elif some:
                write_segment(folder, source, some, str(number), order)
    return aggregates


@FEW_EXAMPLES
@given(pieces=st.integers(2, 6), seed=st.integers(0, 99), batch_files=st.sampled_from((1, 3, None)))
@pytest.mark.system
def test_any_mixture_of_rows_and_deltas_is_the_store_of_the_oracle(
    spark: SparkSession, pieces: int, seed: int, batch_files: int | None
) -> None:
    """Of processes that aggregate and that do not, in any order, cut into any batches."""
    events = every_events(seed, TWO_SOURCES, 40, days=4, late_share=0.3)
    settings = PipelineSettings(ttl_days=365, max_batch_files=batch_files)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        deal_mixed(events, folder / "spool", EVERY_FUNCTION_OF_TWO, pieces, seed)
        with pipeline(spark, folder, oal=EVERY_FUNCTION_OF_TWO, settings=settings) as running:
            reports = running.run_available()
            assert differences(stored(running.store), expected(events, EVERY_FUNCTION_OF_TWO)) == []
            rows = {source: len(own) for source, own in events.items()}
            assert counted(running.store, "rows") == {(name, ""): n for name, n in rows.items()}
            assert sum(report.stats.rows for report in reports) == sum(rows.values())
            assert running.progress().rows == sum(rows.values())


def test_deltas_of_every_function_make_the_states_of_the_rows(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Every function and source: states and values are those of a pipeline that gets the rows."""
    events = every_events(3, EVERY_SOURCE, 40)
    made = []
    for kind in ("rows", "deltas"):
        folder = tmp_path / kind
        for source, rows in events.items():
            for number in range(2):
                some = rows[number::2]
                if kind == "rows":
                    write_segment(folder / "spool", source, some, str(number))
                else:
                    write_deltas(folder / "spool", source, some, EVERY_FUNCTION, str(number))
        with pipeline(spark, folder, oal=EVERY_FUNCTION) as running:
            running.run_available()
            made.append(contents(running.store))
    assert differences(made[1][0], made[0][0]) == []
    assert differences(made[1][1], expected(events)) == []


def test_a_commit_changes_an_entity_and_minute_once(spark: SparkSession, tmp_path: Path) -> None:
    """Made of rows, deltas and spans: an exporter would take a second change for the same."""
    oal = "ep_count = from(Endpoint.*).count();"
    spans = random_spans(2, 60, start=START)
    rows = spans_to_events(spans).events["Endpoint"]
    spool = tmp_path / "spool"
    write_segment(spool, "Endpoint", rows, "rows")
    write_deltas(spool, "Endpoint", rows, oal, "deltas")
    write_segment(spool, "Span", spans)
    with pipeline(spark, tmp_path, oal=oal, outbox=True) as running:
        assert len(running.run_available()) == 1
        outbox = Outbox.of(tmp_path / "checkpoint")
        (file,) = running.store.outbox(outbox.place)
        changes = [
            (bucket, entity.id)
            for part in outbox.read(file.path)
            for bucket, entity in zip(part.buckets, part.entities, strict=True)
        ]
        assert differences(stored(running.store), expected({"Endpoint": [*rows] * 3}, oal)) == []
    assert len(changes) == len(set(changes)) > 0


def test_a_client_that_aggregates_beside_one_that_does_not(
    spark: SparkSession, tmp_path: Path, postgres_url: str
) -> None:
    """Both write to one spool; the store, on PostgreSQL, has every event once."""
    rows = endpoint_events(60)
    with (
        Client(tmp_path / "spool", aggregate=SMALL, edge=EdgeSettings(period_s=3600)) as edge,
        Client(tmp_path / "spool") as plain,
    ):
        for number, row in enumerate(rows):
            event = {name: value for name, value in row.items() if value is not None}
            (edge, plain)[number % 2].emit(event, "Endpoint")
    with pipeline(spark, tmp_path, oal=SMALL, store=postgres_url) as running:
        running.run_available()
        assert differences(stored(running.store), expected_of(rows)) == []
        assert counted(running.store, "rows") == {("Endpoint", ""): 60}


OTHERS: Sequence[tuple[str, dict[str, int] | None, str]] = (
    (
        SMALL.replace("percentile2(10)", "percentile2(5)"),
        None,
        "ep_p10: from(Endpoint.latency).percentile2(5), "
        "here from(Endpoint.latency).percentile2(10)",
    ),
    (SMALL + "more = from(Endpoint.*).count();", None, "more: from(Endpoint.*).count(), here"),
    (SMALL.splitlines()[1], None, "ep_avg: not defined, here"),
    (
        SMALL + "apdex = from(Endpoint.latency).apdex(serviceName, status);",
        {"shop": 100},
        "apdex",
    ),
    ("cpm = from(Service.*).cpm();", None, "cpm: from(Service.*).cpm(), here not defined"),
)
"""Scripts and thresholds that are not the pipeline's, and what it says of their deltas."""


def test_deltas_for_other_metrics_are_quarantined(spark: SparkSession, tmp_path: Path) -> None:
    """With a reason that says which metric differs; the rows and deltas of others count."""
    rows = endpoint_events(30)
    spool = tmp_path / "spool"
    bad = []
    for number, (script, apdex_ms, _) in enumerate(OTHERS):
        source = "Service" if "Service.*" in script else "Endpoint"
        other = every_events(5, [source], 20)[source]
        bad.append(write_deltas(spool, source, other, script, f"bad-{number}", apdex_ms=apdex_ms))
    write_deltas(spool, "Endpoint", rows[:10], SMALL, "deltas")
    write_segment(spool, "Endpoint", rows[10:], "rows")
    with pipeline(spark, tmp_path, oal=SMALL) as running:
        (report,) = running.run_available()
        assert differences(stored(running.store), expected_of(rows)) == []
        assert counted(running.store, "quarantined segment") == {
            ("Endpoint", REASON): 4,
            ("Service", REASON): 1,
        }
        assert counted(running.store, "quarantined") == {
            ("Endpoint", REASON): 80,
            ("Service", REASON): 20,
        }
        assert (report.stats.quarantined_rows, report.stats.quarantined_segments) == (100, 5)
    for path, (_, _, says) in zip(bad, OTHERS, strict=True):
        kept = local(running.quarantine) / path.relative_to(spool)
        assert says in kept.with_name(f"{kept.name}.reason").read_text()
        assert kept.read_bytes() == path.read_bytes()


def test_apdex_thresholds_that_differ_are_a_reason(spark: SparkSession, tmp_path: Path) -> None:
    """And the same ones are none."""
    oal = "apdex = from(Endpoint.latency).apdex(serviceName, status);"
    rows = endpoint_events(30)
    spool = tmp_path / "spool"
    write_deltas(spool, "Endpoint", rows, oal, "same", apdex_ms={"orders": 100})
    write_deltas(spool, "Endpoint", rows, oal, "other", apdex_ms={"orders": 200})
    settings = PipelineSettings(ttl_days=365, apdex_ms={"orders": 100})
    with pipeline(spark, tmp_path, oal=oal, settings=settings) as running:
        running.run_available()
        assert counted(running.store, "rows") == {("Endpoint", ""): 30}
        assert counted(running.store, "quarantined") == {("Endpoint", REASON): 30}
    reason = (local(running.quarantine) / "Endpoint" / "other.parquet.reason").read_text()
    assert "apdex thresholds {'orders': 200}, here {'orders': 100}" in reason


def test_minutes_too_far_ahead_are_quarantined(spark: SparkSession, tmp_path: Path) -> None:
    """By the pipeline's clock, whatever that of the process said; the segment's others count."""
    rows = endpoint_events(20)
    latest = datetime.fromtimestamp(NOW, UTC) + timedelta(hours=1)
    ahead = [{**row, "time": latest + timedelta(minutes=1)} for row in rows[:5]]
    just = [{**row, "time": latest} for row in rows[5:8]]
    write_deltas(tmp_path / "spool", "Endpoint", [*rows, *ahead, *just], SMALL)
    with pipeline(spark, tmp_path, oal=SMALL) as running:
        (report,) = running.run_available()
        assert differences(stored(running.store), expected_of([*rows, *just])) == []
        assert counted(running.store, "quarantined") == {("Endpoint", "time too far ahead"): 5}
        assert (report.stats.rows, report.stats.quarantined_rows) == (23, 5)
    (path,) = (local(running.quarantine) / "Endpoint").glob("deltas-main-0.parquet")
    table = pq.read_table(path, partitioning=None)
    assert sum(table[ROW_COUNT].to_pylist()) == 5
    assert set(table["_reason"].to_pylist()) == {"time too far ahead"}


def test_late_and_expired_events_of_deltas_are_counted(spark: SparkSession, tmp_path: Path) -> None:
    """As many as there were events, not deltas."""
    newest = datetime(2026, 3, 19, 12, tzinfo=UTC)
    base = endpoint_events(1)[0]

    def events(moment: datetime, count: int) -> list[Row]:
        return [{**base, "time": moment} for _ in range(count)]

    spool = tmp_path / "spool"
    write_deltas(spool, "Endpoint", events(newest, 3), SMALL, "new", order=0)
    late = events(newest - timedelta(minutes=10), 7)
    gone = events(newest - timedelta(days=9), 11)
    write_deltas(spool, "Endpoint", [*late, *gone], SMALL, "old", order=1)
    settings = PipelineSettings(ttl_days=7, max_batch_files=1)
    with pipeline(spark, tmp_path, oal=SMALL, settings=settings) as running:
        reports = running.run_available()
        assert counted(running.store, "late") == {("Endpoint", ""): 18}
        assert counted(running.store, "expired") == {("Endpoint", "older than the TTL"): 11}
        assert [report.stats.late for report in reports] == [0, 18]
        kept = expected_of([*events(newest, 3), *late])
        assert differences(stored(running.store), kept) == []


def test_a_broken_segment_of_deltas_is_quarantined(spark: SparkSession, tmp_path: Path) -> None:
    """Damaged inside, cut short, or of an event type that nobody knows."""
    rows = endpoint_events(300)
    spool = tmp_path / "spool"
    damaged = write_deltas(spool, "Endpoint", rows, SMALL, "damaged")
    data = bytearray(damaged.read_bytes())
    data[200:600] = bytes(400)
    damaged.write_bytes(data)
    cut = write_deltas(spool, "Endpoint", rows, SMALL, "cut")
    cut.write_bytes(cut.read_bytes()[:-9])
    unknown = write_deltas(spool, "Endpoint", rows[:7], SMALL, "unknown")
    (spool / "Nobody").mkdir()
    unknown.rename(spool / "Nobody" / unknown.name)
    write_deltas(spool, "Endpoint", rows, SMALL, "good")
    with pipeline(spark, tmp_path, oal=SMALL) as running:
        running.run_available()
        assert differences(stored(running.store), expected_of(rows)) == []
        assert counted(running.store, "quarantined segment") == {
            ("Endpoint", "corrupt"): 2,
            ("Nobody", "unknown source"): 1,
        }
        assert counted(running.store, "quarantined")["Nobody", "unknown source"] == 7


def statement(span: Row) -> Statement:
    """The call that a span is of, as the application emits it."""
    attributes = attributes_of(span)
    return Statement(
        span["time"],
        service_of(span),
        str(destination_of(attributes)),
        latency_ms(span),
        statement_of(span),
        database_system(attributes) or "",
        cache_operation(span) if is_cache(attributes) else None,  # type: ignore[arg-type]
        span["trace_id"],
        span["span_id"],
    )


@pytest.mark.system
def test_statements_beside_spans_are_the_top_of_the_oracle(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Some come as spans, others from two clients that aggregate; in one batch and in several."""
    spans = random_spans(6, 300, start=START, days=1)
    calls = [span for span in spans if is_database_call(span)]
    emitted = calls[::2]
    ids = {span["span_id"] for span in emitted}
    rest = [span for span in spans if span["span_id"] not in ids]
    counted_once = [span for span in emitted if statement(span).cache_operation != "Others"]
    assert len(counted_once) > 20
    edge = EdgeSettings(period_s=3600)
    spool = tmp_path / "spool"
    for some in (emitted[::2], emitted[1::2]):
        with Client(spool, aggregate=OF_SPANS, edge=edge) as client:
            client.emit_many(map(statement, some))
    write_segment(spool, "Span", rest)
    other = EdgeSettings(period_s=3600, slow_cache_ms="default:1", top_n=60)
    with Client(spool, aggregate=OF_SPANS, edge=other) as client:
        client.emit_many(map(statement, counted_once[:9]))
    for batch_files in (None, 1):
        folder = tmp_path / str(batch_files)
        folder.mkdir()
        settings = PipelineSettings(ttl_days=365, max_batch_files=batch_files)
        given: dict[str, Any] = {"spool": spool, "oal": OF_SPANS, "settings": settings}
        with pipeline(spark, folder, quarantine=folder / "quarantine", **given) as running:
            running.run_available()
            running.settle(everything=True)
            assert top_of(running.store) == top_expected(expected_topn(spans))
            assert counted(running.store, "rows")["Statement", ""] == len(counted_once)
            assert counted(running.store, "quarantined") == {("Statement", REASON): 9}
            (reason,) = (local(running.quarantine) / "Statement").glob("*.reason")
            assert "slow_cache_ms: {'default': 1}, here {'default': 20" in reason.read_text()
            assert "top_n" not in reason.read_text()  # more than enough are there


def test_statements_too_far_ahead_are_quarantined(spark: SparkSession, tmp_path: Path) -> None:
    """Their segment, by the pipeline's clock."""
    ahead = datetime.fromtimestamp(NOW, UTC) + timedelta(hours=2)
    with Client(tmp_path / "spool", aggregate=SMALL) as client:
        client.emit(Statement(ahead, "shop", "orders", 900, "SELECT 1"))
    with pipeline(spark, tmp_path, oal=SMALL) as running:
        running.run_available()
        assert running.store.top_streams() == []
        assert counted(running.store, "quarantined") == {("Statement", "time too far ahead"): 1}
