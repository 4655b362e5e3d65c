"""The hook on the rows of a batch: it gets what the metrics count, before the commit."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from batchmill.oal import core_script
from batchmill.sources import catalog
from batchmill.spark.batch.job import BatchJob
from batchmill.store import Store
from tests.kit.pipelines import (
    SMALL,
    START,
    counted,
    differences,
    endpoint_events,
    expected_of,
    pipeline,
    stored,
    write_segment,
)
from tests.kit.spark import in_order
from tests.kit.stores import Backend
from tests.oracle.generate import random_spans, to_table
from tests.oracle.spans import spans_to_events


class Rows:
    """A hook that keeps what it gets; it fails at first, if that is wanted."""

    def __init__(self, failures: int = 0) -> None:
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.calls: Counter[str] = Counter()
        self._failures = failures

    def __call__(self, source: str, rows: DataFrame) -> None:
        """Keep the rows."""
        self.calls[source] += 1
        self.rows.setdefault(source, []).extend(rows.toArrow().to_pylist())
        if self._failures:
            self._failures -= 1
            raise KeyError("no room")


def test_events_are_given_with_all_their_columns(spark: SparkSession, tmp_path: Path) -> None:
    """Those that no metric reads, too; only valid rows."""
    events = endpoint_events(40)
    bad = {**events[0], "latency": None}
    write_segment(tmp_path / "spool", "Endpoint", [*events, bad])
    hook = Rows()
    with pipeline(spark, tmp_path, oal=SMALL, on_rows=hook) as running:
        running.run_available()
        assert sum(counted(running.store, "quarantined").values()) == 1
    rows = hook.rows["Endpoint"]
    names = catalog().source("Endpoint").arrow_schema().names
    assert list(rows[0]) == names
    assert in_order(rows) == in_order(
        {name: row.get(name) for name in names} for row in to_table("Endpoint", events).to_pylist()
    )
    assert hook.calls == {"Endpoint": 1}


def test_spans_are_given_as_rows_of_event_types(spark: SparkSession, tmp_path: Path) -> None:
    """Those that the store has counted: delivered twice, given once; nothing is written twice."""
    spans = random_spans(5, 60, start=START)
    write_segment(tmp_path / "spool", "Span", spans)
    write_segment(tmp_path / "spool", "Span", spans[:20], "1")
    hook = Rows()
    oal = core_script().read_text("utf-8")  # it reads all event types that spans become
    with pipeline(spark, tmp_path, oal=oal, on_rows=hook, dedup_s=600) as running:
        running.run_available()
        running.settle(everything=True)
        assert counted(running.store, "rows")["Span", ""] == 60
    wanted = {source: len(rows) for source, rows in spans_to_events(spans).events.items() if rows}
    assert {source: len(rows) for source, rows in hook.rows.items()} == wanted
    assert {"Service", "EndpointRelation", "DatabaseAccess"} <= wanted.keys()


def test_a_batch_whose_hook_failed_comes_again(spark: SparkSession, tmp_path: Path) -> None:
    """With the same rows; nothing was committed before."""
    events = endpoint_events(30)
    write_segment(tmp_path / "spool", "Endpoint", events)
    hook = Rows(failures=1)
    with pipeline(spark, tmp_path, oal=SMALL, on_rows=hook) as running:
        with pytest.raises(KeyError, match="no room"):
            running.run_available()
        assert counted(running.store, "rows") == {}
    with pipeline(spark, tmp_path, oal=SMALL, on_rows=hook) as running:
        running.run_available()
        assert counted(running.store, "rows") == {("Endpoint", ""): 30}
    assert hook.calls == {"Endpoint": 2}
    first, second = hook.rows["Endpoint"][:30], hook.rows["Endpoint"][30:]
    assert in_order(first) == in_order(second)


class Killed(BaseException):
    """What a test raises where a process would end without a word."""


@pytest.mark.parametrize(
    ("owner", "name"), [(BatchJob, "run"), (Store, "commit")], ids=["before-the-job", "at-the-end"]
)
def test_a_batch_that_died_after_its_hook_comes_again(
    spark: SparkSession,
    tmp_path: Path,
    backend: Backend,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
) -> None:
    """With the same rows, which count once; also if tasks had committed them to PostgreSQL."""
    events = endpoint_events(30)
    write_segment(tmp_path / "spool", "Endpoint", events)
    hook = Rows()

    def die(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, die)
        with pipeline(spark, tmp_path, oal=SMALL, on_rows=hook, store=backend.url) as running:
            with pytest.raises(Killed):
                running.run_available()
            assert counted(running.store, "rows") == {}
    with pipeline(spark, tmp_path, oal=SMALL, on_rows=hook, store=backend.url) as running:
        running.run_available()
        assert counted(running.store, "rows") == {("Endpoint", ""): 30}
        assert differences(stored(running.store), expected_of(events)) == []
    assert hook.calls == {"Endpoint": 2}
    first, second = hook.rows["Endpoint"][:30], hook.rows["Endpoint"][30:]
    assert in_order(first) == in_order(second)
