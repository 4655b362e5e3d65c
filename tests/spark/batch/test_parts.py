"""Into how many parts and tasks a batch is divided changes no result, nor does a change of it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

pytest.importorskip("pyspark")

from pyspark import SparkContext
from pyspark.sql import SparkSession

from batchmill.spans import hash64
from batchmill.spark import BatchReport, Pipeline
from batchmill.spark.batch import maker
from batchmill.spark.batch.job import BatchJob
from tests.kit.pipelines import (
    OF_SPANS,
    ONE_AT_A_TIME,
    START,
    contents,
    counted,
    deal,
    differences,
    endpoint_events,
    expected,
    pipeline,
    stored,
    top_expected,
    top_of,
    write_segment,
)
from tests.kit.spark import span
from tests.oracle.generate import random_spans
from tests.oracle.spans import spans_to_events
from tests.oracle.topn import expected_topn

pytestmark = [pytest.mark.slow, pytest.mark.system]

OAL = f"{OF_SPANS} db = from(DatabaseAccess.latency).percentile2(10); ep = from(Endpoint.*).cpm();"
SPANS = random_spans(12, 150, start=START, days=1)
AGAIN = SPANS[::4]
EVENTS = endpoint_events(40)
SAME = ("Span", "same trace and span id")


def divide(monkeypatch: pytest.MonkeyPatch, parts: int, tasks: int | None = None) -> None:
    """Have batches divided into so many parts and tasks."""
    monkeypatch.setattr(maker, "parts_for", lambda spark: parts)
    if tasks is not None:
        monkeypatch.setattr(BatchJob, "_tasks", lambda *given: tasks)
        monkeypatch.setattr(
            BatchJob,
            "_slices",
            lambda job, paths, readers: [paths[at::tasks] for at in range(tasks)],
        )


def check(running: Pipeline) -> None:
    """Each span has counted once, with its partner."""
    events = spans_to_events(SPANS)
    rows = {**events.events, "Endpoint": [*events.events["Endpoint"], *EVENTS]}
    assert differences(stored(running.store), expected(rows, OAL)) == []
    assert top_of(running.store) == top_expected(expected_topn(SPANS))
    assert counted(running.store, "duplicates") == {SAME: len(AGAIN)}
    unresolved = sum(counted(running.store, "unresolved").values())
    assert unresolved == events.counters["unresolved"]


@pytest.fixture(scope="module")
def plain(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a store holds after batches that are divided as usual."""
    return run(spark, tmp_path_factory.mktemp("plain"))


def run(spark: SparkSession, folder: Path) -> Any:
    """Everything in three batches; the store's states, values and counters, checked."""
    deal({"Span": [*SPANS, *AGAIN]}, folder / "spool", 3, seed=4)
    write_segment(folder / "spool", "Endpoint", EVENTS, "0")
    with pipeline(spark, folder, oal=OAL, settings=ONE_AT_A_TIME, dedup_s=600) as running:
        running.run_available()
        running.settle(everything=True)
        check(running)
        return contents(running.store), running.store.counters()


@pytest.mark.parametrize(("parts", "tasks"), [(1, 1), (8, 8), (13, 3)])
def test_the_number_of_parts_and_tasks_changes_nothing(
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    plain: Any,
    parts: int,
    tasks: int,
) -> None:
    """All in one, as many tasks as parts, and several parts for each task."""
    divide(monkeypatch, parts, tasks)
    assert run(spark, tmp_path) == plain


