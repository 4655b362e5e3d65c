"""Exactly once: replays, restarts, and checkpoints that do not belong to the store."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from batchmill.errors import ConfigError
from batchmill.spark import BatchReport, PipelineError
from batchmill.store import (
    CheckpointMismatchError,
    FencedError,
    StoreInUseError,
    open_store,
)
from tests.kit.pipelines import (
    ONE_AT_A_TIME,
    SMALL,
    START,
    contents,
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
from tests.kit.processes import Life
from tests.kit.threads import PATIENCE_S, spawn
from tests.oracle.generate import random_spans
from tests.oracle.spans import spans_to_events
from tests.spark.kit import forget_commit

ROWS = endpoint_events(60)

HOLD = """
from batchmill.store import open_store
with open_store(url) as store:
    store.claim("main", checkpoint, fresh=False, committed=int(committed))
    print("claimed", flush=True)
    sys.stdin.readline()
"""


def run(spark: SparkSession, folder: Path, *numbers: int) -> list[BatchReport]:
    """Write segments of those numbers, a batch each, and run what is there."""
    for number in numbers:
        write_segment(folder / "spool", "Endpoint", ROWS[number::3], str(number), number)
    with pipeline(spark, folder, oal=SMALL, settings=ONE_AT_A_TIME) as running:
        return running.run_available()


def remove_store(folder: Path) -> None:
    """Delete the database with all its files."""
    for path in folder.glob("metrics.db*"):
        path.unlink()


def copy_store(folder: Path, target: Path) -> None:
    """Copy the database with all its files."""
    target.mkdir()
    for path in folder.glob("metrics.db*"):
        shutil.copy2(path, target)


def test_a_replayed_batch_changes_nothing(spark: SparkSession, tmp_path: Path) -> None:
    """A batch that was not marked as done is repeated: the store recognises its number.

    A restart reads nothing again; a run without news commits nothing.
    """
    run(spark, tmp_path, 0, 1)
    with open_store(sqlite(tmp_path)) as store:
        before = contents(store), store.counters()
    forget_commit(tmp_path / "checkpoint")
    (again,) = run(spark, tmp_path)
    assert (again.number, again.applied, again.given) == (1, False, 0)
    with open_store(sqlite(tmp_path)) as store:
        assert (contents(store), store.counters()) == before
    (next_one,) = run(spark, tmp_path, 2)
    assert (next_one.number, next_one.applied) == (2, True)
    assert run(spark, tmp_path) == []
    assert differences(stored(sqlite(tmp_path)), expected_of(ROWS)) == []


def test_a_replayed_batch_of_spans_changes_nothing(spark: SparkSession, tmp_path: Path) -> None:
    """Nor are spans that wait lost or doubled by a replay, nor TopN records."""
    spans = random_spans(5, 90, start=START, days=1)
    deal({"Span": spans}, tmp_path / "spool", 2)
    oal = "rel = from(ServiceRelation.latency).percentile2(10); c = from(Service.*).count();"
    with pipeline(spark, tmp_path, oal=oal, settings=ONE_AT_A_TIME) as running:
        running.run_available()
        before = running.store.counters()
    forget_commit(tmp_path / "checkpoint")
    with pipeline(spark, tmp_path, oal=oal) as running:
        (again,) = running.run_available()
        assert not again.applied
        assert running.store.counters() == before
        running.settle(everything=True)
        actual = stored(running.store)
    assert differences(actual, expected(spans_to_events(spans).events, oal)) == []


def test_a_batch_that_failed_before_its_commit_is_run_again(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault between Spark's job and the commit: the same rows come in the next run, once."""
    for number in range(3):
        write_segment(tmp_path / "spool", "Endpoint", ROWS[number::3], str(number), number)
    with pipeline(spark, tmp_path, oal=SMALL, settings=ONE_AT_A_TIME) as running:
        commit = running.store.commit

        def fail(batch):  # type: ignore[no-untyped-def]
            if batch.number == 1:
                raise ArithmeticError("pulled the plug")
            return commit(batch)

        monkeypatch.setattr(running.store, "commit", fail)
        with pytest.raises(ArithmeticError, match="pulled the plug"):
            running.run_available()
        monkeypatch.undo()
        assert [report.number for report in running.run_available()] == [1, 2]
        assert differences(stored(running.store), expected_of(ROWS)) == []


def deleted_checkpoint(folder: Path) -> None:
    """Only the store is left."""
    shutil.rmtree(folder / "checkpoint")


