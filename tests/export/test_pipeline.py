"""The pipeline with an outbox: what it commits on Spark is what a collector gets."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from pyspark.sql import SparkSession

from batchmill.outbox import Outbox
from batchmill.store import Store, StoreUnavailableError, open_store
from tests.kit.exporters import added_up, exporter_of, last_totals, stored
from tests.kit.otlp import GrpcReceiver
from tests.kit.pipelines import (
    EVERY_FUNCTION,
    SMALL,
    TWO_SOURCES,
    endpoint_events,
    every_events,
    pipeline,
    write_segment,
)

NAMES = ("ep_count", "ep_avg", "ep_max", "ep_apdex", "ep_p10", "ep_codes", "ep_slow", "cpu")
SOME = "\n".join(line for line in EVERY_FUNCTION.splitlines() if line.split(" ")[0] in NAMES)
"""Every kind of state, over two sources."""


def export(store: Store, checkpoint: Path, receiver: GrpcReceiver) -> None:
    """Send all that is there."""
    exporter_of(store, Outbox.of(checkpoint), receiver.target).run(once=True)


def test_what_a_stream_and_a_backfill_commit_is_exported(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Whatever the state; the last total of each value is the store's."""
    events = every_events(3, TWO_SOURCES, 60, days=1)
    reports = []
    with pipeline(spark, tmp_path, oal=SOME, outbox=True) as running:
        for number in range(2):
            for source, rows in events.items():
                part = rows[number::3]
                write_segment(tmp_path / "spool", source, part, f"{number}", order=number)
            reports += running.run_available()
        for source, rows in events.items():
            write_segment(tmp_path / "past", source, rows[2::3])
        reports += running.backfill(tmp_path / "past")
    assert all(report.outbox_s > 0 for report in reports)
    with GrpcReceiver() as receiver, open_store(f"sqlite:///{tmp_path}/metrics.db") as store:
        place = Outbox.of(tmp_path / "checkpoint").place
        assert len(store.outbox(place)) == len(reports)
        assert len({file.stream for file in store.outbox(place)}) == 2
        export(store, tmp_path / "checkpoint", receiver)
        points = receiver.points()
        wanted = stored(store)
        assert last_totals(points) == wanted
        counts = {key: n for key, n in wanted.items() if key[0] == "batchmill.ep_count"}
        assert added_up(points, "ep_count") == counts
        assert store.outbox(place) == []


def test_the_file_of_a_commit_that_failed_is_not_exported(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run makes the batch again, with a file of its own, and removes the old one."""
    write_segment(tmp_path / "spool", "Endpoint", endpoint_events(50, days=1))
    checkpoint = tmp_path / "checkpoint"

    def fail(batch: object) -> None:
        raise StoreUnavailableError("store", 1, 0.0, "as the test wants it")

    with pipeline(spark, tmp_path, oal=SMALL, outbox=True) as running:
        monkeypatch.setattr(running.store, "commit", fail)
        with pytest.raises(Exception, match="as the test wants it"):
            running.run_available()
    folder = checkpoint / "outbox" / "main"
    (lost,) = folder.iterdir()
    with pipeline(spark, tmp_path, oal=SMALL, outbox=True) as running:
        running.run_available()
    assert not lost.exists()
    assert len(list(folder.iterdir())) == 1
    with GrpcReceiver() as receiver, open_store(f"sqlite:///{tmp_path}/metrics.db") as store:
        export(store, checkpoint, receiver)
        assert last_totals(receiver.points()) == stored(store)
        calls = {key: n for key, n in stored(store).items() if key[0] == "batchmill.ep_cpm"}
        assert added_up(receiver.points(), "ep_cpm") == calls


def test_without_an_outbox_nothing_is_put_down(spark: SparkSession, tmp_path: Path) -> None:
    """It is off unless it is asked for."""
    write_segment(tmp_path / "spool", "Endpoint", endpoint_events(20, days=1))
    with pipeline(spark, tmp_path, oal=SMALL) as running:
        (report,) = running.run_available()
    assert report.applied
    assert not (tmp_path / "checkpoint" / "outbox").exists()
