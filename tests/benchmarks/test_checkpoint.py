"""The goals of the benchmark of checkpoints with a long past, and its plot."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

pytest.importorskip("opentelemetry")

from benchmarks.checkpoint import AGAIN, NEW, OLD, Start, goals_of
from benchmarks.plots import drawing as plots
from benchmarks.plots.model import Bars

START = Start(checkpoint=NEW, start_s=40.0, driver_mib=100.0, jvm_mib=500.0, batches_s=[1.0, 2.0])


def starts(**old: Any) -> list[Start]:
    """A new checkpoint, one of version 1 with what is given, and what that has become."""
    good = replace(START, start_s=30.0)
    return [START, replace(good, checkpoint=OLD, **old), replace(good, checkpoint=AGAIN)]


def missed(**old: Any) -> list[str]:
    """The goals that are missed."""
    return [goal.what for goal in goals_of(starts(**old)) if goal.verdict == "MISSED"]


@pytest.mark.parametrize(
    ("old", "what"),
    [
        ({"start_s": 30.1}, "version 1: start to the first commit"),
        ({"driver_mib": 185.0}, "version 1: peak memory of the driver's Python"),
        ({"jvm_mib": 665.0}, "version 1: peak memory of the JVM"),
        ({"batches_s": [2.0, 3.0]}, "version 1: a batch, median"),
    ],
)
def test_a_long_past_may_cost_little(old: dict[str, Any], what: str) -> None:
    """30 s for a start, however long a new checkpoint takes; memory and batches beside a new one.

    A slack is for small figures."""
    assert missed() == []
    assert missed(**old) == [what]


def test_the_plot_has_each_start() -> None:
    """The goal is that of a start; the new checkpoint is what the others are compared with."""
    document = {
        "names": 1_000,
        "starts": [asdict(start) for start in starts()],
        "goals": [goal.as_json() for goal in goals_of(starts())],
    }
    all_panels = plots.plot_of("checkpoint", document).panels
    panels = [panel for panel in all_panels if isinstance(panel, Bars)]
    assert len(panels) == len(all_panels) == 4
    for panel in panels:
        bars = panel.groups[""]
        assert [(bar.name, bar.ours) for bar in bars] == [(NEW, False), (OLD, True), (AGAIN, True)]
    assert panels[0].goal == 30
