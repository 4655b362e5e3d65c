"""Pending spans: their files are durable, merged and checked; no clock decides what is paired."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("uvicorn")

from pyspark.sql import SparkSession

from batchmill.oal import core_script
from batchmill.sources import Grain, service_id
from batchmill.spark import PipelineError
from batchmill.store import Store
from tests.kit.pipelines import (
    NOW,
    ONE_AT_A_TIME,
    START,
    counted,
    deal,
    differences,
    expected,
    pipeline,
    sqlite,
    stored,
    write_segment,
)
from tests.kit.spark import EPOCH, span
from tests.oracle.generate import random_spans
from tests.oracle.spans import spans_to_events
from tests.web.kit import serving

RELATIONS = """
rel = from(ServiceRelation.*).cpm();
rel_time = from(ServiceRelation.latency).longAvg();
"""
MINUTE_US = 60_000_000
CALLS = "seen = from(ServiceRelation.*).filter(detectPoint == DetectPoint.CLIENT).count();"
OUTSIDE = {"server.address": "api.pay.org", "server.port": "443"}
LEGACY = {"server.address": "legacy", "server.port": "8080"}


def pending(folder: Path) -> list[Path]:
    """The files of pending spans that there are."""
    return sorted((folder / "checkpoint" / "state").glob("*/pending"))


def calls(store: Store, host: str = "api.pay.org:443") -> list[int]:
    """Calls to the host, and to the service that answers for it, as the caller saw them."""
    counts: Counter[str] = Counter()
    for value in store.values("seen", grain=Grain.DAY):
        assert isinstance(value.value, int)
        counts[value.entity_id.partition("-")[2]] += value.value
    return [counts[service_id(host, normal=False)], counts[service_id("pay", normal=True)]]


def test_how_long_a_backfill_takes_decides_nothing(spark: SparkSession, tmp_path: Path) -> None:
    """An hour between two batches: spans pair all the same, as the folder is whole."""
    spans = random_spans(5, 60, start=START, days=1)
    deal({"Span": spans}, tmp_path / "old", 3)
    now = [NOW]

    def clock() -> float:
        now[0] += 3600
        return now[0]

    with pipeline(spark, tmp_path, oal=RELATIONS, settings=ONE_AT_A_TIME, clock=clock) as running:
        reports = running.backfill(tmp_path / "old")
        assert len(reports) == 4
        wanted = expected(spans_to_events(spans).events, RELATIONS)
        assert differences(stored(running.store), wanted) == []
        assert list((tmp_path / "checkpoint").glob("backfill-*/state/*")) == []


def test_a_host_outside_is_counted_at_once_until_it_answers(
    spark: SparkSession, tmp_path: Path
) -> None:
    """In the batch that its call comes in; what has answered is known after a restart, too."""
    spool = tmp_path / "spool"
    first = span("1", "CLIENT", attributes=OUTSIDE)
    answer = span("2", parent_span_id="1", service="pay")
    with pipeline(spark, tmp_path, oal=CALLS) as running:
        write_segment(spool, "Span", [first], "0")
        running.run_available()
        assert calls(running.store) == [1, 0]
        write_segment(spool, "Span", [answer], "1", 1)
        running.run_available()
        assert calls(running.store) == [1, 0]
    with pipeline(spark, tmp_path, oal=CALLS) as running:
        write_segment(spool, "Span", [first | {"trace_id": "t2"}], "2", 2)
        running.run_available()
        assert calls(running.store) == [1, 0]
        write_segment(spool, "Span", [answer | {"trace_id": "t2"}], "3", 3)
        running.run_available()
        assert calls(running.store) == [1, 1]


class Crash(BaseException):
    """The end of a process before its commit."""


def test_a_silent_host_is_remembered_until_it_answers(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After restarts; and a batch that is run again counts the same calls at once."""
    now = [NOW]
    written = 0

    @contextlib.contextmanager
    def running() -> Iterator[Callable[..., list[int]]]:
        """A run, as a function: a batch of spans, 400 s after the one before; all calls then.

        Without spans it is the batch that broke off.
        """
        with pipeline(spark, tmp_path, oal=CALLS, clock=lambda: now[0]) as started:

            def batch(*spans: dict[str, Any]) -> list[int]:
                nonlocal written
                if spans:
                    now[0] += 400
                    write_segment(tmp_path / "spool", "Span", spans, str(written), written)
                    written += 1
                started.run_available()
                return calls(started.store, "legacy:8080")

            yield batch

    def call(trace: int) -> dict[str, Any]:
        return span("1", "CLIENT", trace_id=f"t{trace}", attributes=LEGACY)

    def answer(trace: int) -> dict[str, Any]:
        return span("2", trace_id=f"t{trace}", parent_span_id="1", service="pay")

    def crash(*_: Any) -> None:
        raise Crash

    with running() as batch:
        assert [batch(call(0)), batch(call(1)), batch(call(2))] == [[0, 0], [1, 0], [2, 0]]
    for trace in (3, 4):  # the batch that learns it, and the first that knows it
        with running() as batch, monkeypatch.context() as patch:
            patch.setattr(Store, "commit", crash)
            with pytest.raises(Crash):
                batch(call(trace))
        with running() as batch:
            assert batch() == ([3, 0] if trace == 3 else [5, 0])
    with running() as batch:
        assert batch(answer(4)) == [5, 0]
    with running() as batch:
        assert batch(call(5)) == [5, 0]
        assert batch(answer(5)) == [5, 1]


