"""The goal of the benchmark of commits, and its plot with the code before."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

pytest.importorskip("psycopg")
pytest.importorskip("numpy")

from benchmarks.commits import LARGE, NEW, OLD, ONE, Commits, Cost
from benchmarks.plots import drawing as plots
from benchmarks.plots.model import Bars

ONE_CONNECTION, WRITERS = OLD


def commits(**seconds: Sequence[float]) -> Commits:
    """Of a large batch, by ways: whole, tasks, and those of the code before."""
    names = {"whole": ONE, "tasks": NEW, "one": ONE_CONNECTION, "writers": WRITERS}
    ways = {names[way]: [Cost(value, 1.0) for value in values] for way, values in seconds.items()}
    return Commits({LARGE: ways})


def test_the_goal_is_a_rate_to_the_quicker_way_of_the_code_before() -> None:
    """In the same round; the median over the rounds."""
    result = commits(
        whole=[5.0, 5.0, 5.0],
        tasks=[2.0, 2.0, 2.0],
        one=[4.0, 9.0, 8.0],
        writers=[8.0, 5.2, 9.0],
    )
    assert result.rates(LARGE) == [2.0, 2.6, 4.0]
    (goal,) = result.goals()
    assert (goal.value, goal.limit, goal.verdict) == (2.6, 2.5, "met")


def test_without_the_code_before_there_is_no_goal() -> None:
    """Nor a panel of the plot."""
    result = commits(whole=[5.0], tasks=[2.0])
    assert result.goals() == []
    assert len(plots.plot_of("commits", {"commits": result.as_json()}).panels) == 2


def test_the_plot_shows_the_rate_to_the_code_before() -> None:
    """Its ways are peers of the others; the goal is a mark."""
    result = commits(whole=[5.0], tasks=[2.0], one=[8.0], writers=[6.0])
    document = {
        "commits": result.as_json(),
        "goals": [goal.as_json() for goal in result.goals()],
        "rates_to_old": {str(LARGE): result.rates(LARGE)},
    }
    ratios, seconds, rates = plots.plot_of("commits", document).panels
    assert isinstance(ratios, Bars)
    assert [bar.middle for bar in ratios.groups[""]] == [0.4]
    assert isinstance(seconds, Bars)
    (ways,) = seconds.groups.values()
    assert [bar.name for bar in ways if bar.ours] == [NEW]
    assert isinstance(rates, Bars)
    (bar,) = rates.groups[""]
    assert (bar.middle, bar.goal) == (3.0, 2.5)
