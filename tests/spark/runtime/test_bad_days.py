"""A store that is away, refuses or is full: waited for, or a clear error; no batch is lost."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from batchmill.spark import BatchReport
from batchmill.store import RetryPolicy, Store, StoreFullError, StoreUnavailableError
from tests.kit.pipelines import (
    ONE_AT_A_TIME,
    SMALL,
    START,
    Stored,
    differences,
    endpoint_events,
    expected_of,
    pipeline,
    stored,
    write_segment,
)
from tests.kit.servers.postgres import Postgres
from tests.kit.stores import HASTY
from tests.oracle.catalog import Row
from tests.oracle.generate import random_spans

# A store that cannot be written for a while.


def in_two(folder: Path) -> list[Row]:
    """Rows in two segments, one after the other."""
    rows = endpoint_events(60)
    for number in range(2):
        write_segment(folder / "spool", "Endpoint", rows[number::2], str(number), number)
    return rows


def test_a_postgresql_that_goes_away_is_waited_for(
    spark: SparkSession, tmp_path: Path, postgres: Postgres
) -> None:
    """It crashes in mid-run and comes back: the pipeline tries again, and every row is in once."""
    rows = in_two(tmp_path)
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
        assert isinstance(running.store, Store)
        running.store.retrier.wait = wait
        reports = running.run_available()
        assert [report.applied for report in reports] == [True] * 2
        assert waited[:4] == [0.01, 0.02, 0.04, 0.08]
        assert differences(stored(running.store), expected_of(rows)) == []


def test_a_postgresql_that_stays_away_is_a_clear_error_and_no_batch_is_lost(
    spark: SparkSession, tmp_path: Path, postgres: Postgres
) -> None:
    """The run ends with what to do; the next one, with the server back, does the rest."""
    rows = in_two(tmp_path)
    url = postgres.new_database()

    def crash(report: BatchReport) -> None:
        postgres.stop("immediate")

    given: dict[str, Any] = {"oal": SMALL, "store": url, "settings": ONE_AT_A_TIME}
    with (
        pipeline(spark, tmp_path, **given, retry=HASTY, on_batch=crash) as running,
        pytest.raises(StoreUnavailableError, match="Check that the database runs") as caught,
    ):
        running.run_available()
    assert caught.value.attempts > 1
    postgres.start()
    with pipeline(spark, tmp_path, **given) as running:
        reports = running.run_available()
        assert [report.applied for report in reports][-1:] == [True]
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
        actual = stored(running.store)
    wanted = expected_of(rows)
    assert {key: actual.get(key) for key in wanted} == wanted


def test_a_full_disk_is_a_clear_error_and_no_batch_is_lost(
    spark: SparkSession, tmp_path: Path
) -> None:
    """No room in the store: the error says what to do, and the same pipeline continues."""
    rows = endpoint_events(600, days=4)
    for number, part in enumerate((rows[:20], rows[20:])):
        write_segment(tmp_path / "spool", "Endpoint", part, str(number), number)

    def fill(report: BatchReport) -> None:
        store: Any = running.store
        ((pages,),) = store._writer.execute("PRAGMA page_count")
        store._writer.execute(f"PRAGMA max_page_count = {pages}")

    with pipeline(spark, tmp_path, oal=SMALL, settings=ONE_AT_A_TIME, on_batch=fill) as running:
        with pytest.raises(StoreFullError, match="make room"):
            running.run_available()
        before: Stored = stored(running.store)
        assert differences(before, expected_of(rows[:20])) == []
        store: Any = running.store
        store._writer.execute("PRAGMA max_page_count = 1000000")
        running.on_batch = None
        assert [report.number for report in running.run_available()] == [1]
        assert differences(stored(running.store), expected_of(rows)) == []
