"""A span that is delivered twice counts once: in a batch, across batches, through restarts."""

from __future__ import annotations

import random
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from batchmill.errors import ConfigError
from batchmill.spark import BatchReport, PipelineError
from tests.kit.pipelines import (
    FEW_EXAMPLES,
    NOW,
    OF_SPANS,
    ONE_AT_A_TIME,
    START,
    Stored,
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
from tests.oracle.catalog import Row
from tests.oracle.generate import random_spans
from tests.oracle.spans import spans_to_events
from tests.oracle.topn import expected_topn

pytestmark = pytest.mark.slow

SPANS = random_spans(5, 90, start=START, days=1)
SMALL = "n = from(Service.*).count(); slow = from(Service.latency).max();"
SAME = ("Span", "same trace and span id")


def wanted(spans: list[Row], oal: str = OF_SPANS) -> Stored:
    """What the oracle makes of spans, each of them once."""
    return expected(spans_to_events(spans).events, oal)


def seen(folder: Path) -> list[Path]:
    """The files of ids that there are."""
    return sorted((folder / "checkpoint" / "state").glob("*/ids"))


def counts(store: Any) -> tuple[int, int]:
    """Spans that counted, and that were dropped."""
    return counted(store, "rows")["Span", ""], counted(store, "duplicates").get(SAME, 0)


@pytest.mark.system
@settings(FEW_EXAMPLES, max_examples=4)
@given(pieces=st.integers(1, 4), share=st.sampled_from((0.1, 1.0)), seed=st.integers(0, 2**32 - 1))
def test_any_duplication_in_any_split_equals_each_span_once(
    spark: SparkSession, pieces: int, share: float, seed: int
) -> None:
    """Some or all spans up to three times more, shuffled: values, TopN, counters stay the same."""
    rng = random.Random(seed)
    again = [row for row in SPANS if rng.random() < share for _ in range(rng.randint(1, 3))]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        deal({"Span": [*SPANS, *again]}, folder / "spool", pieces, seed)
        given_: dict[str, Any] = {"oal": OF_SPANS, "settings": ONE_AT_A_TIME, "dedup_s": 600}
        with pipeline(spark, folder, **given_) as running:
            assert len(running.run_available()) == pieces
            running.settle(everything=True)
            assert differences(stored(running.store), wanted(SPANS)) == []
            assert top_of(running.store) == top_expected(expected_topn(SPANS))
            assert counts(running.store) == (len(SPANS), len(again))
            assert counted(running.store, "quarantined") == {}


@pytest.mark.system
def test_of_spans_that_share_an_id_the_same_one_counts(spark: SparkSession, tmp_path: Path) -> None:
    """In one batch: whichever file they lie in, and in which order."""
    odd = [span("1", us=us * 1000, attributes={"n": str(us)}) for us in (7, 5, 9)]
    same = [span("2", us=3000, attributes={"n": text}) for text in "ba"]
    results = []
    for number, rows in enumerate(([*odd, *same], [*same[::-1], *odd[::-1]])):
        folder = tmp_path / str(number)
        for place, row in enumerate(rows):
            write_segment(folder / "spool", "Span", [row], str(place), place)
        with pipeline(spark, folder, oal=SMALL, dedup_s=60) as running:
            (report,) = running.run_available()
            assert (report.stats.rows, report.stats.duplicates) == (2, 3)
            results.append(stored(running.store))
    assert results[0] == results[1]


def test_the_first_to_arrive_counts(spark: SparkSession, tmp_path: Path) -> None:
    """Across batches; and a span without ids is never a duplicate."""
    nobody = span("", trace_id="")
    rows = [span("1", us=9000), span("1", us=5000)]
    for number, row in enumerate(rows):
        write_segment(tmp_path / "spool", "Span", [row, nobody, nobody], str(number), number)
    with pipeline(spark, tmp_path, oal=SMALL, dedup_s=60, settings=ONE_AT_A_TIME) as running:
        running.run_available()
        assert counts(running.store) == (5, 1)
        assert {value for key, value in stored(running.store).items() if key[0] == "slow"} == {9}


@pytest.mark.system
def test_the_window_ends(spark: SparkSession, tmp_path: Path) -> None:
    """As time passes, from the first arrival on; old ids are dropped, the files stay few."""
    now = [NOW]
    spool = tmp_path / "spool"
    given_: dict[str, Any] = {"oal": SMALL, "dedup_s": 600, "clock": lambda: now[0]}
    with pipeline(spark, tmp_path, **given_) as running:
        for number, later in enumerate((0, 300, 599, 601, 700, 720)):
            now[0] = NOW + later
            rows = [span("1"), span(str(number), trace_id="t2")]
            write_segment(spool, "Span", rows, str(number), number)
            running.run_available()
        # At 601 it counted again, and after that it was that one's double.
        assert counts(running.store) == (8, 4)
        assert len(seen(tmp_path)) == 3


@pytest.mark.parametrize("days", [40, pytest.param(-40, marks=pytest.mark.system)])
def test_a_clock_that_is_wrong_for_a_while_forgets_nothing(
    spark: SparkSession, tmp_path: Path, days: int
) -> None:
    """Nor does it keep ids for longer; also where a batch without spans comes first."""
    wrong = NOW + days * 86_400
    steps: list[tuple[float, str, list[Row]]] = [
        (NOW, "Span", [span("1")]),
        (wrong, "Endpoint", endpoint_events(1)),
        (wrong + 5, "Span", [span("1"), span("2")]),
        (NOW + 10, "Span", [span("1"), span("2"), span("3")]),
    ]
    now = [NOW]

    def go_on(report: BatchReport | None = None) -> None:
        if report is not None and not report.stats.segments:
            return  # a batch in which only time has passed
        if not steps:
            running.ask_to_stop()
            return
        now[0], source, rows = steps.pop(0)
        write_segment(tmp_path / "spool", source, rows, str(len(steps)), -len(steps))

    given_: dict[str, Any] = {"oal": SMALL + "e = from(Endpoint.*).count();", "dedup_s": 600}
    given_ |= {"clock": lambda: now[0], "on_batch": go_on}
    with pipeline(spark, tmp_path, **given_) as running:
        go_on()
        running.start(0.05)
        running.await_end()
        # What comes while the clock is behind is from its future.
        assert counts(running.store) == (3, 3 if days > 0 else 1)
    with closing(sqlite3.connect(tmp_path / "metrics.db")) as database:
        arrived_s = [ms / 1000 - NOW for (ms,) in database.execute("SELECT arrived_ms FROM carry")]
    assert -60 < min(arrived_s) <= max(arrived_s) < 60


@pytest.mark.system
def test_ids_live_through_one_restart(spark: SparkSession, tmp_path: Path) -> None:
    """However long it took, or the clock says; not through two, or a daily job would keep all."""
    now = [NOW]
    given_: dict[str, Any] = {"oal": SMALL, "dedup_s": 600, "clock": lambda: now[0]}
    for number, again in enumerate(([], [0], [1, 0])):
        with pipeline(spark, tmp_path, **given_) as running:
            rows = [span(str(name)) for name in (number, *again)]
            write_segment(tmp_path / "spool", "Span", rows, str(number), number)
            running.run_available()
            assert counts(running.store)[1] == min(number, 1) + (number == 2)
        now[0] += 40 * 86_400


@pytest.mark.system
def test_a_batch_that_spark_did_not_log_is_not_a_duplicate(
    spark: SparkSession, tmp_path: Path
) -> None:
    """It fails after its commit, and comes again in another pipeline; then its spans do."""

    def fail(report: BatchReport) -> None:
        raise KeyError("pulled the plug")

    spool = tmp_path / "spool"
    write_segment(spool, "Span", SPANS[:60], "0")
    given_: dict[str, Any] = {"oal": OF_SPANS, "settings": ONE_AT_A_TIME, "dedup_s": 600}
    with pipeline(spark, tmp_path, **given_, on_batch=fail) as running:
        with pytest.raises(KeyError, match="pulled the plug"):
            running.run_available()
        assert counts(running.store) == (60, 0)
    write_segment(spool, "Span", SPANS, "again", 1)
    with pipeline(spark, tmp_path, **given_) as running:
        assert [report.applied for report in running.run_available()] == [False, True]
        running.settle(everything=True)
        assert counts(running.store) == (90, 60)
        assert differences(stored(running.store), wanted(SPANS)) == []


def test_a_batch_that_failed_before_its_commit_leaves_no_ids(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its spans come again, and do not count as duplicates of themselves."""
    write_segment(tmp_path / "spool", "Span", SPANS)
    with pipeline(spark, tmp_path, oal=SMALL, dedup_s=600) as running:

        def fail(batch: Any) -> Any:
            raise ArithmeticError("pulled the plug")

        monkeypatch.setattr(running.store, "commit", fail)
        with pytest.raises(ArithmeticError, match="pulled the plug"):
            running.run_available()
        monkeypatch.undo()
        assert len(seen(tmp_path)) == 1
        running.run_available()
        assert counts(running.store) == (90, 0)
        assert len(seen(tmp_path)) == 1


@pytest.mark.system
def test_lost_ids_are_reported_and_dropped_without_dedup(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Duplicates would count silently; without dedup the index is not needed, and removed."""
    write_segment(tmp_path / "spool", "Span", SPANS[:10], "0")
    with pipeline(spark, tmp_path, oal=SMALL, dedup_s=600) as running:
        running.run_available()
        (folder,) = seen(tmp_path)
        folder.rename(tmp_path / "lost")
        write_segment(tmp_path / "spool", "Span", SPANS[:20], "1", 1)
        with pytest.raises(PipelineError, match=r"10 ids of spans .* it is gone.*counted again"):
            running.run_available()
        (tmp_path / "lost").rename(folder)
        running.run_available()
        assert counts(running.store) == (20, 10)
    write_segment(tmp_path / "spool", "Span", SPANS[:20], "2", 2)
    with pipeline(spark, tmp_path, oal=SMALL) as running:
        running.run_available()
        assert counts(running.store) == (40, 10)
        assert seen(tmp_path) == []


@pytest.mark.system
def test_a_backfill_counts_each_span_once(spark: SparkSession, tmp_path: Path) -> None:
    """However long it takes; its index is removed in the end."""
    now = [NOW]

    def clock() -> float:
        now[0] += 3600
        return now[0]

    deal({"Span": [*SPANS, *SPANS[:30]]}, tmp_path / "old", 2)
    given_: dict[str, Any] = {"oal": OF_SPANS, "settings": ONE_AT_A_TIME, "dedup_s": 60}
    with pipeline(spark, tmp_path, **given_, clock=clock) as running:
        running.backfill(tmp_path / "old")
        assert counts(running.store) == (90, 30)
        assert differences(stored(running.store), wanted(SPANS)) == []
    assert list((tmp_path / "checkpoint").glob("backfill-*/state/*")) == []


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), True, 1e9])
def test_a_window_that_is_none_is_refused(tmp_path: Path, seconds: Any) -> None:
    """Before Spark is started."""
    with pytest.raises(ConfigError, match="dedup_s"):
        pipeline(None, tmp_path, oal=SMALL, dedup_s=seconds)  # type: ignore[arg-type]
