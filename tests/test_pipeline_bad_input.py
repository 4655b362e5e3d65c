"""Bad input and bad days: nothing of it stops the stream, or it ends with a clear error."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from batchmill.spark import BatchReport, Pipeline, PipelineSettings
from batchmill.spark._segments import look_at
from batchmill.store import RetryPolicy, StoreFullError, StoreUnavailableError
from batchmill.store._sqlite import SqliteStore
from batchmill.store._store import SqlStore
from tests.oracle.catalog import Row
from tests.oracle.generate import random_spans
from tests.oracle.segments import to_table
from tests.pipeline_kit import NOW, START, Stored, differences, expected, pipeline, stored
from tests.pipeline_runs import (
    SMALL,
    counted,
    endpoint_events,
    expected_of,
    quarantined,
    quarantined_rows,
    set_order,
    write_segment,
)
from tests.postgres import Postgres

ONE_AT_A_TIME = PipelineSettings(ttl_days=365, max_batch_files=1)
CPU = "cpu = from(ServiceInstanceJVMCPU.usePercent).doubleAvg();"


def write_table(folder: Path, name: str, table: pa.Table, **options: Any) -> Path:
    """One segment of Endpoint, of any columns."""
    path = folder / "Endpoint" / f"{name}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, **options)
    return path


def with_column(rows: Sequence[Row], name: str, values: Sequence[Any], kind: Any) -> pa.Table:
    """Rows of Endpoint as a table, one column of it replaced or added."""
    table = to_table("Endpoint", rows)
    column = pa.array(values, kind)
    if name in table.column_names:
        return table.set_column(table.column_names.index(name), name, column)
    return table.append_column(name, column)


def overwrite_page(path: Path, column: str) -> None:
    """Spoil the data of a column; the footer stays whole."""
    metadata = pq.read_metadata(path)
    group = metadata.row_group(0)
    chunk = next(
        group.column(each)
        for each in range(group.num_columns)
        if group.column(each).path_in_schema == column
    )
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    content = bytearray(path.read_bytes())
    content[start : start + chunk.total_compressed_size] = b"\xa5" * chunk.total_compressed_size
    path.write_bytes(content)


# What cannot be read at all, and rows that do not fit.


@pytest.fixture(scope="module")
def spoiled(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Pipeline, list[Row]]]:
    """A run with two good segments among all kinds of bad ones, in one batch, then a good batch."""
    folder = tmp_path_factory.mktemp("spoiled")
    spool, rows = folder / "spool", endpoint_events(60)
    write_segment(spool, "Endpoint", rows[:20], "good-0")
    write_segment(spool, "Endpoint", rows[20:40], "good-1")
    (spool / "Endpoint" / "garbage.parquet").write_bytes(os.urandom(5000))
    whole = write_segment(spool, "Endpoint", rows[:30], "truncated")
    whole.write_bytes(whole.read_bytes()[:-200])
    table = to_table("Endpoint", rows[:30])
    overwrite_page(write_table(spool, "page", table, compression="zstd"), "latency")
    write_table(spool, "text", with_column(rows[:7], "latency", ["12"] * 7, pa.string()))
    write_table(spool, "number", with_column(rows[:5], "time", [1] * 5, pa.int64()))
    misplaced = write_segment(spool, "Endpoint", rows[:9], "misplaced")
    (spool / "Endpiont").mkdir()
    misplaced.rename(spool / "Endpiont" / "misplaced.parquet")
    (spool / "Endpoint" / "notes.txt").write_text("no segment at all")
    with pipeline(spark, folder, oal=SMALL) as running:
        running.run_available()
        write_segment(spool, "Endpoint", rows[40:], "good-2")
        running.run_available()
        yield running, rows


def test_good_rows_among_bad_segments_equal_the_oracle(
    spoiled: tuple[Pipeline, list[Row]],
) -> None:
    """Unreadable segments change nothing about the others, nor about later batches."""
    running, rows = spoiled
    assert differences(stored(running.store), expected_of(rows)) == []


def test_bad_segments_are_in_the_quarantine_with_their_reason(
    spoiled: tuple[Pipeline, list[Row]],
) -> None:
    """Beside the spool, each as it was, and named."""
    running, _ = spoiled
    assert running.quarantine == running.spool.with_name("spool-quarantine")
    assert quarantined(running.quarantine) == {
        "garbage.parquet": "corrupt",
        "truncated.parquet": "corrupt",
        "page.parquet": "corrupt",
        "text.parquet": "wrong type",
        "number.parquet": "wrong type",
        "misplaced.parquet": "unknown source",
    }
    for name in ("Endpoint/garbage.parquet", "Endpoint/page.parquet", "Endpiont/misplaced.parquet"):
        kept = (running.quarantine / name).read_bytes()
        assert kept == (running.spool / name).read_bytes()
    why = (running.quarantine / "Endpoint" / "text.parquet.reason").read_text("utf-8")
    assert "latency" in why
    assert "string" in why


def test_bad_segments_are_counted(spoiled: tuple[Pipeline, list[Row]]) -> None:
    """By reason; with their rows, where the footer still tells."""
    running, rows = spoiled
    assert counted(running.store, "quarantined segment") == {
        ("Endpoint", "corrupt"): 3,
        ("Endpoint", "wrong type"): 2,
        ("Endpiont", "unknown source"): 1,
    }
    assert counted(running.store, "quarantined") == {
        ("Endpoint", "wrong type"): 12,
        ("Endpiont", "unknown source"): 9,
    }
    assert counted(running.store, "rows") == {("Endpoint", ""): len(rows)}


def test_a_segment_without_a_byte_is_told(spark: SparkSession, tmp_path: Path) -> None:
    """A writer that died at once: its file is set aside as corrupt, and counted."""
    rows = endpoint_events(20)
    write_segment(tmp_path / "spool", "Endpoint", rows)
    (tmp_path / "spool" / "Endpoint" / "empty.parquet").write_bytes(b"")
    with pipeline(spark, tmp_path, oal=SMALL) as running:
        running.run_available()
        assert differences(stored(running.store), expected_of(rows)) == []
        assert quarantined(running.quarantine) == {"empty.parquet": "corrupt"}
        assert counted(running.store, "quarantined segment") == {("Endpoint", "corrupt"): 1}


@pytest.fixture(scope="module")
def misfits(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Pipeline, dict[str, list[Row]]]]:
    """A run whose segments have rows that fit and rows that do not; the former are returned."""
    folder = tmp_path_factory.mktemp("misfits")
    spool, rows = folder / "spool", endpoint_events(30)
    now = datetime.fromtimestamp(NOW, UTC)
    limit = now + timedelta(hours=1)
    times = [each["time"] for each in rows[:20]]
    times[3:5] = [None, None]
    times[5] = limit + timedelta(microseconds=1)
    times[6] = limit
    times[7] = datetime(1969, 12, 31, tzinfo=UTC)
    moved = [{**row, "time": time} for row, time in zip(rows, times, strict=False)]
    write_table(spool, "times", with_column(rows[:20], "time", times, pa.timestamp("us", tz="UTC")))
    good = [row for number, row in enumerate(moved) if number not in (3, 4, 5, 7)]
    latencies = [row["latency"] for row in rows[20:]]
    latencies[0] = None
    latencies[1] = 2**31
    latencies[2] = 2**31 - 1
    latencies[3] = -(2**31) - 1
    write_table(spool, "wide", with_column(rows[20:], "latency", latencies, pa.int64()))
    good += [{**rows[22], "latency": 2**31 - 1}, *rows[24:]]
    cpu = [
        {"time": START, "id": "aWQ=.1_A", "name": "n", "usePercent": each}
        for each in (1.5, float("nan"), float("inf"), -float("inf"), 2.0**62, 3.25)
    ]
    write_segment(spool, "ServiceInstanceJVMCPU", cpu)
    with pipeline(spark, folder, oal=SMALL + CPU) as running:
        running.run_available()
        yield running, {"Endpoint": good, "ServiceInstanceJVMCPU": [cpu[0], cpu[-1]]}


def test_rows_that_fit_among_those_that_do_not_equal_the_oracle(
    misfits: tuple[Pipeline, dict[str, list[Row]]],
) -> None:
    """An hour ahead is not too far, and the largest int is not too large."""
    running, good = misfits
    assert differences(stored(running.store), expected(good, SMALL + CPU)) == []


def test_rows_that_do_not_fit_are_counted_by_reason(
    misfits: tuple[Pipeline, dict[str, list[Row]]],
) -> None:
    """Accepted and set aside add up to what came."""
    running, good = misfits
    assert counted(running.store, "quarantined") == {
        ("Endpoint", "no time"): 2,
        ("Endpoint", "time too far ahead"): 1,
        ("Endpoint", "time before 1970"): 1,
        ("Endpoint", "no latency"): 1,
        ("Endpoint", "latency: too large for an int"): 2,
        ("ServiceInstanceJVMCPU", "usePercent: not a finite number"): 4,
    }
    assert counted(running.store, "rows") == {
        (source, ""): len(rows) for source, rows in good.items()
    }


def test_rows_that_do_not_fit_are_in_the_quarantine(
    misfits: tuple[Pipeline, dict[str, list[Row]]],
) -> None:
    """Whole, each with its reason."""
    running, _ = misfits
    rows = quarantined_rows(running.quarantine)
    assert len(rows) == 11
    assert sum(row["_reason"] == "no time" for row in rows) == 2
    (ahead,) = [row for row in rows if row["_reason"] == "time too far ahead"]
    assert ahead["time"] == datetime.fromtimestamp(NOW, UTC) + timedelta(hours=1, microseconds=1)
    assert ahead["serviceName"] == endpoint_events(30)[5]["serviceName"]


def test_rows_can_come_back_from_the_quarantine(spark: SparkSession, tmp_path: Path) -> None:
    """What was too far ahead fits once its time has come: its file goes back into the spool."""
    rows = endpoint_events(10)
    write_segment(tmp_path / "spool", "Endpoint", rows)
    before = min(each["time"] for each in rows) - timedelta(days=1)
    now = [before.timestamp()]
    with pipeline(spark, tmp_path, oal=SMALL, clock=lambda: now[0]) as running:
        running.run_available()
        assert counted(running.store, "quarantined") == {("Endpoint", "time too far ahead"): 10}
        (file,) = running.quarantine.glob("Endpoint/rows-*/*.parquet")
        file.rename(tmp_path / "spool" / "Endpoint" / "again.parquet")
        now[0] = NOW
        running.run_available()
        assert differences(stored(running.store), expected_of(rows)) == []


def test_spans_that_do_not_fit_are_set_aside(spark: SparkSession, tmp_path: Path) -> None:
    """A span without its end, its trace or its time is counted by reason; the rest goes on."""
    spans = random_spans(5, 40, start=START, days=1)
    for number, column in ((1, "end_time"), (2, "trace_id"), (3, "span_id")):
        spans[number] = {**spans[number], column: None}
    write_segment(tmp_path / "spool", "Span", spans)
    with pipeline(spark, tmp_path, oal="c = from(Service.*).count();") as running:
        running.run_available()
        assert counted(running.store, "quarantined") == {
            ("Span", "no end_time"): 1,
            ("Span", "no trace_id"): 1,
            ("Span", "no span_id"): 1,
        }
        assert counted(running.store, "rows")["Span", ""] == 37


def test_a_misfit_beside_a_column_of_the_wrong_type_that_nobody_reads(
    spark: SparkSession, tmp_path: Path
) -> None:
    """A column that no metric reads may be of any type, also when a row is to be set aside."""
    rows = endpoint_events(10)
    table = with_column(rows, "httpResponseStatusCode", ["200"] * 10, pa.string())
    times = [None, *(each["time"] for each in rows[1:])]
    table = table.set_column(0, "time", pa.array(times, pa.timestamp("us", tz="UTC")))
    write_table(tmp_path / "spool", "odd", table)
    with pipeline(spark, tmp_path, oal=SMALL) as running:
        running.run_available()
        assert counted(running.store, "quarantined") == {("Endpoint", "no time"): 1}
        assert differences(stored(running.store), expected_of(rows[1:])) == []


def test_a_row_is_either_counted_or_set_aside(spark: SparkSession, tmp_path: Path) -> None:
    """What is odd in a column that no metric reads does not set a row aside that is counted."""
    rows = endpoint_events(10)
    codes = [200, 2**40, *([404] * 8)]
    table = with_column(rows, "httpResponseStatusCode", codes, pa.int64())
    times = [None, *(each["time"] for each in rows[1:])]
    table = table.set_column(0, "time", pa.array(times, pa.timestamp("us", tz="UTC")))
    write_table(tmp_path / "spool", "odd", table)
    with pipeline(spark, tmp_path, oal=SMALL) as running:
        running.run_available()
        kept = sum(counted(running.store, "rows").values())
        aside = sum(counted(running.store, "quarantined").values())
        assert (kept, aside) == (9, 1)


# What is unusual and can be read.

READABLE: dict[str, Callable[[list[Row], Path], object]] = {
    "nanoseconds, as pandas writes them": lambda rows, folder: write_table(
        folder,
        "ns",
        with_column(rows, "time", [each["time"] for each in rows], pa.timestamp("ns", tz="UTC")),
    ),
    "nanoseconds without a zone": lambda rows, folder: write_table(
        folder,
        "naive-ns",
        with_column(
            rows, "time", [each["time"].replace(tzinfo=None) for each in rows], pa.timestamp("ns")
        ),
    ),
    "no zone": lambda rows, folder: write_table(
        folder,
        "naive",
        with_column(
            rows, "time", [each["time"].replace(tzinfo=None) for each in rows], pa.timestamp("us")
        ),
    ),
    "another zone": lambda rows, folder: write_table(
        folder,
        "tokyo",
        with_column(
            rows, "time", [each["time"] for each in rows], pa.timestamp("us", tz="Asia/Tokyo")
        ),
    ),
    "a wider number": lambda rows, folder: write_table(
        folder,
        "int64",
        with_column(rows, "latency", [each["latency"] for each in rows], pa.int64()),
    ),
    "an unsigned number": lambda rows, folder: write_table(
        folder,
        "uint32",
        with_column(rows, "latency", [each["latency"] for each in rows], pa.uint32()),
    ),
    "a dictionary": lambda rows, folder: write_table(
        folder,
        "dictionary",
        with_column(
            rows, "name", [each["name"] for each in rows], pa.dictionary(pa.int32(), pa.string())
        ),
    ),
    "more columns": lambda rows, folder: write_table(
        folder, "more", with_column(rows, "colour", ["red"] * len(rows), pa.string())
    ),
    "old timestamps, as Spark writes them": lambda rows, folder: write_table(
        folder, "int96", to_table("Endpoint", rows), use_deprecated_int96_timestamps=True
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


def test_a_segment_that_only_spark_cannot_read_is_set_aside(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Its footer is good and pyarrow reads it, but Spark lacks the codec: the stream goes on."""
    rows = endpoint_events(40)
    write_segment(tmp_path / "spool", "Endpoint", rows[:20])
    write_table(tmp_path / "spool", "brotli", to_table("Endpoint", rows[20:]), compression="brotli")
    with pipeline(spark, tmp_path, oal=SMALL) as running:
        running.run_available()
        assert differences(stored(running.store), expected_of(rows[:20])) == []
        assert counted(running.store, "quarantined segment") == {("Endpoint", "unreadable"): 1}


