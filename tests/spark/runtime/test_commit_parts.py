"""Tasks commit the parts of a batch into PostgreSQL; whatever breaks off, each part counts once."""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pyspark")

from pyspark.sql import SparkSession

from batchmill.errors import MissingExtraError
from batchmill.oal import load
from batchmill.outbox import OutboxSettings
from batchmill.sources import entity_id
from batchmill.spark import PipelineSettings, shuffle
from batchmill.spark.batch.job import BatchJob, parts_for
from batchmill.spark.batch.merge import CommitStep, PartCommit
from batchmill.spark.batch.plan import Limits, PickledPlan, TaskPlan
from batchmill.spark.batch.read_step import ReadStep
from batchmill.spark.batch.writer import aggregators_for
from batchmill.spark.shuffle import Kind, entity_parts, read_blobs
from batchmill.store import (
    Batch,
    FencedError,
    Layout,
    OpenParts,
    RetryPolicy,
    StatementFailedError,
    Store,
    TaskAddress,
    open_for_task,
    open_store,
)
from tests.kit.exporters import listed_changes
from tests.kit.pipelines import (
    NOW,
    OF_SPANS,
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
    top_expected,
    top_of,
    write_segment,
)
from tests.oracle.generate import random_spans
from tests.oracle.spans import spans_to_events
from tests.oracle.topn import expected_topn

OAL = f"{OF_SPANS} db = from(DatabaseAccess.latency).percentile2(10); ep = from(Endpoint.*).cpm();"
SPANS = random_spans(12, 120, start=START, days=1)
EVENTS = endpoint_events(60)
FEW = PipelineSettings(ttl_days=365, max_batch_files=2)


class Crash(BaseException):
    """The end of a process."""


def fill(folder: Path) -> None:
    """Spans and events, for two batches."""
    deal({"Span": SPANS}, folder / "spool", 3, seed=4)
    write_segment(folder / "spool", "Endpoint", EVENTS, "0")


def check(store: Store) -> None:
    """Every row has counted once."""
    events = spans_to_events(SPANS)
    rows = {**events.events, "Endpoint": [*events.events["Endpoint"], *EVENTS]}
    assert differences(stored(store), expected(rows, OAL)) == []
    assert top_of(store) == top_expected(expected_topn(SPANS))
    assert counted(store, "rows")["Span", ""] == len(SPANS)


def run(spark: SparkSession, folder: Path, url: str) -> None:
    """Everything that waits, with an outbox; then the store is right, and so is the outbox."""
    options: dict[str, Any] = {
        "oal": OAL,
        "settings": FEW,
        "store": url,
        "outbox": OutboxSettings(),
    }
    with pipeline(spark, folder, **options) as running:
        running.run_available()
        running.settle(everything=True)
        check(running.store)
        calls = {
            (value.bucket, value.entity_id): value.value for value in running.store.values("ep")
        }
        assert listed_changes(running.store, folder / "checkpoint", "ep") == calls


