"""A backlog beside live traffic, and batches that take more memory than there is."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Self

import pytest
from pyspark.sql import SparkSession

from batchmill.outbox import OutboxSettings
from batchmill.spark import BatchReport, Pipeline, PipelineError, PipelineSettings
from batchmill.spark.batch import job
from batchmill.spark.batch.job import BatchJob
from batchmill.spark.batch.merge import BlobMerger, CommitStep
from batchmill.spark.batch.report import TaskReport
from batchmill.spark.errors import BatchTooLargeError
from batchmill.store import Batch
from benchmarks.road.backlog import TARGET_S, measure
from tests.kit.exporters import listed_changes
from tests.kit.files import ROOT
from tests.kit.jvm import java_missing, jvm_options
from tests.kit.pipelines import (
    NOW,
    OF_SPANS,
    QUICK_SPARK,
    SMALL,
    START,
    counted,
    differences,
    endpoint_events,
    expected,
    expected_of,
    pipeline,
    stored,
    write_segment,
)
from tests.kit.threads import PATIENCE_S, until
from tests.oracle.catalog import Row
from tests.oracle.generate import random_spans
from tests.oracle.spans import spans_to_events

NEW = 1000
"""The order of the first segment that is written while the backlog is worked off."""


def write(folder: Path, source: str, rows: Sequence[Row], order: int) -> Path:
    """A segment with a name as the receiver gives it."""
    name = f"{1_700_000_000_000_000 + order}-{order:08x}-{len(rows)}"
    return write_segment(folder / "spool", source, rows, name, order)


def plans(folder: Path) -> list[dict[str, Any]]:
    """The plans in the books, oldest first."""
    lines = (folder / "checkpoint" / "books.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "plan" in line]


def orders(plan: dict[str, Any]) -> list[int]:
    """The segments of a plan."""
    return [int(Path(path).name[:16]) - 1_700_000_000_000_000 for path in plan["segments"]]


class LiveTraffic:
    """Writes a segment after each batch of a pipeline, whose clock it moves."""

    def __init__(self, folder: Path, segments: list[list[Row]], step_s: float) -> None:
        self.now = NOW
        self.written = 0
        self.batches: list[tuple[list[int], int]] = []
        """The segments of each batch, and how many had been written when it was done."""
        self._folder = folder
        self._segments = segments
        self._step_s = step_s

    def on_batch(self, report: BatchReport) -> None:
        self.batches.append((orders(plans(self._folder)[-1]), self.written))
        self.now += self._step_s
        if self.written < len(self._segments):
            write(self._folder, "Span", self._segments[self.written], NEW + self.written)
            self.written += 1


@pytest.mark.system
def test_what_is_new_does_not_wait_for_the_backlog(spark: SparkSession, tmp_path: Path) -> None:
    """It is in the next batch. Traces whose halves lie in both are put together all the same.

    Their spans wait for longer than ``span_wait_s``, since their partners have arrived by then.
    """
    spans = random_spans(5, 300, start=START, days=1)
    random.Random(1).shuffle(spans)
    size = 6
    pieces = [spans[at : at + size] for at in range(0, len(spans), size)]
    live, backlog = pieces[:6], pieces[6:]
    for order, rows in enumerate(backlog):
        write(tmp_path, "Span", rows, order)
    traffic = LiveTraffic(tmp_path, live, step_s=52.0)
    settings = PipelineSettings(ttl_days=365, max_batch_rows=5 * size, span_wait_s=300.0)
    with pipeline(
        spark,
        tmp_path,
        oal=OF_SPANS,
        settings=settings,
        clock=lambda: traffic.now,
        on_batch=traffic.on_batch,
    ) as running:
        running.start(0.05)
        until(lambda: running.progress().unread_segments == 0)
        took = traffic.now - NOW
        assert settings.span_wait_s < took < 2 * settings.span_wait_s
        running.settle(everything=True)
        values = stored(running.store)
        unresolved = sum(counted(running.store, "unresolved").values())
        late = sum(counted(running.store, "late").values())
    assert late > 0  # their minutes had been shown without them
    made = spans_to_events(spans)
    assert unresolved == made.counters["unresolved"]
    assert differences(values, expected(made.events, OF_SPANS)) == []
    read: list[int] = []
    for number, (chosen, written) in enumerate(traffic.batches):
        read += chosen
        assert set(range(NEW, NEW + written)) <= set(read), number
        old = [order for order in read if order < len(backlog) - 10]
        assert old == sorted(old)  # but for the newest ones, which were new at the start
    assert sorted(read) == [*range(len(backlog)), *range(NEW, NEW + len(live))]


class Pace:
    """How much slower the machine is, meanwhile, than one that does nothing else.

    A thread does a fixed piece of work again and again, with pauses, beside what is measured: so it
    suffers from a slow processor and from other processes as that does, and from nothing else.
    """

    _WORK = 2_000_000
    _WORK_S = 0.06
    """How long the work takes on the machine of the benchmarks, if that is idle."""
    _PAUSE_S = 0.5

    def __init__(self) -> None:
        self._took: list[float] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._took or not self._end.wait(self._PAUSE_S):
            began = time.perf_counter()
            sum(number * number for number in range(self._WORK))
            self._took.append(time.perf_counter() - began)

    @property
    def slower(self) -> float:
        """1: not slower at all."""
        return max(1.0, mean(self._took) / self._WORK_S)


@pytest.mark.slow(70)
@pytest.mark.system
@pytest.mark.timeout(1200)
def test_a_large_backlog_is_worked_off_beside_live_traffic(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process with a heap of 1 GiB: all count once, and what is new waits for two batches.

    Nor does it wait longer than the target and 5 s, times how much slower the machine is. Batches
    have 2 MiB at most, so that there are several, however fast the machine is.
    ``python -m benchmarks.road --only backlog`` does the same with ten million and the default.
    """
    if (missing := java_missing()) is not None:
        pytest.skip(missing)
    monkeypatch.setenv("SPARK_SUBMIT_OPTS", jvm_options())
    spans = 250_000
    with Pace() as pace:
        result = measure(spans=spans, options=("--batch-mb", "2"))
    assert result.live > 0
    assert result.starts == 1
    assert result.counted == spans + result.live
    assert len(result.batches) > 2
    oldest = max(result.ages[1:])
    assert oldest <= max(TARGET_S, 2 * max(result.batches[1:])) + 5
    # The bound above grows with the batches, this one does not.
    assert oldest <= (TARGET_S + 5) * pace.slower


