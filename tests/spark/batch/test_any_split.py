"""Any split, any order: the same events make the same store, however they arrive."""

from __future__ import annotations

import random
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession

from batchmill.oal import load
from tests.kit.pipelines import (
    EVERY_FUNCTION_OF_TWO,
    FEW_EXAMPLES,
    OF_SPANS,
    ONE_AT_A_TIME,
    START,
    TWO_SOURCES,
    States,
    Stored,
    contents,
    counted,
    deal,
    differences,
    every_events,
    expected,
    pipeline,
    top_expected,
    top_of,
    write_segment,
)
from tests.oracle.catalog import Row
from tests.oracle.generate import random_spans
from tests.oracle.spans import spans_to_events
from tests.oracle.topn import expected_topn

pytestmark = pytest.mark.slow(45)

UNFILTERED = "\n".join(
    line
    for line in EVERY_FUNCTION_OF_TWO.splitlines()
    if line.startswith("ep_") and "filter" not in line
)
"""Each function of whole numbers once or twice."""


def in_pieces(
    spark: SparkSession, events: Mapping[str, Sequence[Row]], pieces: int, seed: int
) -> tuple[States, Stored]:
    """The store after those events in so many pieces, each segment of which is a batch."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        deal(events, folder / "spool", pieces, seed)
        oal = EVERY_FUNCTION_OF_TWO
        with pipeline(spark, folder, oal=oal, settings=ONE_AT_A_TIME) as running:
            assert len(running.run_available()) >= pieces
            return contents(running.store)


@pytest.fixture(scope="module")
def events() -> dict[str, list[Row]]:
    """Rows of four days, a third of them late by up to that."""
    return every_events(11, TWO_SOURCES, 60, days=4, late_share=0.3)


@pytest.fixture(scope="module")
def in_one_batch(
    spark: SparkSession, events: dict[str, list[Row]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[States, Stored]:
    """The store after all events at once."""
    folder = tmp_path_factory.mktemp("once")
    deal(events, folder / "spool", 1)
    with pipeline(spark, folder, oal=EVERY_FUNCTION_OF_TWO) as running:
        assert len(running.run_available()) == 1
        return contents(running.store)


def test_one_batch_equals_the_oracle(
    events: dict[str, list[Row]], in_one_batch: tuple[States, Stored]
) -> None:
    """What the other tests compare with is right."""
    assert differences(in_one_batch[1], expected(events, EVERY_FUNCTION_OF_TWO)) == []


@pytest.mark.system
@settings(FEW_EXAMPLES, max_examples=4)
@given(pieces=st.integers(2, 3), seed=st.integers(0, 2**32 - 1))
def test_any_split_in_any_order_makes_the_same_store(
    spark: SparkSession,
    events: dict[str, list[Row]],
    in_one_batch: tuple[States, Stored],
    pieces: int,
    seed: int,
) -> None:
    """Every function: states and values do not depend on how rows were cut and shuffled."""
    states, values = in_pieces(spark, events, pieces, seed)
    assert states == in_one_batch[0]
    assert differences(values, in_one_batch[1]) == []


@pytest.mark.system
def test_fifty_batches_make_the_same_store(
    spark: SparkSession, events: dict[str, list[Row]], in_one_batch: tuple[States, Stored]
) -> None:
    """The same in fifty batches of one or two rows each, every function of whole numbers."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        deal({"Endpoint": events["Endpoint"]}, folder / "spool", 50, 5)
        with pipeline(spark, folder, oal=UNFILTERED, settings=ONE_AT_A_TIME) as running:
            assert len(running.run_available()) == 50
            states, values = contents(running.store)
    names = {metric.name for metric in load(UNFILTERED)}
    assert {key[0] for key in values} == names
    wanted_states, wanted = in_one_batch
    assert states == {key: state for key, state in wanted_states.items() if key[0] in names}
    assert (
        differences(values, {key: value for key, value in wanted.items() if key[0] in names}) == []
    )


