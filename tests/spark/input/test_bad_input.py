"""Bad input is quarantined with its reason and counted, and the stream continues."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from batchmill.spark import Pipeline, PipelineError
from tests.kit.pipelines import (
    NOW,
    ONE_AT_A_TIME,
    SMALL,
    START,
    counted,
    differences,
    endpoint_events,
    expected,
    expected_of,
    local,
    pipeline,
    quarantined,
    quarantined_rows,
    stored,
    with_column,
    write_deltas,
    write_segment,
    write_table,
)
from tests.oracle.catalog import Row
from tests.oracle.generate import random_spans, to_table

CPU = "cpu = from(ServiceInstanceJVMCPU.usePercent).doubleAvg();"


def overwrite_page(path: Path, column: str) -> None:
    """Spoil the data of a column; the footer stays whole."""
    metadata = pq.read_metadata(path)
    group = metadata.row_group(0)
    chunk = next(
        group.column(number)
        for number in range(group.num_columns)
        if group.column(number).path_in_schema == column
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
    (spool / "Endpoint" / "empty.parquet").write_bytes(b"")  # its writer died at once
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
    assert running.spool is not None
    assert running.quarantine == running.spool.with_name("spool-quarantine")
    assert quarantined(local(running.quarantine)) == {
        "garbage.parquet": "corrupt",
        "empty.parquet": "corrupt",
        "truncated.parquet": "corrupt",
        "page.parquet": "corrupt",
        "text.parquet": "wrong type",
        "number.parquet": "wrong type",
        "misplaced.parquet": "unknown source",
    }
    for name in ("Endpoint/garbage.parquet", "Endpoint/page.parquet", "Endpiont/misplaced.parquet"):
        kept = (running.quarantine / name).read_bytes()
        assert kept == (running.spool / name).read_bytes()
    why = (local(running.quarantine) / "Endpoint" / "text.parquet.reason").read_text("utf-8")
    assert "latency" in why
    assert "string" in why


def test_bad_segments_are_counted(spoiled: tuple[Pipeline, list[Row]]) -> None:
    """By reason; with their rows, where the footer still tells."""
    running, rows = spoiled
    assert counted(running.store, "quarantined segment") == {
        ("Endpoint", "corrupt"): 4,
        ("Endpoint", "wrong type"): 2,
        ("Endpiont", "unknown source"): 1,
    }
    assert counted(running.store, "quarantined") == {
        ("Endpoint", "wrong type"): 12,
        ("Endpiont", "unknown source"): 9,
    }
    assert counted(running.store, "rows") == {("Endpoint", ""): len(rows)}


@pytest.fixture(scope="module")
def misfits(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Pipeline, dict[str, list[Row]]]]:
    """A run whose segments have rows that fit and rows that do not; the former are returned."""
    folder = tmp_path_factory.mktemp("misfits")
    spool, rows = folder / "spool", endpoint_events(30)
    now = datetime.fromtimestamp(NOW, UTC)
    limit = now + timedelta(hours=1)
    times = [row["time"] for row in rows[:20]]
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
        {"time": START, "id": "aWQ=.1_A", "name": "n", "usePercent": percent}
        for percent in (1.5, float("nan"), float("inf"), -float("inf"), 2.0**62, 3.25)
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
    """Accepted and quarantined rows add up to all that arrived."""
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
    rows = quarantined_rows(local(running.quarantine))
    assert len(rows) == 11
    assert sum(row["_reason"] == "no time" for row in rows) == 2
    (ahead,) = [row for row in rows if row["_reason"] == "time too far ahead"]
    assert ahead["time"] == datetime.fromtimestamp(NOW, UTC) + timedelta(hours=1, microseconds=1)
    assert ahead["serviceName"] == endpoint_events(30)[5]["serviceName"]


def test_rows_can_come_back_from_the_quarantine(spark: SparkSession, tmp_path: Path) -> None:
    """What was too far ahead fits once its time has come: its file goes back into the spool."""
    rows = endpoint_events(10)
    write_segment(tmp_path / "spool", "Endpoint", rows)
    before = min(row["time"] for row in rows) - timedelta(days=1)
    now = [before.timestamp()]
    with pipeline(spark, tmp_path, oal=SMALL, clock=lambda: now[0]) as running:
        running.run_available()
        assert counted(running.store, "quarantined") == {("Endpoint", "time too far ahead"): 10}
        (file,) = local(running.quarantine).glob("Endpoint/rows-*/*.parquet")
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


def test_a_row_is_either_counted_or_set_aside(spark: SparkSession, tmp_path: Path) -> None:
    """A column that no metric reads may be of any type, also when a row is quarantined; and what is
    odd in it does not quarantine a row that is counted."""
    good = []
    for seed, codes in enumerate(
        (
            pa.array(["200"] * 10, pa.string()),
            pa.array([200, 2**40, *([404] * 8)], pa.int64()),
        )
    ):
        rows = endpoint_events(10, seed)
        table = with_column(rows, "httpResponseStatusCode", codes.to_pylist(), codes.type)
        times = [None, *(row["time"] for row in rows[1:])]
        table = table.set_column(0, "time", pa.array(times, pa.timestamp("us", tz="UTC")))
        write_table(tmp_path / "spool", f"odd-{seed}", table)
        good += rows[1:]
    with pipeline(spark, tmp_path, oal=SMALL) as running:
        running.run_available()
        assert counted(running.store, "quarantined") == {("Endpoint", "no time"): 2}
        assert counted(running.store, "rows") == {("Endpoint", ""): 18}
        assert differences(stored(running.store), expected_of(good)) == []


def test_a_segment_that_goes_away_before_its_batch_is_reported(
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


def test_a_fault_that_is_not_the_files_quarantines_nothing(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The run ends with an error that says what to do; once the fault is gone, all is read."""
    rows = endpoint_events(40)
    spool = tmp_path / "spool"
    write_segment(spool, "Endpoint", rows[:20], "good")
    garbage = spool / "Endpoint" / "garbage.parquet"
    garbage.write_bytes(b"PAR1")
    # A socket: it is there and cannot be opened, which the system says of no Parquet file.
    faulty = spool / "Endpoint" / "faulty.parquet"
    os.mknod(faulty, stat.S_IFSOCK | 0o644)
    with pipeline(spark, tmp_path, oal=SMALL) as running:
        with pytest.raises(
            PipelineError,
            match=r"faulty\.parquet cannot be read now .*No such device.* look after the disk.*, "
            "then start again; nothing of the batch was committed",
        ):
            running.run_available()
        assert quarantined(local(running.quarantine)) == {}
        assert running.store.counters() == {}
        faulty.unlink()
        write_segment(spool, "Endpoint", rows[20:], "faulty")
        running.run_available()
        assert differences(stored(running.store), expected_of(rows)) == []
        assert quarantined(local(running.quarantine)) == {"garbage.parquet": "corrupt"}