def failing(
    running: Pipeline, monkeypatch: pytest.MonkeyPatch, *errors: BaseException, most: int
) -> list[int]:
    """Let commits of more rows than ``most`` fail, the last error as often as it takes.

    The result has the rows of all attempts.
    """
    left = list(errors)
    attempts: list[int] = []
    commit = running.store.commit

    def limited(batch: Batch) -> Any:
        attempts.append(sum(batch.rows.values()))
        if attempts[-1] > most:
            raise left.pop(0) if len(left) > 1 else left[0]
        return commit(batch)

    monkeypatch.setattr(running.store, "commit", limited)
    return attempts


ROWS = endpoint_events(64)


def fill(folder: Path, segments: int) -> None:
    """Write all rows, the same number in each segment."""
    for order in range(segments):
        write(folder, "Endpoint", ROWS[order::segments], order)


@pytest.mark.system
def test_a_batch_that_runs_out_of_memory_twice_is_made_smaller(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it fits; the rest goes into the next ones, all of it once, without a restart.

    One that is known to be too large is made smaller at once. The next ones are as small.
    """
    fill(tmp_path, 4)
    with pipeline(spark, tmp_path, oal=SMALL) as running:
        errors = BatchTooLargeError(64, 16), MemoryError("too large")
        attempts = failing(running, monkeypatch, *errors, most=16)
        reports = running.run_available()
        assert differences(stored(running.store), expected_of(ROWS)) == []
    assert attempts == [64, 32, 32, 16, 16, 16, 16]
    assert [(report.number, report.given) for report in reports] == [(n, 1) for n in range(4)]
    chosen = [orders(plan) for plan in plans(tmp_path)]
    assert chosen == [[0, 1, 2, 3], [0, 1], [0], [1], [2], [3]]


def test_how_much_was_too_much_is_known_after_a_restart(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next process does not try it again; also after one that had nothing to do."""
    fill(tmp_path, 4)
    with pipeline(spark, tmp_path, oal=SMALL) as running:
        failing(running, monkeypatch, MemoryError("too large"), most=32)
        running.run_available()
    with pipeline(spark, tmp_path, oal=SMALL) as running:
        running.run_available()
    for order in range(4):
        write(tmp_path, "Endpoint", ROWS[order::4], 10 + order)
    with pipeline(spark, tmp_path, oal=SMALL) as running:
        attempts = failing(running, monkeypatch, MemoryError("too large"), most=40)
        running.run_available()
    assert attempts == [32, 32]


class Killed(BaseException):
    """What a test raises where a process would end without a word."""


def test_a_batch_in_which_the_process_died_twice_is_made_smaller(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system kills a process that takes too much memory: nobody can say so."""
    fill(tmp_path, 4)
    for _ in range(2):
        with pipeline(spark, tmp_path, oal=SMALL) as running:
            attempts = failing(running, monkeypatch, Killed(), most=32)
            with pytest.raises(Killed):
                running.run_available()
        assert attempts == [64]
    with pipeline(spark, tmp_path, oal=SMALL) as running:
        attempts = failing(running, monkeypatch, Killed(), most=32)
        running.run_available()
        assert attempts == [32, 32]
        assert differences(stored(running.store), expected_of(ROWS)) == []


JVM_DIES = """
import os, signal, sys
from pathlib import Path
from pyspark import SparkContext
from batchmill.spark import PipelineError
from tests.kit.pipelines import SMALL, pipeline
from tests.spark.runtime.test_backlog import own_session

folder, most, how = Path(sys.argv[1]), int(sys.argv[2]), signal.Signals(int(sys.argv[3]))
spark = own_session()
with pipeline(spark, folder, oal=SMALL) as running:
    commit = running.store.commit

    def limited(batch):
        print(sum(batch.rows.values()), flush=True)
        if sum(batch.rows.values()) > most:
            jvm = SparkContext._gateway.proc
            os.kill(jvm.pid, how)
            if how is signal.SIGKILL:
                jvm.wait()
            while True:  # else it stops the context first, and answers meanwhile
                spark.range(1).count()
        return commit(batch)

    running.store.commit = limited
    try:
        running.run_available()
    except PipelineError as error:
        print(error, flush=True)
    finally:
        os._exit(0)  # nothing that needs the JVM
"""


def own_session() -> SparkSession:
    """For a process of its own, which kills it."""
    builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
    for key, value in QUICK_SPARK.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


@pytest.mark.system
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "ends"])
def test_a_batch_in_which_the_jvm_died_twice_is_made_smaller(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    """The system may kill it alone, as it is the largest; the driver lives, and says what it is.

    One that runs out of memory itself ends as it does on SIGTERM: it stops the context before. The
    third life, of another process, makes the batch smaller.
    """
    fill(tmp_path, 4)
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", JVM_DIES, str(tmp_path), "32", str(int(how))],
            env={
                **os.environ,
                "PYSPARK_PYTHON": sys.executable,
                "SPARK_SUBMIT_OPTS": jvm_options(),
            },
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            timeout=PATIENCE_S,
        )
        rows, message = done.stdout.splitlines()
        assert rows == "64"
        assert message.startswith("the JVM of Spark ended in batch 0: ")
    with pipeline(spark, tmp_path, oal=SMALL) as running:
        attempts = failing(running, monkeypatch, Killed(), most=32)
        running.run_available()
        assert attempts == [32, 32]
        assert differences(stored(running.store), expected_of(ROWS)) == []


def test_other_errors_do_not_make_a_batch_smaller(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A database that is down is none of its input's fault."""
    fill(tmp_path, 2)
    for _ in range(3):
        with pipeline(spark, tmp_path, oal=SMALL) as running:
            attempts = failing(running, monkeypatch, ArithmeticError("down"), most=0)
            with pytest.raises(ArithmeticError, match="down"):
                running.run_available()
        assert attempts == [64]
    with pipeline(spark, tmp_path, oal=SMALL) as running:
        assert [report.given for report in running.run_available()] == [2]
        assert differences(stored(running.store), expected_of(ROWS)) == []


def test_a_batch_that_is_in_the_store_is_not_made_smaller(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was applied, and the process ran out of memory before it knew: it is done."""
    fill(tmp_path, 2)
    with pipeline(spark, tmp_path, oal=SMALL) as running:
        commit = running.store.commit

        def applied(batch: Batch) -> Any:
            commit(batch)
            raise MemoryError("too late")

        monkeypatch.setattr(running.store, "commit", applied)
        (report,) = running.run_available()
        assert not report.applied
        assert differences(stored(running.store), expected_of(ROWS)) == []
    assert [orders(plan) for plan in plans(tmp_path)] == [[0, 1]]


def test_a_batch_with_parts_in_the_store_is_not_made_smaller(
    spark: SparkSession, tmp_path: Path, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks have committed them with all of its input; it ends, or is tried after a restart."""
    fill(tmp_path, 2)
    with pipeline(spark, tmp_path, oal=SMALL, store=postgres_url) as running:
        attempts = failing(running, monkeypatch, MemoryError("too large"), most=0)
        with pytest.raises(MemoryError, match="too large"):
            running.run_available()
    assert len(attempts) == 3
    with pipeline(spark, tmp_path, oal=SMALL, store=postgres_url) as running:
        (report,) = running.run_available()
        assert report.given == 2
        assert differences(stored(running.store), expected_of(ROWS)) == []
    assert {tuple(orders(plan)) for plan in plans(tmp_path)} == {(0, 1)}


@dataclass(frozen=True)
class ScarceStep(CommitStep):
    """Has memory for one part a task, and for more in one task of the first run."""

    def _commit(
        self, parts: Sequence[int], fresh: BlobMerger, recorded: BlobMerger, report: TaskReport
    ) -> None:
        enough = len(parts) < 2 or (0 in parts and not self.commit.opened.recorded)
        if not enough or (self.commit.outbox is None and [*recorded.blobs()]):
            raise MemoryError("too large")
        super()._commit(parts, fresh, recorded, report)


@pytest.mark.parametrize("export", [False, True])
def test_a_batch_with_parts_in_the_store_is_worked_off_part_by_part(
    spark: SparkSession,
    tmp_path: Path,
    postgres_url: str,
    monkeypatch: pytest.MonkeyPatch,
    export: bool,
) -> None:
    """It takes less memory when it is tried again, and ends: all of it once, without a restart.

    Each task reads fewer segments, too, and has the spans of fewer traces.
    """
    spans = random_spans(12, 60, start=START, days=1)
    fill(tmp_path, 2)
    for order in range(2):
        write(tmp_path, "Span", spans[order::2], 2 + order)
    monkeypatch.setattr(job, "CommitStep", ScarceStep)
    divide, slices = BatchJob._slices, []

    def noted(*given: Any) -> Any:
        slices.append(divide(*given))
        return slices[-1]

    monkeypatch.setattr(BatchJob, "_slices", noted)
    oal = f"{OF_SPANS} {SMALL}"
    options: dict[str, Any] = {"outbox": OutboxSettings()} if export else {}
    with pipeline(spark, tmp_path, oal=oal, store=postgres_url, **options) as running:
        (report,) = running.run_available()
        assert [max(map(len, own)) for own in slices] == [2, 1]
        assert report.given == 4
        (folder,) = (tmp_path / "checkpoint" / "state").glob("*/pending")
        assert len(list(folder.glob("*.arrow"))) > 2
        running.settle(everything=True)
        rows = spans_to_events(spans).events
        rows = {**rows, "Endpoint": [*rows["Endpoint"], *ROWS]}
        assert differences(stored(running.store), expected(rows, oal)) == []
        assert counted(running.store, "rows")["Endpoint", ""] == len(rows["Endpoint"])
        if export:
            calls = {(one.bucket, one.entity_id): one.value for one in running.store.values("cpm")}
            assert listed_changes(running.store, tmp_path / "checkpoint", "cpm") == calls


def test_a_segment_that_takes_too_much_memory_is_named(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot be divided: the message says what to do."""
    path = write(tmp_path, "Endpoint", ROWS, 0)
    with pipeline(spark, tmp_path, oal=SMALL) as running:
        failing(running, monkeypatch, MemoryError("too large"), most=0)
        with pytest.raises(PipelineError, match=r"spark\.driver\.memory") as raised:
            running.run_available()
        assert str(path) in str(raised.value)
    with pipeline(spark, tmp_path, oal=SMALL) as running:
        assert len(running.run_available()) == 1
