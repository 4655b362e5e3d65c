"""Segments of spans: those of this version, of an older one and of other writers read the same."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from batchmill.oal import core_script
from batchmill.spark import PipelineSettings
from batchmill.spool import ATTRIBUTE_COLUMNS, SPAN_COLUMNS, span_table
from tests.kit.pipelines import (
    START,
    counted,
    differences,
    expected,
    local,
    pipeline,
    quarantined_rows,
    stored,
    write_segment,
)
from tests.kit.servers.kafka import span_batch
from tests.kit.spark import span
from tests.oracle.catalog import Row
from tests.oracle.generate import random_spans
from tests.oracle.spans import spans_to_events

pytestmark = pytest.mark.slow

NAMED = """
tagged_get = from(Endpoint.*).filter(tag["http.request.method"] == "GET").count();
tagged_own = from(ServiceInstance.*).filter(tag["user.tier"] == "gold").count();
untagged = from(Service.*).filter(tag["http.route"] == null).count();
"""
"""Metrics that name the attributes they read: no others are looked up."""
TAGGED = f"""{NAMED}
tagged_old = from(Service.*).filter(tags contain "http.method:GET").count();
"""


def write_wide(folder: Path, rows: Sequence[Row], name: str, drop: Sequence[str] = ()) -> None:
    """A segment as a spool writes it, without the columns to ``drop``."""
    path = folder / "Span" / f"{name}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    table = span_table(span_batch(rows)).drop_columns(list(drop))
    pq.write_table(table, path)


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(TAGGED, id="tags"),
        pytest.param(NAMED, id="keys"),
        pytest.param(core_script().read_text("utf-8"), id="core", marks=pytest.mark.system),
    ],
)
def test_old_and_new_segments_give_the_same(
    spark: SparkSession, tmp_path: Path, script: str
) -> None:
    """Spans of one batch in segments with and without columns of attributes equal the oracle."""
    spans = random_spans(11, 300, start=START, days=1)
    for row in spans[::3]:
        row["attributes"] = {**(row["attributes"] or {}), "user.tier": "gold", "http.route": ""}
    folder = tmp_path / "spool"
    write_segment(folder, "Span", spans[:100], "old")
    write_wide(folder, spans[100:200], "new")
    # A later version has columns that this one's segments lack.
    absent = {"http.route": "http_route", "db.system": "db_system"}
    few = [row for row in spans[200:] if absent.keys().isdisjoint(row["attributes"] or {})]
    write_wide(folder, few, "fewer", drop=[*absent.values(), "host_name"])
    write_wide(folder, [row for row in spans[200:] if row not in few], "others")
    with pipeline(spark, tmp_path, oal=script) as running:
        running.run_available()
        running.settle(everything=True)
        values = stored(running.store)
    assert {key[0] for key in values} >= {"tagged_get", "tagged_own"} or script not in (
        TAGGED,
        NAMED,
    )
    assert differences(values, expected(spans_to_events(spans).events, script)) == []


def test_a_column_of_nothing_counts_as_absent(spark: SparkSession, tmp_path: Path) -> None:
    """Other writers leave a column without a type: the map has the attribute then."""
    rows = [span("a", attributes={"http.request.method": "GET"})]
    path = write_segment(tmp_path / "spool", "Span", rows)
    table = pq.read_table(path)
    pq.write_table(table.append_column("http_request_method", pa.nulls(1)), path)
    with pipeline(spark, tmp_path, oal=TAGGED) as running:
        running.run_available()
        values = stored(running.store)
    assert differences(values, expected(spans_to_events(rows).events, TAGGED)) == []
    assert "tagged_get" in {key[0] for key in values}


def test_tags_have_the_last_value_of_a_repeated_key(spark: SparkSession, tmp_path: Path) -> None:
    """A map of another program may have a key twice: the pipeline goes on."""
    path = write_segment(tmp_path / "spool", "Span", [span("a", kind="SERVER", attributes=None)])
    table = pq.read_table(path)
    place = table.schema.get_field_index("attributes")
    kind = pa.map_(pa.string(), pa.string())
    attributes = pa.array([[("user.tier", "silver"), ("user.tier", "gold")]], kind)
    pq.write_table(table.set_column(place, "attributes", attributes), path)
    script = """
    golden = from(Service.*).filter(tags contain "user.tier:gold").count();
    silver = from(Service.*).filter(tags contain "user.tier:silver").count();
    """
    with pipeline(spark, tmp_path, oal=script) as running:
        running.run_available()
        assert {key[0] for key in stored(running.store)} == {"golden"}


def test_a_column_of_another_type_is_quarantined(spark: SparkSession, tmp_path: Path) -> None:
    """A number where text is expected: the whole segment, with the column as the reason."""
    rows = [span("a")]
    path = write_segment(tmp_path / "spool", "Span", rows)
    table = pq.read_table(path).append_column("server_port", pa.array([80]))
    pq.write_table(table, path)
    with pipeline(spark, tmp_path, oal=TAGGED) as running:
        running.run_available()
        assert counted(running.store, "quarantined segment") == {("Span", "wrong type"): 1}


def test_quarantined_spans_keep_all_attributes(spark: SparkSession, tmp_path: Path) -> None:
    """Of a segment with columns of attributes, and of one without."""
    given = {"http.route": "/x", "server.port": "", "own": "1"}
    late = START + timedelta(days=400)
    rows = [span(name, attributes=given, time=late, end_time=late) for name in ("a", "b")]
    write_segment(tmp_path / "spool", "Span", rows[:1], "old")
    write_wide(tmp_path / "spool", rows[1:], "new")
    with pipeline(spark, tmp_path, oal=TAGGED, settings=PipelineSettings()) as running:
        running.run_available()
        assert counted(running.store, "quarantined") == {("Span", "time too far ahead"): 2}
    kept = quarantined_rows(local(running.quarantine))
    assert len(kept) == 2
    for row in kept:
        columns = {key: row.get(name) for key, name in ATTRIBUTE_COLUMNS.items()}
        present = {key: value for key, value in columns.items() if value is not None}
        assert present | dict(row["attributes"]) == given
        assert set(SPAN_COLUMNS) <= row.keys()
