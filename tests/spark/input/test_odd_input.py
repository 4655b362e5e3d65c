"""Input that is unusual, little or none: read as what it is."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession

from tests.kit.pipelines import (
    ONE_AT_A_TIME,
    SMALL,
    START,
    counted,
    differences,
    endpoint_events,
    expected_of,
    local,
    pipeline,
    quarantined,
    quarantined_rows,
    set_order,
    stored,
    with_column,
    write_segment,
    write_table,
)
from tests.oracle.catalog import Row
from tests.oracle.generate import random_spans, to_table

# What is unusual and can be read.

READABLE: dict[str, Callable[[list[Row], Path], object]] = {
    "nanoseconds, as pandas writes them": lambda rows, folder: write_table(
        folder,
        "ns",
        with_column(rows, "time", [row["time"] for row in rows], pa.timestamp("ns", tz="UTC")),
    ),
    "nanoseconds without a zone": lambda rows, folder: write_table(
        folder,
        "naive-ns",
        with_column(
            rows, "time", [row["time"].replace(tzinfo=None) for row in rows], pa.timestamp("ns")
        ),
    ),
    "no zone": lambda rows, folder: write_table(
        folder,
        "naive",
        with_column(
            rows, "time", [row["time"].replace(tzinfo=None) for row in rows], pa.timestamp("us")
        ),
    ),
    "another zone": lambda rows, folder: write_table(
        folder,
        "tokyo",
        with_column(
            rows, "time", [row["time"] for row in rows], pa.timestamp("us", tz="Asia/Tokyo")
        ),
    ),
    "a wider number": lambda rows, folder: write_table(
        folder,
        "int64",
        with_column(rows, "latency", [row["latency"] for row in rows], pa.int64()),
    ),
    "an unsigned number": lambda rows, folder: write_table(
        folder,
        "uint32",
        with_column(rows, "latency", [row["latency"] for row in rows], pa.uint32()),
    ),
    "a dictionary": lambda rows, folder: write_table(
        folder,
        "dictionary",
        with_column(
            rows, "name", [row["name"] for row in rows], pa.dictionary(pa.int32(), pa.string())
        ),
    ),
    "more columns": lambda rows, folder: write_table(
        folder, "more", with_column(rows, "colour", ["red"] * len(rows), pa.string())
    ),
    "old timestamps, as Spark writes them": lambda rows, folder: write_table(
        folder, "int96", to_table("Endpoint", rows), use_deprecated_int96_timestamps=True
    ),
    "a compression that Spark does not have": lambda rows, folder: write_table(
        folder, "brotli", to_table("Endpoint", rows), compression="brotli"
    ),
    "a column again in capitals": lambda rows, folder: write_table(
        folder, "capitals", with_column(rows, "LATENCY", [1] * len(rows), pa.int32())
    ),
    "blanks and umlauts in its name": lambda rows, folder: write_segment(
        folder, "Endpoint", rows, "a b ü"
    ),
    "a percent sign in its name": lambda rows, folder: write_segment(
        folder, "Endpoint", rows, "a%41b"
    ),
    "marks of an address in its name": lambda rows, folder: write_segment(
        folder, "Endpoint", rows, "a#1?b"
    ),
    "marks of a pattern in its name": lambda rows, folder: write_segment(
        folder, "Endpoint", rows, "a[1]{b}*"
    ),
    "a modification time long ago": lambda rows, folder: set_order(
        write_segment(folder, "Endpoint", rows, "ancient"), -3 * 365 * 86400
    ),
}


def test_segments_that_are_unusual_are_read(spark: SparkSession, tmp_path: Path) -> None:
    """Whatever common writers produce: read, and equal to the oracle.

    The rows of each kind are of a service of its own, which a difference names.
    """
    usual, *others = (endpoint_events(20, seed) for seed in range(len(READABLE) + 1))
    write_segment(tmp_path / "spool", "Endpoint", usual)
    with pipeline(spark, tmp_path, oal=SMALL) as running:
        running.run_available()
        for (kind, write), rows in zip(READABLE.items(), others, strict=True):
            for row in rows:
                row["serviceName"] = kind
            write(rows, tmp_path / "spool")
        (report,) = running.run_available()
        assert report.stats.segments == len(READABLE)
        assert quarantined(local(running.quarantine)) == {}
        wanted = expected_of([*usual, *itertools.chain(*others)])
        assert differences(stored(running.store), wanted) == []


def test_columns_that_are_missing_are_null_unless_they_are_required(
    spark: SparkSession, tmp_path: Path
) -> None:
    """A segment with no more than the required columns, and one with a column of nulls only, are
    read. No time column, or no latency: every row is quarantined for that reason."""
    rows = endpoint_events(20)
    few = ("time", "name", "serviceName", "serviceLayer", "latency")
    table = to_table("Endpoint", rows[:10])
    write_table(tmp_path / "spool", "few", table.select(few))
    nulls = with_column(rows[10:], "type", [None] * 10, pa.null())
    write_table(tmp_path / "spool", "nulls", nulls)
    write_table(tmp_path / "spool", "timeless", table.drop_columns(["time"]))
    write_table(tmp_path / "spool", "unmeasured", table.drop_columns(["latency"]))
    with pipeline(spark, tmp_path, oal=SMALL) as running:
        running.run_available()
        actual = stored(running.store)
        assert counted(running.store, "quarantined") == {
            ("Endpoint", "no time"): 10,
            ("Endpoint", "no latency"): 10,
        }
    seen = [{name: row[name] for name in few} for row in rows[:10]]
    seen += [{**row, "type": None} for row in rows[10:]]
    assert differences(actual, expected_of(seen)) == []


def test_text_that_is_no_utf8_does_not_stop_the_stream(spark: SparkSession, tmp_path: Path) -> None:
    """A writer's Latin-1 in names and labels: quarantined or read, and the other rows are right."""
    rows = endpoint_events(20)
    bad = pa.array([b"caf\xe9"] * 5, pa.binary()).view(pa.string())
    table = to_table("Endpoint", rows[:5])
    for name in ("name", "serviceName", "type"):
        table = table.set_column(table.column_names.index(name), name, bad)
    write_table(tmp_path / "spool", "latin1", table)
    write_segment(tmp_path / "spool", "Endpoint", rows[5:])
    with pipeline(spark, tmp_path, oal=SMALL) as running:
        running.run_available()
        actual = stored(running.store)
    wanted = expected_of(rows[5:])
    assert {key: actual.get(key) for key in wanted} == wanted


