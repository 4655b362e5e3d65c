"""A pipeline that is asked to stop: after the batch that runs, from any thread, and no later."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from batchmill.errors import ConfigError
from batchmill.spark import BatchReport, PipelineError, PipelineSettings
from batchmill.store import Batch, CommitResult, FencedError, StoreUnavailableError
from tests.kit.pipelines import (
    NOW,
    ONE_AT_A_TIME,
    SMALL,
    START,
    counted,
    deal,
    differences,
    endpoint_events,
    expected,
    expected_of,
    pipeline,
    sqlite,
    stored,
    write_segment,
)
from tests.kit.threads import PATIENCE_S, until
from tests.oracle.generate import random_spans
from tests.oracle.spans import spans_to_events

ROWS = endpoint_events(60)
SEGMENTS = 4
SPANS_OAL = "rel = from(ServiceRelation.latency).percentile2(10); c = from(Service.*).count();"


def backlog(folder: Path) -> None:
    """Four segments, to be a batch each."""
    for number in range(SEGMENTS):
        write_segment(folder, "Endpoint", ROWS[number::SEGMENTS], str(number), number)


def rows_until(number: int) -> list[Any]:
    """The rows of the batches up to that one."""
    return [row for segment in range(number + 1) for row in ROWS[segment::SEGMENTS]]


def numbers(reports: list[BatchReport]) -> list[int]:
    """The batches that got in."""
    return [report.number for report in reports if report.applied]


def goes_on_exactly(spark: SparkSession, folder: Path, first: int) -> None:
    """A new pipeline takes the rest, and the store is that of one undisturbed run."""
    with pipeline(spark, folder, oal=SMALL, settings=ONE_AT_A_TIME) as running:
        assert numbers(running.run_available()) == list(range(first, SEGMENTS))
        assert differences(stored(running.store), expected_of(ROWS)) == []


def test_stop_from_the_callback_ends_after_that_batch(spark: SparkSession, tmp_path: Path) -> None:
    """It returns at once there; the stream ends and frees everything; the next one continues."""
    backlog(tmp_path / "spool")

    def stop(report: BatchReport) -> None:
        if report.number == 0:
            running.stop()

    running = pipeline(spark, tmp_path, oal=SMALL, settings=ONE_AT_A_TIME, on_batch=stop)
    running.start(0.1)
    assert running.await_end(PATIENCE_S)
    running.stop()  # waits for the rest
    with pytest.raises(PipelineError, match="make a new one"):
        running.run_available()
    goes_on_exactly(spark, tmp_path, first=1)


@pytest.mark.parametrize("way", ["start", "run_available"])
def test_a_backlog_is_not_worked_off_before_the_end(
    spark: SparkSession, tmp_path: Path, way: str
) -> None:
    """Stopped during batch 1 of 4: that one is committed, and no more; a restart goes on."""
    backlog(tmp_path / "spool")
    inside = threading.Event()
    go_on = threading.Event()

    def hold(report: BatchReport) -> None:
        if report.number == 1:
            inside.set()
            assert go_on.wait(PATIENCE_S)

    running = pipeline(spark, tmp_path, oal=SMALL, settings=ONE_AT_A_TIME, on_batch=hold)
    working = threading.Thread(target=running.run_available)
    if way == "start":
        running.start(0.0)
    else:
        working.start()
    assert inside.wait(PATIENCE_S)
    stopping = threading.Thread(target=running.stop)
    stopping.start()
    until(lambda: running._stop_requested, "it was asked")
    go_on.set()
    stopping.join(PATIENCE_S)
    assert not stopping.is_alive()
    if way == "run_available":
        working.join(PATIENCE_S)
        assert running.cut_short
    assert differences(stored(sqlite(tmp_path)), expected_of(rows_until(1))) == []
    goes_on_exactly(spark, tmp_path, first=2)


def test_a_backfill_ends_with_its_pipeline(spark: SparkSession, tmp_path: Path) -> None:
    """Stop lets a backfill in another thread finish its batch, before the store is closed."""
    backlog(tmp_path / "old")
    stops: list[threading.Thread] = []

    def stop(report: BatchReport) -> None:
        if report.number == 1:
            stops.append(threading.Thread(target=running.stop))
            stops[0].start()
            until(lambda: running._stop_requested, "it was asked")

    with pipeline(spark, tmp_path, oal=SMALL, settings=ONE_AT_A_TIME) as running:
        assert numbers(running.backfill(tmp_path / "old", on_batch=stop)) == [0, 1]
        assert running.cut_short
        stops[0].join(PATIENCE_S)
    with pipeline(spark, tmp_path, oal=SMALL, settings=ONE_AT_A_TIME) as running:
        assert running.backfilled(tmp_path / "old") == 2
        assert numbers(running.backfill(tmp_path / "old")) == [2, 3]
        assert not running.cut_short
        assert running.backfilled(tmp_path / "old") == SEGMENTS
        assert differences(stored(running.store), expected_of(ROWS)) == []


def test_an_idle_stream_ends_when_it_is_stop_requested(spark: SparkSession, tmp_path: Path) -> None:
    """Whoever waits for it gets on, though no batch comes."""
    with pipeline(spark, tmp_path, oal=SMALL) as running:
        running.start("1 hour")
        assert running.await_end(0) is False
        running.ask_to_stop()
        assert running.await_end(PATIENCE_S) is True


def test_a_callback_cannot_wait_for_its_own_stream(spark: SparkSession, tmp_path: Path) -> None:
    """An error, not a wait for ever."""
    write_segment(tmp_path / "spool", "Endpoint", ROWS)

    def wait(report: BatchReport) -> None:
        running.await_end()

    with (
        pipeline(spark, tmp_path, oal=SMALL, on_batch=wait) as running,
        pytest.raises(PipelineError, match="its own stream"),
    ):
        running.run_available()


@pytest.mark.parametrize(
    "trigger", [-1, float("nan"), True, 1e9, "nonsense", "-1 seconds", "1 month"]
)
def test_a_trigger_that_is_none_is_refused(
    spark: SparkSession, tmp_path: Path, trigger: float | str
) -> None:
    """Before anything is claimed: it can be started properly afterwards."""
    with pipeline(spark, tmp_path, oal=SMALL) as running:
        with pytest.raises(ConfigError, match="10 seconds"):
            running.start(trigger)
        assert running.store.streams() == []


def test_a_running_stream_lets_go_of_spans_in_time(spark: SparkSession, tmp_path: Path) -> None:
    """No batch comes any more; spans without a partner are settled when their wait is over."""
    spans = random_spans(8, 60, start=START, days=1)
    deal({"Span": spans}, tmp_path / "spool", 2)
    now = [NOW]
    batches = threading.Semaphore(0)
    settings = PipelineSettings(ttl_days=365, span_wait_s=0.4, max_batch_files=1)
    with pipeline(
        spark,
        tmp_path,
        oal=SPANS_OAL,
        settings=settings,
        clock=lambda: now[0],
        on_batch=lambda report: batches.release(),
    ) as running:
        running.start(0.1)
        for _ in range(2):
            assert batches.acquire(timeout=PATIENCE_S)
        wanted = expected(spans_to_events(spans).events, SPANS_OAL)
        assert differences(stored(running.store), wanted) != []
        now[0] += 1
        until(lambda: not differences(stored(running.store), wanted), "spans were let go of")
        unresolved = spans_to_events(spans).counters["unresolved"]
        assert sum(counted(running.store, "unresolved").values()) == unresolved > 0


class LostAnswers:
    """Lets a commit get in, and says that it did not."""

    def __init__(self, commit: Callable[[Batch], CommitResult]) -> None:
        self._commit = commit
        self.lost = 0

    def __call__(self, batch: Batch) -> CommitResult:
        result = self._commit(batch)
        if batch.number and not self.lost:
            self.lost += 1
            raise StoreUnavailableError("sqlite:", 1, 0.0, "the answer was lost")
        return result


def test_spans_are_let_go_of_once_when_the_answer_is_lost(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit got in, its answer did not come: the next try asks the store first."""
    spans = random_spans(5, 60, start=START, days=1)
    deal({"Span": spans}, tmp_path / "spool", 1)
    batches = threading.Semaphore(0)
    with pipeline(
        spark, tmp_path, oal=SPANS_OAL, on_batch=lambda report: batches.release()
    ) as running:
        commit = LostAnswers(running.store.commit)
        monkeypatch.setattr(running.store, "commit", commit)
        running.start(0.1)
        assert batches.acquire(timeout=PATIENCE_S)
        with pytest.raises(StoreUnavailableError):
            running.settle(everything=True)
        assert commit.lost == 1
        assert running.settle(everything=True) is None
        wanted = expected(spans_to_events(spans).events, SPANS_OAL)
        assert differences(stored(running.store), wanted) == []


