"""An Embedded in the registry of the process: what became of its events, beside its queues."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

from prometheus_client import CollectorRegistry, generate_latest

from batchmill.telemetry import PrometheusCollector
from tests.kit.servers.prometheus import parsed
from tests.kit.threads import WAIT_S
from tests.workers.kit import MillSale, MillVisit, embedded


def shown(name: str) -> dict[str, float]:
    """The values of an Embedded without further labels, by the name of the metric."""
    pages = CollectorRegistry()
    pages.register(PrometheusCollector())
    prefix, own = "batchmill_workers_", frozenset({("workers", name)})
    series = parsed(generate_latest(pages).decode())
    return {
        metric.removeprefix(prefix): value
        for (metric, labels), value in series.items()
        if metric.startswith(prefix) and labels == own
    }


def test_events_are_counted_from_emit_to_the_store(tmp_path: Path) -> None:
    """Accepted is committed and waiting; when it is closed the counters stay."""
    with embedded(f"sqlite:///{tmp_path}/metrics.db", name="till", l2_period_s=3600) as mill:
        mill.emit_many([MillSale("a", 1), MillSale("b", 10)])
        mill.emit(MillVisit("a", 1.5))
        before = shown("till")
        assert mill.flush(WAIT_S)
        after = shown("till")
    closed = shown("till")
    assert (before["accepted_events_total"], before["waiting_events"]) == (2, 2)
    assert before["unused_events_total"] == 1
    assert (after["committed_events_total"], after["waiting_events"]) == (2, 0)
    assert after["commits_total"] >= 1
    assert closed["committed_events_total"] == 2
    assert "waiting_events" not in closed


def test_a_second_one_of_the_same_name_goes_on(tmp_path: Path) -> None:
    """As it is for queues: the total of the application."""
    for _ in range(2):
        with embedded(f"sqlite:///{tmp_path}/metrics.db", name="kiosk") as mill:
            mill.emit(MillSale("a", 1))
    assert shown("kiosk")["committed_events_total"] == 2
