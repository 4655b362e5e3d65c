"""docs/telemetry.md lists the metrics that the collector gives, all of them and no others."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from batchmill import BatchQueue, BatchQueueSettings, Embedded, ThreadPolicy
from batchmill.alerts import DEMO_RULES, AlertEngine, load_rules
from batchmill.batcher import MicroBatcher
from batchmill.flows import FlowDispatcher, FlowSettings
from batchmill.oal import core_script
from batchmill.pressure import QueueThresholdSettings
from batchmill.store import open_store
from batchmill.telemetry import PrometheusCollector
from tests.docs import telemetry
from tests.docs.kit import code_in, tables
from tests.kit.threads import WAIT_S

BEGIN_WITH_THE_FIRST = {
    *(f"batchmill_alerts_{name}_notifications_total" for name in ("sent", "dropped")),
    "batchmill_alerts_waiting_notifications",
    "batchmill_alerts_requests_total",
    "batchmill_queue_refused_hand_overs_total",
    "batchmill_workers_invalid_events_total",
}
"""Their series are not there before there is something to count: what they are by is not known."""


@pytest.fixture
def page(tmp_path: Path) -> Iterator[str]:
    """The page of a process with one component of each kind, all of which have worked."""
    thresholds = QueueThresholdSettings(max_queue_size=100)
    settings = BatchQueueSettings(
        threads=ThreadPolicy.fixed(1), consumer=lambda batch: None, thresholds=thresholds
    )
    batcher: MicroBatcher[int] = MicroBatcher(lambda batch: batch, None, thresholds, name="listed")
    flows = FlowSettings(worker_count=1, flow_id=lambda signal: signal)
    with (
        BatchQueue[int]("listed", settings) as queue,
        batcher,
        FlowDispatcher[int](lambda batch: None, flows, name="listed") as dispatcher,
        Embedded(oal=core_script(), store=f"sqlite:///{tmp_path}/metrics.db", name="listed"),
        open_store(f"sqlite:///{tmp_path}/alerts.db") as store,
        AlertEngine(store, load_rules(DEMO_RULES).rules),
    ):
        dispatcher.dispatch(1)
        queue.produce(1)
        assert queue.flush(WAIT_S)
        batcher.submit(1).result(WAIT_S)
        assert batcher.flush(WAIT_S)
        pages = CollectorRegistry()
        pages.register(PrometheusCollector())
        yield generate_latest(pages).decode()


def test_every_metric_on_a_page_is_listed(page: str) -> None:
    """By its name, with its labels; and each one listed is on a page."""
    rows = tables(telemetry.PAGE, telemetry.HEADING)
    listed = {code_in(row["Prometheus"])[0]: set(code_in(row["labels"])) for row in rows}
    shown = {
        name: {label for sample in family.samples for label in sample.labels} - {"le"}
        for family in text_string_to_metric_families(page)
        for name in [family.name + ("_total" if family.type == "counter" else "")]
    }
    ours = {name: labels for name, labels in shown.items() if name in listed}
    assert ours.items() <= listed.items()
    assert listed.keys() - ours.keys() <= BEGIN_WITH_THE_FIRST
    own = re.compile(r"batchmill_(queue|batcher|thresholds|flows|workers|alerts|telemetry)_")
    assert not [name for name in shown if own.match(name) and name not in listed]