@pytest.mark.parametrize("kind", READABLE)
def test_a_segment_that_is_unusual_is_read(spark: SparkSession, tmp_path: Path, kind: str) -> None:
    """Whatever common writers produce: read, and equal to the oracle."""
    rows = endpoint_events(40)
    write_segment(tmp_path / "spool", "Endpoint", rows[:20])
    with pipeline(spark, tmp_path, oal=SMALL) as running:
        if kind == "a modification time long ago":
            running.run_available()
        READABLE[kind](rows[20:], tmp_path / "spool")
        running.run_available()
        assert quarantined(running.quarantine) == {}
        assert differences(stored(running.store), expected_of(rows)) == []


def test_columns_that_are_missing_are_null(spark: SparkSession, tmp_path: Path) -> None:
    """A segment with no more than the required columns, and one with a column of nulls only."""
    rows = endpoint_events(20)
    few = ("time", "name", "serviceName", "serviceLayer", "latency")
    write_table(tmp_path / "spool", "few", to_table("Endpoint", rows[:10]).select(few))
    nulls = with_column(rows[10:], "type", [None] * 10, pa.null())
    write_table(tmp_path / "spool", "nulls", nulls)
    with pipeline(spark, tmp_path, oal=SMALL) as running:
        running.run_available()
        found = stored(running.store)
    seen = [{name: row[name] for name in few} for row in rows[:10]]
    seen += [{**row, "type": None} for row in rows[10:]]
    assert differences(found, expected_of(seen)) == []


