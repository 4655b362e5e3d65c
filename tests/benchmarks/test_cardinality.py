"""The goals of the benchmark of names without end, and its plot."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

pytest.importorskip("opentelemetry")

from benchmarks.cardinality import PAGES, Sample, goals_of
from benchmarks.plots import drawing as plots
from benchmarks.plots.model import Curves

LIMIT = 100_000


def run(count: int = 30, **last: Any) -> list[Sample]:
    """Samples of a run that is as it should be, but for the last ones: those have what is given."""
    good: dict[str, Any] = {
        "rss_mib": {"pipeline": 300.0, "web": 100.0},
        "store_mib": 200.0,
        "entities": LIMIT,
        "counted": 1,
        "pages_s": dict.fromkeys(PAGES, 0.2),
    }
    return [
        Sample(float(number), **good | (last if number >= count - 2 else {}))
        for number in range(count)
    ]


def missed(samples: list[Sample]) -> list[tuple[str, float | None]]:
    """The goals that a run misses, and what was measured."""
    goals = goals_of(samples, LIMIT)
    return [(goal.what, goal.value) for goal in goals if goal.verdict == "MISSED"]


def test_a_run_that_stays_as_it_is_misses_no_goal() -> None:
    """Nor does one of a few samples, or one with a slow page."""
    assert missed(run()) == []
    assert missed(run(2)) == []
    slow = run()
    slow[7].pages_s = slow[7].pages_s | {"topology": 9.0}
    assert missed(slow) == []


@pytest.mark.parametrize(
    ("last", "what", "value"),
    [
        (
            {"rss_mib": {"pipeline": 300.0, "web": 190.0}},
            "memory of web, last third of the run",
            190.0,
        ),
        ({"store_mib": 400.0}, "the store", 400.0),
        ({"entities": LIMIT + 1}, "entities in the store", LIMIT + 1),
        (
            {"pages_s": dict.fromkeys(PAGES, 0.2) | {"topology": 1.5}},
            "the page topology, 95 % of the answers",
            1.5,
        ),
    ],
)
def test_growth_misses_a_goal(last: dict[str, Any], what: str, value: float) -> None:
    """Memory of one process, bytes and entities of the store, the time of a page."""
    assert missed(run(**last)) == [(what, value)]


def test_the_plot_has_each_process_and_page() -> None:
    """Over the whole run, what comes after the flood included; a process may come later."""
    early, late = run(3), run(2)
    late[0].rss_mib = late[0].rss_mib | {"export": 50.0}
    document = {
        "samples": [asdict(sample) for sample in early],
        "afterwards": [asdict(sample) for sample in late],
    }
    panels = plots.plot_of("cardinality", document).panels
    memory, store, entities, pages = (panel for panel in panels if isinstance(panel, Curves))
    assert list(memory.lines) == ["export", "pipeline", "web"]
    assert [len(points) for points in memory.lines.values()] == [1, 5, 5]
    assert [len(points) for points in (store.lines["store"], entities.lines["entities"])] == [5, 5]
    assert list(pages.lines) == list(PAGES)