def test_state_of_another_number_of_parts_counts(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restart with more cores, or fewer: pending spans pair, and ids are known."""
    rows = [*SPANS, *AGAIN]
    random.Random(5).shuffle(rows)
    write_segment(tmp_path / "spool", "Endpoint", EVENTS, "0")
    for number, parts in enumerate((8, 3, 16, 8, 1)):
        divide(monkeypatch, parts)
        write_segment(tmp_path / "spool", "Span", rows[number::5], f"{number}", number)
        with pipeline(spark, tmp_path, oal=OAL, dedup_s=600) as running:
            running.run_available()
            if number == 4:
                running.settle(everything=True)
                check(running)


def test_executors_that_come_later_get_their_share(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the next batch; those that go are not waited for, but the parts stay."""
    cores, tasks = iter((2, 12, 3)), []
    now = [next(cores)]
    monkeypatch.setattr(SparkContext, "defaultParallelism", property(lambda _: now[0]))
    choose = BatchJob._tasks

    def noted(*given: Any) -> int:
        tasks.append(choose(*given))
        return tasks[-1]

    monkeypatch.setattr(BatchJob, "_tasks", noted)
    deal({"Span": [*SPANS, *AGAIN]}, tmp_path / "spool", 3, seed=4)
    write_segment(tmp_path / "spool", "Endpoint", EVENTS, "0")

    def change(report: BatchReport) -> None:
        now[0] = next(cores, 3)

    with pipeline(
        spark, tmp_path, oal=OAL, settings=ONE_AT_A_TIME, dedup_s=600, on_batch=change
    ) as running:
        running.run_available()
        books = (tmp_path / "checkpoint" / "books.jsonl").read_text().splitlines()
        running.settle(everything=True)
        check(running)
    plans = [line for line in map(json.loads, books) if "plan" in line]
    assert [plan["parts"] for plan in plans] == [16, 48, 48, 48]
    assert tasks[:3] == [2, 12, 3]


def test_a_batch_of_one_trace_loses_nothing_of_the_others(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Files are merged in it, also by tasks that get none of its spans."""
    calls = [span("1", "CLIENT", trace_id=f"t{number}") for number in range(32)]
    served = [
        span("2", parent_span_id="1", trace_id=f"t{number}", service="stock")
        for number in range(32)
    ]
    groups = [calls[number * 4 : number * 4 + 4] for number in range(8)]
    batches = [*groups, [span("1", trace_id="alone")], [*served, *calls]]
    for number, spans in enumerate(batches):
        write_segment(tmp_path / "spool", "Span", spans, f"{number}", number)
    with pipeline(spark, tmp_path, oal=OF_SPANS, settings=ONE_AT_A_TIME, dedup_s=600) as running:
        assert len(running.run_available()) == len(batches)
        spans = [*calls, *served, *batches[8]]
        wanted = expected(spans_to_events(spans).events, OF_SPANS)
        assert differences(stored(running.store), wanted) == []
        assert counted(running.store, "duplicates") == {SAME: len(calls)}
        pending = list((tmp_path / "checkpoint" / "state").glob("*/pending"))
        assert len(pending) == 2  # of all batches up to the one of one trace, and of the last


def test_state_in_a_folder_of_any_name(spark: SparkSession, tmp_path: Path) -> None:
    """Nothing in it is a pattern, or an encoding."""
    folder = tmp_path / "a [b] {c,d} *?\\ %20#é"
    batches = ([span("1", "CLIENT")], [span("2", parent_span_id="1", service="stock")])
    for number, spans in enumerate([*batches, batches[0]]):
        write_segment(tmp_path / "spool", "Span", spans, f"{number}", number)
    with pipeline(
        spark, tmp_path, oal=OF_SPANS, settings=ONE_AT_A_TIME, dedup_s=600, checkpoint=folder
    ) as running:
        running.run_available()
        wanted = expected(spans_to_events([*batches[0], *batches[1]]).events, OF_SPANS)
        assert differences(stored(running.store), wanted) == []
        assert counted(running.store, "duplicates") == {SAME: 1}
    assert len(list((folder / "state").glob("*/pending"))) == 2


def colliding_names() -> tuple[str, str]:
    """Two names of 16 letters with one 64-bit hash, which is made of the hashes of their halves."""
    mask = 2**64 - 1

    def mixed(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
        return x ^ x >> 31

    def unmixed(x: int) -> int:
        x ^= x >> 31 ^ x >> 62
        x = x * pow(0x94D049BB133111EB, -1, 2**64) & mask
        x ^= x >> 27 ^ x >> 54
        x = x * pow(0xBF58476D1CE4E5B9, -1, 2**64) & mask
        return x ^ x >> 30 ^ x >> 60

    keys = [mixed(place * 0x9E3779B97F4A7C15 & mask) for place in (1, 2)]
    halves = [int.from_bytes(half, "little") for half in (b"GET /car", b"t/{item}")]
    total = sum(mixed(half ^ key) for half, key in zip(halves, keys, strict=True))
    for number in range(10**6):
        first = f"GET {number:04d}"[:8].encode()
        rest = total - mixed(int.from_bytes(first, "little") ^ keys[0])
        second = (unmixed(rest & mask) ^ keys[1]).to_bytes(8, "little")
        if all(33 <= letter < 127 for letter in second):
            return "GET /cart/{item}", (first + second).decode()
    raise AssertionError("there is none")


def test_entities_with_one_hash_stay_apart(spark: SparkSession, tmp_path: Path) -> None:
    """A hash decides where a row is merged, not with what: entities are told apart by their ids."""
    names = colliding_names()
    assert len(set(hash64(pa.array(names)).tolist())) == 1
    rows = endpoint_events(40)
    for number, row in enumerate(rows):
        row["name"], row["serviceName"] = names[number % 4 == 0], "shop"
    write_segment(tmp_path / "spool", "Endpoint", rows)
    with pipeline(spark, tmp_path, oal="ep = from(Endpoint.latency).sum();") as running:
        running.run_available()
        assert (
            differences(
                stored(running.store),
                expected({"Endpoint": rows}, "ep = from(Endpoint.latency).sum();"),
            )
            == []
        )
        assert {entity.name for entity in running.store.entities("endpoint")} == set(names)