def test_calls_that_did_not_wait_tell_nothing_of_their_host(
    spark: SparkSession, tmp_path: Path
) -> None:
    """All spans are given up at once when somebody asks for that; the next call waits."""
    with pipeline(spark, tmp_path, oal=CALLS) as running:
        for number in range(4):
            one = span("1", "CLIENT", trace_id=f"t{number}", attributes=LEGACY)
            write_segment(tmp_path / "spool", "Span", [one], str(number), number)
            running.run_available()
            assert calls(running.store, "legacy:8080") == [number, 0]
            assert running.settle(everything=True) is not None


def test_a_database_and_a_cache_are_on_the_map_with_the_first_commit(
    spark: SparkSession, tmp_path: Path
) -> None:
    """So is a host outside; a host that is not public waits for who serves the call."""
    places = {
        "db": {"db.system.name": "postgresql", "server.address": "orders-db"},
        "cache": {"db.system.name": "redis", "server.address": "redis"},
        "outside": OUTSIDE,
        "legacy": LEGACY,
    }
    spans = [span(id_, "CLIENT", attributes=place) for id_, place in places.items()]
    write_segment(tmp_path / "spool", "Span", spans, "0")
    core = core_script().read_text("utf-8").splitlines()
    oal = "\n".join(line for line in core if line.startswith("service_relation_client_"))
    with pipeline(spark, tmp_path, oal=oal) as running:
        assert len(running.run_available()) == 1
    start_s = int(EPOCH.timestamp())
    with serving(sqlite(tmp_path)) as client:
        seen = client.get("/api/v1/topology", from_=start_s, to=start_s + 60)
    names = {node["id"]: node["name"] for node in seen["nodes"]}
    edges = {(names[edge["from"]], names[edge["to"]]) for edge in seen["edges"]}
    called = ("orders-db:5432", "redis:6379", "api.pay.org:443")
    assert edges == {("shop", place) for place in called}