def test_a_segment_without_a_required_column_has_no_row_that_fits(
    spark: SparkSession, tmp_path: Path
) -> None:
    """No time column, or no latency: every row is set aside for that reason."""
    rows = endpoint_events(20)
    table = to_table("Endpoint", rows[:10])
    write_table(tmp_path / "spool", "timeless", table.drop_columns(["time"]))
    write_table(tmp_path / "spool", "unmeasured", table.drop_columns(["latency"]))
    write_segment(tmp_path / "spool", "Endpoint", rows[10:])
    with pipeline(spark, tmp_path, oal=SMALL) as running:
        running.run_available()
        assert counted(running.store, "quarantined") == {
            ("Endpoint", "no time"): 10,
            ("Endpoint", "no latency"): 10,
        }
        assert differences(stored(running.store), expected_of(rows[10:])) == []


def test_text_that_is_no_utf8_does_not_stop_the_stream(spark: SparkSession, tmp_path: Path) -> None:
    """A writer's Latin-1 in names and labels: set aside or read, and the other rows are right."""
    rows = endpoint_events(20)
    bad = pa.array([b"caf\xe9"] * 5, pa.binary()).view(pa.string())
    table = to_table("Endpoint", rows[:5])
    for name in ("name", "serviceName", "type"):
        table = table.set_column(table.column_names.index(name), name, bad)
    write_table(tmp_path / "spool", "latin1", table)
    write_segment(tmp_path / "spool", "Endpoint", rows[5:])
    with pipeline(spark, tmp_path, oal=SMALL) as running:
        running.run_available()
        found = stored(running.store)
    wanted = expected_of(rows[5:])
    assert {key: found.get(key) for key in wanted} == wanted


