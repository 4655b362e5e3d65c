"""A stream that breaks off at any step of a batch: the next run continues, and counts once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from batchmill.spark import PipelineSettings
from batchmill.spark.batch.maker import BatchMaker, Work
from batchmill.spark.input.books import Books
from batchmill.spark.input.spool import SegmentRemover, SpoolInput
from batchmill.store import Store
from tests.kit.pipelines import (
    NOW,
    SMALL,
    START,
    counted,
    deal,
    differences,
    endpoint_events,
    expected,
    expected_of,
    pipeline,
    stored,
    write_segment,
)
from tests.oracle.generate import random_spans
from tests.oracle.spans import spans_to_events

ROWS = endpoint_events(60)
TWO_AT_A_TIME = PipelineSettings(ttl_days=365, max_batch_files=2)


class Crash(BaseException):
    """The end of a process."""


def crash_in(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *, after: bool, nth: int
) -> None:
    """The ``nth`` call of a method does not return, or is not even begun."""
    method = getattr(owner, name)
    calls = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls < nth:
            return method(*args, **kwargs)
        if calls == nth and after:
            method(*args, **kwargs)
        raise Crash(f"{'after' if after else 'before'} {name}")

    monkeypatch.setattr(owner, name, wrapped)


def fill(folder: Path, first: int, end: int) -> None:
    """Segments of the spool."""
    for number in range(first, end):
        write_segment(folder / "spool", "Endpoint", ROWS[number::6], str(number), number)


@pytest.mark.parametrize(
    ("owner", "name", "after"),
    [
        (SpoolInput, "choose", True),
        (Books, "begin", False),
        (Books, "begin", True),
        (BatchMaker, "make", True),
        (Store, "commit", True),
        (Books, "finish", False),
        (Books, "finish", True),
        (SegmentRemover, "_removed", False),
        (SegmentRemover, "_removed", True),
        (Books, "forget", False),
    ],
)
def test_a_run_that_breaks_off_is_continued(
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    after: bool,
) -> None:
    """In the first batch, and the next run in a later one: rows count once, the spool is empty in
    the end.

    A batch that was planned is made of the same segments with the same clock, though there are more
    of them by then, older ones too.
    """
    made: dict[int, list[tuple[list[str], float]]] = {}
    make = BatchMaker.make

    def note(maker: BatchMaker, work: Work) -> Any:
        made.setdefault(work.number, []).append((list(work.paths), work.now))
        return make(maker, work)

    monkeypatch.setattr(BatchMaker, "make", note)
    given: dict[str, Any] = {"oal": SMALL, "settings": TWO_AT_A_TIME, "remove_read": True}
    fill(tmp_path, 2, 6)
    for nth, clock in ((1, NOW), (2, NOW + 60)):
        with monkeypatch.context() as patch:
            crash_in(patch, owner, name, after=after, nth=nth)
            with (
                pytest.raises(Crash, match=name),
                pipeline(spark, tmp_path, **given, clock=lambda now=clock: now) as running,
            ):
                running.run_available()
        if nth == 1:
            fill(tmp_path, 0, 2)
    with pipeline(spark, tmp_path, **given, clock=lambda: NOW + 120) as running:
        running.run_available()
        assert differences(stored(running.store), expected_of(ROWS)) == []
        assert counted(running.store, "rows") == {("Endpoint", ""): 60}
        assert counted(running.store, "quarantined segment") == {}
    assert list((tmp_path / "spool").rglob("*.parquet")) == []
    for attempts in made.values():
        assert attempts == attempts[:1] * len(attempts)
    if (owner, name, after) in ((Books, "begin", True), (BatchMaker, "make", True)):
        assert made[0][0][1] == NOW
        # A plan that is only begun is made by the next run, of a later batch.
        assert made[1 if name == "make" else 2][0][1] == NOW + 60


def test_a_batch_is_repeated_with_its_own_parts(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was planned in a session with more cores."""
    oal = "rel = from(ServiceRelation.latency).percentile2(10); c = from(Service.*).count();"
    spans = random_spans(5, 90, start=START, days=1)
    deal({"Span": spans}, tmp_path / "spool", 3)
    settings = PipelineSettings(ttl_days=365, max_batch_files=1)
    parts: list[int] = []
    job_of = BatchMaker._job_of

    def note(maker: BatchMaker, number: int) -> Any:
        parts.append(number)
        return job_of(maker, number)

    monkeypatch.setattr(BatchMaker, "_job_of", note)
    with monkeypatch.context() as patch:
        patch.setattr("batchmill.spark.batch.maker.parts_for", lambda session: 24)
        crash_in(patch, Store, "commit", after=False, nth=2)
        with (
            pytest.raises(Crash),
            pipeline(spark, tmp_path, oal=oal, settings=settings, dedup_s=600) as running,
        ):
            running.run_available()
    with pipeline(spark, tmp_path, oal=oal, settings=settings, dedup_s=600) as running:
        assert [report.number for report in running.run_available()] == [1, 2]
        running.settle(everything=True)
        wanted = expected(spans_to_events(spans).events, oal)
        assert differences(stored(running.store), wanted) == []
    own = parts[1]
    assert parts == [24, own, 24, own]  # of each writer, and of the batch that is repeated