def test_a_fenced_writer_does_not_take_the_stream_back(spark: SparkSession, tmp_path: Path) -> None:
    """After the first refusal it is refused for good, while the newer writer goes on."""
    spans = random_spans(5, 60, start=START, days=1)
    deal({"Span": spans}, tmp_path / "spool", 1)
    batches = threading.Semaphore(0)
    with pipeline(
        spark, tmp_path, oal=SPANS_OAL, on_batch=lambda report: batches.release()
    ) as running:
        running.start(0.1)
        assert batches.acquire(timeout=PATIENCE_S)
        (info,) = running.store.streams()
        running.store.claim("main", info.checkpoint_id, fresh=False, committed=0)
        for _ in range(2):
            with pytest.raises(FencedError):
                running.settle(everything=True)
        assert running.store.streams()[0].epoch == info.epoch + 1


def test_two_first_starts_agree_on_the_checkpoint(tmp_path: Path) -> None:
    """Two processes that make one checkpoint at the same moment both find the first one's id."""
    from batchmill.spark.runtime.checkpoint import open_checkpoint

    together = threading.Barrier(8)
    ids: list[str] = []

    def make() -> None:
        together.wait(PATIENCE_S)
        ids.append(open_checkpoint(tmp_path / "checkpoint", "main", "store").id)

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(ids) == 8
    assert len(set(ids)) == 1
    assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == ["batchmill.json"]