def test_lateness_is_that_of_spans_as_they_come(spark: SparkSession, tmp_path: Path) -> None:
    """A relation given up after its wait is not late; a span that comes late is, once."""
    now = [NOW]
    spool = tmp_path / "spool"
    call = span("1", "CLIENT", attributes={"peer.service": "far"})
    later = span("2", trace_id="t2", at=30 * MINUTE_US)
    behind = span("3", trace_id="t3", at=24 * MINUTE_US)
    given: dict[str, Any] = {"oal": RELATIONS + "svc = from(Service.*).cpm();"}
    with pipeline(spark, tmp_path, **given, clock=lambda: now[0]) as running:
        write_segment(spool, "Span", [call], "0")
        running.run_available()
        write_segment(spool, "Span", [later], "1", 1)
        running.run_available()
        assert counted(running.store, "late") == {}
        now[0] += 400
        write_segment(spool, "Span", [{**later, "trace_id": "t4"}, behind], "2", 2)
        (report,) = running.run_available()
        # The call of batch 0 went where it said, 30 minutes behind; that came in time.
        assert sum(key[0] == "rel" and "ZmFy" in key[3] for key in stored(running.store)) == 3
        assert report.stats.late == 1
        assert counted(running.store, "late") == {("Span", ""): 1}


def test_spans_do_not_wait_for_a_time_that_a_wrong_clock_has_shown(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Neither with the next batch nor without one; and ids of counted spans are kept on."""
    now = [NOW + 40 * 86_400]
    given: dict[str, Any] = {"oal": RELATIONS, "dedup_s": 60.0, "clock": lambda: now[0]}
    call = span("1", "CLIENT", attributes={"peer.service": "far"})
    with pipeline(spark, tmp_path, **given) as running:
        write_segment(tmp_path / "spool", "Span", [call], "0")
        running.run_available()
        assert running.settle() is None
        now[0] = NOW
        write_segment(tmp_path / "spool", "Span", [call, {**call, "span_id": "2"}], "1", 1)
        (report,) = running.run_available()
        assert report.stats.duplicates == 1
        assert sum(key[0] == "rel" and "ZmFy" in key[3] for key in stored(running.store)) == 3
        assert running.settle() is None
        now[0] += 301
        assert running.settle() is not None
        assert pending(tmp_path) == []
        now[0] += 40 * 86_400
        write_segment(tmp_path / "spool", "Span", [{**call, "span_id": "3"}], "2", 2)
        running.run_available()
        now[0] = NOW + 400
        assert running.settle() is not None
        assert pending(tmp_path) == []


def test_waiting_spans_are_on_the_disk_before_the_commit_that_names_them(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power failure the store has the commit; so the files must be there, too."""
    happened: list[str] = []
    sync, commit = os.fsync, Store.commit

    def note_sync(handle: int) -> None:
        happened.append(str(Path(f"/proc/self/fd/{handle}").readlink()))
        sync(handle)

    def note_commit(store: Store, batch: Any) -> Any:
        happened.append("commit")
        return commit(store, batch)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Store, "commit", note_commit)
    write_segment(tmp_path / "spool", "Span", [span("1", "CLIENT")])
    with pipeline(spark, tmp_path, oal=RELATIONS) as running:
        running.run_available()
    before = happened[: happened.index("commit")]
    (folder,) = pending(tmp_path)
    assert list(folder.iterdir())
    # The task has synced what is in the files; here it is their names.
    names = [folder, *folder.parents[:3]]
    assert names[-1] == tmp_path / "checkpoint"
    assert {str(path) for path in names} <= set(before)


def test_waiting_spans_that_are_gone_are_reported(spark: SparkSession, tmp_path: Path) -> None:
    """The batch is not made without them; with them back, the pipeline goes on."""
    spool = tmp_path / "spool"
    served = span("2", parent_span_id="1", service="stock")
    write_segment(spool, "Span", [span("1", "CLIENT")], "0")
    with pipeline(spark, tmp_path, oal=RELATIONS) as running:
        running.run_available()
        (folder,) = pending(tmp_path)
        folder.rename(tmp_path / "lost")
        write_segment(spool, "Span", [served], "1", 1)
        with pytest.raises(PipelineError, match=f"1 span that .* {folder}, but it is gone"):
            running.run_available()
        assert counted(running.store, "rows") == {("Span", ""): 1}
        folder.parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "lost").rename(folder)
        running.run_available()
        assert counted(running.store, "rows")["Span", ""] == 2
        assert len([key for key in stored(running.store) if key[0] == "rel"]) == 3
