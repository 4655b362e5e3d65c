"""A soak of under a minute: the same parts as ``make soak``, so that it does not rot."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from tests.kit.jvm import java_missing, jvm_options

pytest.importorskip("pyspark")
pytest.importorskip("grpc")
pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("uvicorn")

from tests.kit.pipelines import QUICK_SPARK
from tests.kit.processes import Life
from tests.soak.report import plot, read_samples, write
from tests.soak.schedule import Plan, Traffic
from tests.soak.soak import run_soak
from tests.soak.stage import Clock

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(java_missing() is not None, reason=java_missing() or ""),
]

LEFT_OUT = frozenset({"machine clock", "postgres"})
"""Of these, ``make soak`` has enough; a second Spark, for PostgreSQL, takes too long here."""
PLAN = Plan(
    seconds=40,
    seed=2,
    traffic=Traffic(spans_per_s=500, burst=4, burst_s=5, every_s=20),
    without=LEFT_OUT,
    spacing_s=3,
    calm_start_s=4,
    calm_end_s=4,
    longest_s=4,
)


def test_the_clock_of_a_process_is_moved_while_it_runs(tmp_path: Path) -> None:
    """The wall clock alone: how long it sleeps does not change."""
    source = """
import sys, time
for line in sys.stdin:
    start = time.monotonic()
    time.sleep(0.01)
    assert 0.01 <= time.monotonic() - start < 60
    print(round(time.time()), flush=True)
"""
    clock = Clock(tmp_path)
    with Life([sys.executable, "-c", source], env={**os.environ, **clock.environment}) as process:
        for seconds in (0, 40 * 86_400, -40 * 86_400, 0):
            clock.set(seconds)
            process.tell("now")
            process.must_hear(r"\d+")
            assert abs(int(process.lines[-1]) - time.time() - seconds) < 60


def test_a_short_soak_keeps_its_books(tmp_path: Path) -> None:
    """Kills, stops, a full disk, wrong clocks, bad peers and strangers: the balance is equal."""
    lines: list[str] = []
    options = [f"--conf={key}={value}" for key, value in QUICK_SPARK.items()]
    environment = {"SPARK_SUBMIT_OPTS": jvm_options()}
    result = run_soak(
        PLAN, tmp_path, lines.append, options=options, env=environment, side_road=False
    )
    report = "\n".join([*lines, *result.lines()])
    assert result.problems == [], report
    assert len(result.events) >= 8, report
    write(result, tmp_path / "out")
    panels = plot(result.summary(), read_samples(tmp_path / "out")).panels
    assert {"Memory", "Files", "Bytes", "Pages"} <= {panel.title for panel in panels}