@pytest.mark.system
@settings(FEW_EXAMPLES, max_examples=2)
@given(pieces=st.integers(2, 3), seed=st.integers(0, 2**32 - 1))
def test_spans_of_one_trace_may_come_in_different_batches(
    spark: SparkSession, pieces: int, seed: int
) -> None:
    """Whoever called whom is found across batches, once; TopN and counters are the same, too."""
    spans = random_spans(5, 120, start=START, days=1)
    made = spans_to_events(spans)
    with tempfile.TemporaryDirectory() as folder:
        deal({"Span": spans}, Path(folder) / "spool", pieces, seed)
        with pipeline(spark, Path(folder), oal=OF_SPANS, settings=ONE_AT_A_TIME) as running:
            assert len(running.run_available()) == pieces
            running.settle(everything=True)
            _, values = contents(running.store)
            top = top_of(running.store)
            unresolved = sum(counted(running.store, "unresolved").values())
    assert differences(values, expected(made.events, OF_SPANS)) == []
    assert top == top_expected(expected_topn(spans))
    assert unresolved == made.counters["unresolved"]


@pytest.mark.system
def test_waiting_spans_survive_a_restart_between_batches(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Children in the first run, parents in the second, with another pipeline: joined, once."""
    spans = random_spans(6, 120, start=START, days=1)
    random.Random(3).shuffle(spans)
    served = [span for span in spans if span["kind"] == "SERVER"]
    others = [span for span in spans if span["kind"] != "SERVER"]
    for number, rows in enumerate((served, others)):
        write_segment(tmp_path / "spool", "Span", rows, str(number), number)
        with pipeline(spark, tmp_path, oal=OF_SPANS) as running:
            assert len(running.run_available()) == 1
            if number:
                running.settle(everything=True)
                actual = contents(running.store)[1]
    assert differences(actual, expected(spans_to_events(spans).events, OF_SPANS)) == []


@pytest.mark.system
def test_a_settle_waits_for_the_batch_that_was_begun(spark: SparkSession, tmp_path: Path) -> None:
    """Which spans expire is decided after the running batch, never while it is being made."""
    spans = random_spans(9, 80, start=START, days=1)
    for number in range(2):
        write_segment(tmp_path / "spool", "Span", spans[number::2], str(number), number)
    settled: list[object] = []
    settling = threading.Thread(target=lambda: settled.append(running.settle(everything=True)))

    def begin(source: str, rows: DataFrame) -> None:
        if running.store.counters() and not settling.ident:
            settling.start()
            settling.join(0.2)
            assert settling.is_alive()

    with pipeline(spark, tmp_path, oal=OF_SPANS, settings=ONE_AT_A_TIME, on_rows=begin) as running:
        assert len(running.run_available()) >= 2
        settling.join()
        actual = contents(running.store)[1]
        let_go = sum(counted(running.store, "unresolved").values())
    whole = spans_to_events(spans)
    assert settled[0] is not None
    assert let_go == whole.counters["unresolved"]
    assert differences(actual, expected(whole.events, OF_SPANS)) == []


@pytest.mark.system
def test_spans_wait_no_longer_than_they_should(spark: SparkSession, tmp_path: Path) -> None:
    """After span_wait_s the next batch lets go of what came before it, in passing."""
    spans = random_spans(4, 60, start=START, days=1)
    now = [1_000_000_000.0 + START.timestamp()]
    with pipeline(spark, tmp_path, oal=OF_SPANS, clock=lambda: now[0]) as running:
        write_segment(tmp_path / "spool", "Span", spans[:30], "0", 0)
        running.run_available()
        assert running.settle() is None
        now[0] += running.settings.span_wait_s
        write_segment(tmp_path / "spool", "Span", spans[30:], "1", 1)
        running.run_available()
        assert sum(counted(running.store, "unresolved").values()) > 0
        assert len(list((tmp_path / "checkpoint" / "state").iterdir())) == 1
