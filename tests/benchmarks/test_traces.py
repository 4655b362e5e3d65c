"""What the benchmark of traces measures, and what it makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("opentelemetry")

from batchmill.traces import SpanKeeper
from benchmarks.plots import drawing as plots
from benchmarks.plots.model import Bars
from benchmarks.traces.__main__ import goals_of
from benchmarks.traces.batch import Batches, Sorting, Turn
from benchmarks.traces.search import BY_ID, Kept, Queries, Query


def queries(by_id_ms: float, search_ms: float) -> Queries:
    """Results with one trace by id and one search."""
    kept = Kept(spans=1_000, files=1, bytes_per_span=30.0, cpu_s_per_million=4.0)
    results = [Query(BY_ID, [by_id_ms], [1.0], [50.0]), Query("search", [search_ms], [1.0], [50.0])]
    return Queries(1.0, kept, queries=results)


def batches(*, elapsed_s: float, sorting_s: float) -> Batches:
    """Results of a round: without keeping ten seconds of each."""
    off = Turn(batches=2, seconds=10.0, cpu_s=10.0, beside_s=0.0, sorting_s=0.0)
    on = Turn(batches=2, seconds=elapsed_s, cpu_s=11.0, beside_s=0.1, sorting_s=sorting_s)
    return Batches(1_000, off=[off], on=[on])


def test_every_call_of_a_keeper_is_measured(tmp_path: Path) -> None:
    """Not the first one only; and none after that."""
    keeper = SpanKeeper(tmp_path)
    with Sorting() as sorting:
        keeper.tend()
        first_s = sorting.seconds
        keeper.tend(everything=True)
        assert sorting.seconds > first_s > 0
    keeper.tend()
    assert sorting.calls == 2


@pytest.mark.parametrize(
    ("result", "verdicts"),
    [
        (queries(100, 500), ["met", "met"]),
        (queries(101, 501), ["MISSED", "MISSED"]),
        (batches(elapsed_s=11.0, sorting_s=1.0), ["met", "met"]),
        (batches(elapsed_s=11.1, sorting_s=0.9), ["MISSED", "met"]),
        (batches(elapsed_s=9.0, sorting_s=1.1), ["met", "MISSED"]),
    ],
)
def test_goals(result: Queries | Batches, verdicts: list[str]) -> None:
    """100 ms for a trace, 500 ms for a search, a tenth of the batches for keeping."""
    goals = goals_of({"part": result})
    assert [goal.verdict for goal in goals] == verdicts


def test_the_plot_has_both_peers_and_the_cost() -> None:
    """Of either part, or of both."""
    document = {
        "queries": queries(20.0, 200.0).as_json(),
        "batch": batches(elapsed_s=10.5, sorting_s=3.0).as_json(),
    }
    of_queries, of_time, of_processor = plots.plot_of("traces", document).panels
    assert isinstance(of_queries, Bars)
    (bars, _) = of_queries.groups.values()
    assert [(bar.name, bar.middle, bar.ours) for bar in bars] == [
        ("batchmill", 20.0, True),
        ("DuckDB", 50.0, False),
    ]
    assert isinstance(of_time, Bars)
    assert isinstance(of_processor, Bars)
    assert [bar.middle for bar in of_time.groups[""]] == [10.0, 10.5]
    assert [bar.middle for bar in of_processor.groups[""]] == [10.0, 3.0]
    assert len(plots.plot_of("traces", {"queries": document["queries"]}).panels) == 1