def test_odd_text_goes_all_the_way(spark: SparkSession, tmp_path: Path) -> None:
    """Quotes, backslashes, control characters and emoji, in names and labels."""
    odd = ['"', "\\", "\n\t", "\x00", "\x7f", "'", "💳é", "a:1,b", "{}[]", "\u2028", "\\u0000"]
    row = endpoint_events(1)[0]
    rows = [
        {**row, "name": each, "rpcStatusCode": each, "latency": 7} for each in odd for _ in "ab"
    ]
    rows += [{**row, "rpcStatusCode": each} for each in odd]
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
        assert set(odd) - {"\x00"} <= {each.name for each in running.store.entities("endpoint")}


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
        assert [(each.number, each.stats.rows) for each in reports] == [
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
        assert len(quarantined_rows(running.quarantine)) == 2
        assert quarantined(running.quarantine) == {"garbage.parquet": "corrupt"}
        assert list(tmp_path.iterdir()) == [folder]


def test_a_segment_that_goes_away_before_its_batch_is_told(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Spark has planned a batch with it, and it is gone: counted as missing."""
    rows = endpoint_events(30)
    paths = [
        write_segment(tmp_path / "spool", "Endpoint", rows[number::3], str(number), number)
        for number in range(3)
    ]
    with pipeline(
        spark,
        tmp_path,
        oal=SMALL,
        settings=ONE_AT_A_TIME,
        on_batch=lambda report: paths[1].unlink(missing_ok=True),
    ) as running:
        assert len(running.run_available()) == 3
        assert differences(stored(running.store), expected_of(rows[0::3] + rows[2::3])) == []
        assert counted(running.store, "quarantined segment") == {("Endpoint", "missing"): 1}


def test_a_segment_that_goes_away_within_its_batch_is_told(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Removed after the look at it, before Spark reads it: missing, and the others come in."""
    rows = endpoint_events(30)
    for number in range(3):
        write_segment(tmp_path / "spool", "Endpoint", rows[number::3], str(number))

    def look(paths: Any) -> Any:
        seen = look_at(paths)
        (tmp_path / "spool" / "Endpoint" / "1.parquet").unlink()
        return seen

    monkeypatch.setattr("batchmill.spark._batch.look_at", look)
    with pipeline(spark, tmp_path, oal=SMALL) as running:
        running.run_available()
        assert quarantined(running.quarantine) == {"1.parquet": "missing"}
        assert counted(running.store, "quarantined segment") == {("Endpoint", "missing"): 1}
        assert differences(stored(running.store), expected_of(rows[0::3] + rows[2::3])) == []


# A store that cannot be written for a while.


def in_three(folder: Path) -> list[Row]:
    """Rows in three segments, one after the other."""
    rows = endpoint_events(60)
    for number in range(3):
        write_segment(folder / "spool", "Endpoint", rows[number::3], str(number), number)
    return rows


def test_a_postgresql_that_goes_away_is_waited_for(
    spark: SparkSession, tmp_path: Path, postgres: Postgres
) -> None:
    """It crashes in mid-run and comes back: the pipeline tries again, and every row is in once."""
    rows = in_three(tmp_path)
    waited: list[float] = []

    def crash(report: BatchReport) -> None:
        if report.number == 0:
            postgres.stop("immediate")

    def wait(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 4:
            postgres.start()

    with pipeline(
        spark,
        tmp_path,
        oal=SMALL,
        store=postgres.new_database(),
        settings=ONE_AT_A_TIME,
        retry=RetryPolicy(initial_ms=10, jitter=0),
        on_batch=crash,
    ) as running:
        assert isinstance(running.store, SqlStore)
        running.store.retrier.wait = wait
        reports = running.run_available()
        assert [each.applied for each in reports] == [True] * 3
        assert waited[:4] == [0.01, 0.02, 0.04, 0.08]
        assert differences(stored(running.store), expected_of(rows)) == []


def test_a_postgresql_that_stays_away_is_a_clear_error_and_no_batch_is_lost(
    spark: SparkSession, tmp_path: Path, postgres: Postgres
) -> None:
    """The run ends with what to do; the next one, with the server back, does the rest."""
    rows = in_three(tmp_path)
    url = postgres.new_database()

    def crash(report: BatchReport) -> None:
        postgres.stop("immediate")

    given: dict[str, Any] = {"oal": SMALL, "store": url, "settings": ONE_AT_A_TIME}
    retry = RetryPolicy(initial_ms=10, give_up_after_s=0.2)
    with (
        pipeline(spark, tmp_path, **given, retry=retry, on_batch=crash) as running,
        pytest.raises(StoreUnavailableError, match="Check that the database runs") as caught,
    ):
        running.run_available()
    assert caught.value.attempts > 1
    postgres.start()
    with pipeline(spark, tmp_path, **given) as running:
        reports = running.run_available()
        assert [each.applied for each in reports][-2:] == [True, True]
        assert differences(stored(running.store), expected_of(rows)) == []


def test_text_that_postgresql_cannot_hold_does_not_stop_the_stream(
    spark: SparkSession, tmp_path: Path, postgres_url: str
) -> None:
    """A null character in a name, a label and a statement; the other rows are right."""
    rows = endpoint_events(10)
    bad = {**rows[0], "name": "a\x00b", "type": "c\x00d", "serviceName": "\x00"}
    write_segment(tmp_path / "spool", "Endpoint", [*rows, bad])
    span = random_spans(1, 1, start=START, days=1)[0]
    attributes = {"db.system": "mysql", "db.statement": "select '\x00'"}
    ended = span["time"] + timedelta(seconds=9)
    slow = {**span, "kind": "CLIENT", "attributes": attributes, "end_time": ended}
    write_segment(tmp_path / "spool", "Span", [slow])
    oal = SMALL + "db = from(DatabaseAccess.*).cpm();"
    with pipeline(spark, tmp_path, oal=oal, store=postgres_url) as running:
        running.run_available()
        found = stored(running.store)
    wanted = expected_of(rows)
    assert {key: found.get(key) for key in wanted} == wanted


def test_a_full_disk_is_a_clear_error_and_no_batch_is_lost(
    spark: SparkSession, tmp_path: Path
) -> None:
    """No room in the store: the run ends with what to do, the same pipeline goes on after it."""
    rows = endpoint_events(600, days=4)
    for number, part in enumerate((rows[:20], rows[20:])):
        write_segment(tmp_path / "spool", "Endpoint", part, str(number), number)

    def fill(report: BatchReport) -> None:
        assert isinstance(running.store, SqliteStore)
        ((pages,),) = running.store._writer.execute("PRAGMA page_count")
        running.store._writer.execute(f"PRAGMA max_page_count = {pages}")

    with pipeline(spark, tmp_path, oal=SMALL, settings=ONE_AT_A_TIME, on_batch=fill) as running:
        with pytest.raises(StoreFullError, match="make room"):
            running.run_available()
        before: Stored = stored(running.store)
        assert differences(before, expected_of(rows[:20])) == []
        assert isinstance(running.store, SqliteStore)
        running.store._writer.execute("PRAGMA max_page_count = 1000000")
        running.on_batch = None
        assert [each.number for each in running.run_available()] == [1]
        assert differences(stored(running.store), expected_of(rows)) == []