def test_a_batch_that_is_run_again_quarantines_the_same(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Its files have the same names and rows as before, and there are no others."""
    rows = endpoint_events(60)
    spool, ahead = tmp_path / "spool", datetime.fromtimestamp(NOW, UTC) + timedelta(hours=2)
    for number in range(3):
        some = rows[number::3]
        some[0] = {**some[0], "latency": None}
        some[1] = {**some[1], "time": ahead}
        write_segment(spool, "Endpoint", some, f"rows-{number}")
        write_deltas(spool, "Endpoint", [rows[0], some[1]], SMALL, f"deltas-{number}")
    (spool / "Endpoint" / "garbage.parquet").write_bytes(b"PAR1")
    contents = []
    for _ in range(2):
        with pipeline(spark, tmp_path, oal=SMALL) as running:
            running.run_available()
            assert sum(counted(running.store, "quarantined").values()) == 9
            contents.append(in_quarantine(local(running.quarantine)))
        shutil.rmtree(tmp_path / "checkpoint")
        for file in tmp_path.glob("metrics.db*"):
            file.unlink()
    assert contents[0] == contents[1]
    assert contents[0][0] == [
        "Endpoint/deltas-main-0.parquet",
        "Endpoint/garbage.parquet",
        "Endpoint/garbage.parquet.reason",
        *(f"Endpoint/rows-main-0/{task}.parquet" for task in range(2)),
    ]
    assert len(quarantined_rows(local(running.quarantine))) == 6


def in_quarantine(folder: Path) -> tuple[list[str], list[str], bytes]:
    """The names of all files, the rows and deltas in them, and the segment that is garbage.

    In which order a batch reads its segments is not settled, so rows are sorted.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    tables = [
        pq.read_table(path, partitioning=None)
        for path in files
        if path.suffix == ".parquet" and path.stem != "garbage"
    ]
    rows = sorted(repr(row) for table in tables for row in table.to_pylist())
    names = [str(path.relative_to(folder)) for path in files]
    return names, rows, (folder / "Endpoint" / "garbage.parquet").read_bytes()