def deleted_store(folder: Path) -> None:
    """Only the checkpoint is left."""
    remove_store(folder)


def older_checkpoint(folder: Path) -> None:
    """The copy from after the first batch."""
    shutil.rmtree(folder / "checkpoint")
    shutil.copytree(folder / "checkpoint-then", folder / "checkpoint")


def checkpoint_one_batch_old(folder: Path) -> None:
    """The copy from after the second batch: the third one is not planned there."""
    shutil.rmtree(folder / "checkpoint")
    shutil.copytree(folder / "checkpoint-before", folder / "checkpoint")


def without_books(folder: Path) -> None:
    """The store's copy from after the first batch, and the books are gone."""
    older_store(folder)
    (folder / "checkpoint" / "books.jsonl").unlink()


def older_store(folder: Path) -> None:
    """The copy from after the first batch."""
    remove_store(folder)
    for path in (folder / "store-then").iterdir():
        shutil.copy2(path, folder)


def other_store(folder: Path) -> None:
    """One that another pipeline has written, with a checkpoint of its own."""
    remove_store(folder)
    for path in (folder / "other").glob("metrics.db*"):
        shutil.copy2(path, folder)


@pytest.fixture(scope="module")
def after_three(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder after three batches, with copies of its parts from after the first."""
    folder = tmp_path_factory.mktemp("after")
    run(spark, folder, 0)
    shutil.copytree(folder / "checkpoint", folder / "checkpoint-then")
    copy_store(folder, folder / "store-then")
    run(spark, folder, 1)
    shutil.copytree(folder / "checkpoint", folder / "checkpoint-before")
    run(spark, folder, 2)
    run(spark, folder / "other", 0)
    return folder


@pytest.mark.parametrize(
    ("change", "reason", "advice"),
    [
        (deleted_checkpoint, "other", "run with that checkpoint; or use a new store"),
        (deleted_store, "unknown", "use the store that was written with this checkpoint"),
        (other_store, "other", "run with that checkpoint"),
        (older_checkpoint, "ahead", "restore the store's copy of the same time"),
        (checkpoint_one_batch_old, "unplanned", "restore the store's copy of the same time"),
        (without_books, "unplanned", "restore the store's copy of the same time"),
        (older_store, "behind", "restore the checkpoint's copy of the same time"),
    ],
)
def test_a_checkpoint_that_is_not_the_stores_is_refused(
    spark: SparkSession,
    tmp_path: Path,
    after_three: Path,
    change: Callable[[Path], None],
    reason: str,
    advice: str,
) -> None:
    """Either was deleted, swapped or restored: an error that says what to do, and no change."""
    folder = tmp_path / "copy"
    shutil.copytree(after_three, folder)
    change(folder)
    before = stored(sqlite(folder))
    with (
        pipeline(spark, folder, oal=SMALL) as running,
        pytest.raises(CheckpointMismatchError) as caught,
    ):
        running.run_available()
    assert caught.value.reason == reason
    assert advice in str(caught.value)
    assert stored(sqlite(folder)) == before


def test_a_checkpoint_and_a_store_of_the_same_time_go_on(
    spark: SparkSession, tmp_path: Path, after_three: Path
) -> None:
    """Both restored from copies of one moment: what came since is read again, and counts once."""
    folder = tmp_path / "copy"
    shutil.copytree(after_three, folder)
    spool = after_three / "spool"  # the books have segments by their path
    older_checkpoint(folder)
    older_store(folder)
    with pipeline(spark, folder, oal=SMALL, settings=ONE_AT_A_TIME, spool=spool) as running:
        assert [report.number for report in running.run_available()] == [1, 2]
        assert differences(stored(running.store), expected_of(ROWS)) == []


def test_a_checkpoint_without_its_file_is_refused(
    spark: SparkSession, tmp_path: Path, after_three: Path
) -> None:
    """Without it, it is not known which stream the checkpoint belongs to."""
    folder = tmp_path / "copy"
    shutil.copytree(after_three, folder)
    file = folder / "checkpoint" / "batchmill.json"
    facts = file.read_text("utf-8")
    file.unlink()
    with pipeline(spark, folder, oal=SMALL) as running:
        with pytest.raises(PipelineError, match="put the file back from a backup"):
            running.run_available()
        file.write_text("{", "utf-8")
        with pytest.raises(PipelineError, match="put it back from a backup"):
            running.run_available()
        file.write_text(facts, "utf-8")
    with (
        pipeline(spark, folder, oal=SMALL, name="second") as running,
        pytest.raises(PipelineError, match="a checkpoint folder of its own"),
    ):
        running.run_available()


def test_the_second_pipeline_is_refused_while_the_first_runs(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Two drivers on one store and checkpoint: an error names the one that runs."""
    with pipeline(spark, tmp_path, oal=SMALL) as first:
        first.start(0.2)
        with pipeline(spark, tmp_path, oal=SMALL) as second:
            with pytest.raises(StoreInUseError, match="stop that one first"):
                second.run_available()
            first.stop()
            assert second.run_available() == []


def test_a_pipeline_is_refused_while_another_process_writes(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The same across processes; it is let in once the other is gone, however that ended."""
    run(spark, tmp_path, 0)
    with open_store(sqlite(tmp_path)) as store:
        (info,) = store.streams()
    with Life.of_script(
        HOLD, url=sqlite(tmp_path), checkpoint=info.checkpoint_id, committed="0"
    ) as holder:
        holder.must_hear("claimed")
        write_segment(tmp_path / "spool", "Endpoint", ROWS[1::3], "1", 1)
        with pipeline(spark, tmp_path, oal=SMALL) as running:
            with pytest.raises(StoreInUseError) as caught:
                running.run_available()
            assert caught.value.holder["pid"] == holder.pid
            holder.kill()
            (report,) = running.run_available()
            assert (report.number, report.applied) == (1, True)


def test_a_pipeline_that_lost_its_claim_cannot_commit(spark: SparkSession, tmp_path: Path) -> None:
    """Fenced: another writer claimed the stream; it stops, and commits nothing."""
    for number in range(2):
        write_segment(tmp_path / "spool", "Endpoint", ROWS[number::3], str(number), number)

    def take_over(report: BatchReport) -> None:
        (info,) = running.store.streams()
        running.store.claim("main", info.checkpoint_id, fresh=False, committed=0)

    with pipeline(
        spark, tmp_path, oal=SMALL, settings=ONE_AT_A_TIME, on_batch=take_over
    ) as running:
        with pytest.raises(FencedError, match="the newer one goes on"):
            running.run_available()
        assert differences(stored(running.store), expected_of(ROWS[0::3])) == []
        running.on_batch = None
        assert [report.number for report in running.run_available()] == [1]


def test_await_end_raises_what_ended_the_stream(spark: SparkSession, tmp_path: Path) -> None:
    """A running stream that is fenced off ends with that very error."""
    with pipeline(spark, tmp_path, oal=SMALL) as running:
        running.start(0.2)
        assert running.await_end(0.01) is False
        (info,) = running.store.streams()
        running.store.claim("main", info.checkpoint_id, fresh=True, committed=None)
        write_segment(tmp_path / "spool", "Endpoint", ROWS)
        with pytest.raises(FencedError):
            running.await_end(PATIENCE_S)
        assert stored(running.store) == {}


def test_await_end_does_not_wait_without_time(spark: SparkSession, tmp_path: Path) -> None:
    """A timeout of zero asks whether the stream still runs."""
    with pipeline(spark, tmp_path, oal=SMALL) as running:
        running.start(0.2)
        assert spawn(running.await_end, 0).result() is False


def test_a_stopped_pipeline_says_so(spark: SparkSession, tmp_path: Path) -> None:
    """It is not started again by accident, and stopping it twice is fine."""
    running = pipeline(spark, tmp_path, oal=SMALL)
    with pytest.raises(PipelineError, match=r"call start\(\) first"):
        running.await_end()
    running.start(0.2)
    with pytest.raises(PipelineError, match="runs already"):
        running.run_available()
    running.stop()
    running.stop()
    with pytest.raises(PipelineError, match="make a new one"):
        running.run_available()


def test_folders_must_lie_apart(spark: SparkSession, tmp_path: Path) -> None:
    """A checkpoint or a quarantine in the spool would be read as segments."""
    for inside in ("checkpoint", "quarantine"):
        with pytest.raises(ConfigError, match="outside"):
            pipeline(spark, tmp_path, oal=SMALL, **{inside: tmp_path / "spool" / "inside"})


def test_counters_are_committed_with_their_batch(spark: SparkSession, tmp_path: Path) -> None:
    """Three batches, one of them twice: every row is counted once."""
    run(spark, tmp_path, 0, 1)
    forget_commit(tmp_path / "checkpoint")
    run(spark, tmp_path, 2)
    with open_store(sqlite(tmp_path)) as store:
        assert counted(store, "rows") == {("Endpoint", ""): 60}