def test_odd_text_goes_all_the_way(spark: SparkSession, tmp_path: Path) -> None:
    """Quotes, backslashes, control characters and emoji, in names and labels."""
    odd = ['"', "\\", "\n\t", "\x00", "\x7f", "'", "💳é", "a:1,b", "{}[]", "\u2028", "\\u0000"]
    row = endpoint_events(1)[0]
    rows = [
        {**row, "name": text, "rpcStatusCode": text, "latency": 7} for text in odd for _ in "ab"
    ]
    rows += [{**row, "rpcStatusCode": text} for text in odd]
    oal = """
    codes = from(Endpoint.*).labelCount(rpcStatusCode);
    avg = from(Endpoint.*).labelAvg(rpcStatusCode, latency);
    same = from(Endpoint.*).filter(rpcStatusCode == "'").count();
    """
    for number in range(2):
        write_segment(tmp_path / "spool", "Endpoint", rows[number::2], str(number), number)
    with pipeline(spark, tmp_path, oal=oal, settings=ONE_AT_A_TIME) as running:
        running.run_available()
        assert differences(stored(running.store), expected_of(rows, oal)) == []
        # PostgreSQL holds no null characters, so no store has them in a name.
        assert set(odd) - {"\x00"} <= {entity.name for entity in running.store.entities("endpoint")}


# Little or nothing to read.


def test_an_empty_spool_is_no_error(spark: SparkSession, tmp_path: Path) -> None:
    """A spool that is not there yet is made; what comes later is read."""
    rows = endpoint_events(20)
    with pipeline(spark, tmp_path, oal=SMALL) as running:
        assert (tmp_path / "spool").is_dir()
        assert running.run_available() == []
        assert running.settle(everything=True) is None
        write_segment(tmp_path / "spool", "Endpoint", rows)
        assert len(running.run_available()) == 1
        assert differences(stored(running.store), expected_of(rows)) == []


def test_a_batch_without_rows_is_committed(spark: SparkSession, tmp_path: Path) -> None:
    """Segments without a row, or none that can be read: an empty batch, and the next follows."""
    rows = endpoint_events(20)
    write_segment(tmp_path / "spool", "Endpoint", [], "0", 0)
    write_segment(tmp_path / "spool", "Span", [], "1", 1)
    garbage = tmp_path / "spool" / "Endpoint" / "2.parquet"
    garbage.write_bytes(b"PAR1")
    set_order(garbage, 2)
    write_segment(tmp_path / "spool", "Endpoint", rows, "3", 3)
    with pipeline(spark, tmp_path, oal=SMALL, settings=ONE_AT_A_TIME) as running:
        reports = running.run_available()
        assert [(report.number, report.stats.rows) for report in reports] == [
            (0, 0),
            (1, 0),
            (2, 0),
            (3, 20),
        ]
        assert differences(stored(running.store), expected_of(rows)) == []


def test_folders_may_have_any_name(spark: SparkSession, tmp_path: Path) -> None:
    """Blanks, umlauts and percent signs in the folders of spool, checkpoint and quarantine."""
    folder = tmp_path / "Müll eimer %41 #1"
    rows = endpoint_events(20)
    spans = random_spans(5, 30, start=START, days=1)
    write_segment(folder / "spool", "Endpoint", [*rows, {**rows[0], "time": rows[0]["time"]}])
    timeless = with_column(rows[:2], "time", [None] * 2, pa.timestamp("us", tz="UTC"))
    write_table(folder / "spool", "timeless", timeless)
    write_segment(folder / "spool", "Span", spans)
    (folder / "spool" / "Endpoint" / "garbage.parquet").write_bytes(b"PAR1")
    oal = SMALL + "rel = from(ServiceRelation.*).cpm();"
    with pipeline(spark, folder, oal=oal) as running:
        (report,) = running.run_available()
        assert report.stats.segments == 3
        assert running.settle(everything=True) is not None
        assert counted(running.store, "quarantined") == {("Endpoint", "no time"): 2}
        assert len(quarantined_rows(local(running.quarantine))) == 2
        assert quarantined(local(running.quarantine)) == {"garbage.parquet": "corrupt"}
        assert list(tmp_path.iterdir()) == [folder]