def test_the_driver_commits_nothing_but_the_books(
    spark: SparkSession, tmp_path: Path, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entities, deltas and slow calls come from the tasks."""
    batches: list[Batch] = []
    commit = Store.commit

    def note(store: Store, batch: Batch) -> Any:
        batches.append(batch)
        return commit(store, batch)

    monkeypatch.setattr(Store, "commit", note)
    fill(tmp_path)
    run(spark, tmp_path, postgres_url)
    assert len(batches) >= 3  # the last one gives up on spans that wait
    for batch in batches:
        assert batch.parts
        assert [*batch.deltas, *batch.entities, *batch.topn, *batch.statements] == []
        assert len(batch.outgoing) >= 1


@pytest.mark.parametrize("after", [False, True])
def test_parts_that_were_committed_are_not_committed_again(
    spark: SparkSession,
    tmp_path: Path,
    postgres_url: str,
    monkeypatch: pytest.MonkeyPatch,
    after: bool,
) -> None:
    """The driver ends before or after a batch's books, of two batches with input and of one that
    settles spans; the next has another number of tasks."""
    fill(tmp_path)
    commit = Store.commit
    for number in range(3):

        def crash(store: Store, batch: Batch, last: int = number) -> Any:
            if batch.number == last:
                if after:
                    commit(store, batch)
                raise Crash
            return commit(store, batch)

        with monkeypatch.context() as patch:
            patch.setattr(Store, "commit", crash)
            with pytest.raises(Crash):
                run(spark, tmp_path, postgres_url)
        tasks = 5 - number
        monkeypatch.setattr(BatchJob, "_tasks", lambda *given, tasks=tasks: tasks)
    run(spark, tmp_path, postgres_url)


FAIL = """
CREATE SEQUENCE failures;
CREATE FUNCTION fail_part() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.part = 3 THEN
        PERFORM nextval('failures');
        RAISE EXCEPTION 'no room for part 3';
    END IF;
    WHILE NEW.part % 2 = 0 AND NOT (SELECT is_called FROM failures) LOOP
        PERFORM pg_sleep(0.01);
    END LOOP;
    RETURN NEW;
END $$;
CREATE TRIGGER fail BEFORE INSERT ON part_commit FOR EACH ROW EXECUTE FUNCTION fail_part();
"""
"""The task of the even parts goes on when that of part 3 has failed."""


def test_the_failure_of_a_part_does_not_undo_the_others(
    spark: SparkSession, tmp_path: Path, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are committed after it, and the next run commits the rest."""
    monkeypatch.setattr(BatchJob, "_tasks", lambda *given: 2)
    write_segment(tmp_path / "spool", "Endpoint", EVENTS, "0")
    with open_store(postgres_url), psycopg.connect(postgres_url, autocommit=True) as database:
        database.execute(FAIL)
        options: dict[str, Any] = {"oal": SMALL, "store": postgres_url, "settings": FEW}
        with (
            pytest.raises(StatementFailedError, match="no room for part 3"),
            pipeline(spark, tmp_path, **options) as running,
        ):
            running.run_available()
        rows = database.execute("SELECT part FROM part_commit").fetchall()
        database.execute("DROP FUNCTION fail_part CASCADE")
    assert {part for (part,) in rows} == set(range(0, parts_for(spark), 2))
    with pipeline(spark, tmp_path, **options) as running:
        running.run_available()
        assert differences(stored(running.store), expected_of(EVENTS)) == []
        assert counted(running.store, "rows") == {("Endpoint", ""): 60}


def test_rows_of_a_data_frame_are_committed_by_parts(
    spark: SparkSession, tmp_path: Path, postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A backfill that broke off is repeated by its name, with the rows that it had."""
    path = write_segment(tmp_path / "old", "Endpoint", EVENTS, "0")
    rows = spark.read.parquet(str(path))
    with (
        pipeline(spark, tmp_path, oal=SMALL, store=postgres_url, settings=FEW) as running,
        psycopg.connect(postgres_url, autocommit=True) as database,
    ):
        database.execute("ALTER TABLE counter ADD CONSTRAINT none CHECK (n < 0)")
        with pytest.raises(StatementFailedError):
            running.backfill(rows, source="Endpoint")
        assert database.execute("SELECT count(*) FROM part_commit").fetchone() != (0,)
        database.execute("ALTER TABLE counter DROP CONSTRAINT none")
        (name,) = re.findall("repeat it with name='(.+)'", caplog.text)
        running.backfill(rows.limit(0), source="Endpoint", name=name)
        assert differences(stored(running.store), expected_of(EVENTS)) == []
        (report,) = running.backfill(rows, source="Endpoint", name=name)
        assert not report.applied
        assert differences(stored(running.store), expected_of(EVENTS)) == []


def test_tasks_of_a_writer_that_lost_its_stream_commit_nothing(
    spark: SparkSession, tmp_path: Path, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the writer hears it, not Spark's account of failed tasks; it does not try again."""
    write_segment(tmp_path / "spool", "Endpoint", EVENTS, "0")
    begin = Store.begin_parts

    def lose(store: Store, *key: Any, **more: Any) -> OpenParts:
        opened = begin(store, *key, **more)
        with psycopg.connect(postgres_url) as database:
            database.execute("UPDATE stream SET epoch = epoch + 1")
        return opened

    monkeypatch.setattr(Store, "begin_parts", lose)
    with pipeline(spark, tmp_path, oal=SMALL, store=postgres_url, settings=FEW) as running:
        for _ in range(2):
            with pytest.raises(FencedError):
                running.run_available()
        assert stored(running.store) == {}


def test_executors_without_psycopg_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are, too: the driver has it."""
    monkeypatch.setitem(sys.modules, "psycopg", None)
    limited, metrics = PipelineSettings(), load(SMALL)
    aggregators = aggregators_for(metrics, limited)
    plan = PickledPlan(TaskPlan(metrics.catalog, aggregators, None, limited, 4, Layout({})))
    address = TaskAddress("postgresql://db/x", "id", 7, 50, RetryPolicy(), (("host", "db"),))
    commit = PartCommit(address, "live", 1, 0, OpenParts(1, 0), None)
    (blob,) = read_blobs(CommitStep(plan, commit, 4).run(0, []))
    (failure,) = blob.report.failures
    assert isinstance(failure, MissingExtraError)
    for said in ("batchmill[postgres]", sys.executable, socket.gethostname()):
        assert said in str(failure)


def test_entities_with_one_hash_are_not_merged(
    tmp_path: Path, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hash says which part an entity is in, not which entity it is."""
    monkeypatch.setattr(shuffle, "hash64", lambda texts: np.full(len(texts), 7, "u8"))
    metrics = load(SMALL)
    limited = PipelineSettings()
    aggregators = aggregators_for(metrics, limited)
    path = write_segment(tmp_path / "spool", "Endpoint", EVENTS, "0")
    with open_store(postgres_url) as store:
        claim = store.claim("live", "checkpoint", fresh=True, committed=None)
        layout = store.register(metrics, stream="live")
        plan = PickledPlan(TaskPlan(metrics.catalog, aggregators, None, limited, 4, layout))
        limits = Limits(int((NOW + 60) * 1e6), None, str(tmp_path / "quarantine"))
        made = list(ReadStep(plan, limits, [[str(path)]])([pa.record_batch({"id": [0]})]))
        blobs = [blob for blob in read_blobs(made) if blob.kind is Kind.DELTAS]
        (part,) = {blob.part for blob in blobs}
        opened = store.begin_parts("live", claim.epoch, 0)
        commit = PartCommit(store.task_address(), "live", claim.epoch, 0, opened, None)
        for task in range(4):
            list(CommitStep(plan, commit, 4).run(task, made if task == part else []))
        batch = Batch("live", claim.epoch, 0, parts=4, expected_rows={"Endpoint": 60})
        open_for_task(commit.store).close()
        assert store.commit(batch).applied
        assert differences(stored(store), expected_of(EVENTS)) == []


NAMES = st.none() | st.text(st.sampled_from(" a\u00e9\u3042\x1c\U0001f600"), max_size=3).flatmap(
    lambda text: st.sampled_from([text, text + "b" * 69, text + "b" * 70 + text, "b" * 150 + text])
)


@given(st.lists(st.tuples(NAMES, st.sampled_from([None, "MESH", "GENERAL"]), NAMES)))
@settings(max_examples=100)
def test_an_entity_is_in_one_part(rows: list[tuple[str | None, ...]]) -> None:
    """Whatever its layers are, and whatever of its names is cut off."""
    source = load(SMALL).catalog.source("Endpoint")
    assert list(source.entity.roles) == ["service", "layer", "name"]
    roles = [pa.array([row[place] for row in rows], pa.string()) for place in range(3)]
    parts = entity_parts(roles, source, 1000)
    assert (
        parts.tolist()
        == entity_parts([own.dictionary_encode() for own in roles], source, 1000).tolist()
    )
    ids: dict[str, set[int]] = {}
    for row, part in zip(rows, parts.tolist(), strict=True):
        names = dict(zip(source.entity.roles.values(), row, strict=True))
        ids.setdefault(entity_id(source, names), set()).add(part)
    assert all(len(own) == 1 for own in ids.values())
