"""The service in examples/telemetry_prometheus, scraped by a real Prometheus."""

from __future__ import annotations

import functools
import os
import re
import signal
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest

from batchmill.telemetry import prometheus_names
from examples.telemetry_prometheus.__main__ import PORT
from tests.kit.files import ROOT
from tests.kit.processes import Life
from tests.kit.servers.prometheus import parsed, running_prometheus
from tests.kit.threads import WAIT_S, until

yaml = pytest.importorskip("yaml")
FOLDER = ROOT / "examples" / "telemetry_prometheus"


@pytest.mark.slow
@pytest.mark.system
def test_a_prometheus_scrapes_the_service(tmp_path: Path) -> None:
    """Queue, thresholds, micro-batcher and flows are there, and Prometheus computes rates of them.

    The service ends in order on SIGTERM.
    """
    command = [sys.executable, "-W", "error", "-m", "examples.telemetry_prometheus", "--port=0"]
    with Life(command, log=tmp_path / "log") as service:
        service.must_hear(r"http://.*/metrics; Ctrl-C ends it")
        target = service.lines[0].removeprefix("http://").partition("/")[0]
        with running_prometheus(tmp_path / "prometheus", target) as prometheus:

            def positive(query: str) -> bool:
                return any(value > 0 for _, value in prometheus.query(query))

            for query in (
                'rate(batchmill_queue_consumed_items_total{queue="views"}[30s])',
                'rate(batchmill_batcher_succeeded_items_total{batcher="warehouse"}[30s])',
                'rate(batchmill_flows_completed_flows_total{flows="orders"}[30s])',
                'batchmill_thresholds_limit{thresholds="warehouse",level="critical"}',
                "rate(batchmill_batcher_backend_duration_seconds_sum[30s])",
            ):
                until(functools.partial(positive, query), query)
        with urlopen(f"http://{target}/metrics", timeout=WAIT_S) as response:
            names = {name for name, _ in parsed(response.read().decode())}
        for kind in ("queue", "batcher", "thresholds", "flows"):
            assert f"batchmill_{kind}_depth" in names
        os.kill(service.pid, signal.SIGTERM)
        service.must_hear("^ended$")
        service.end()
    assert (tmp_path / "log").read_text() == ""


def test_the_configuration_scrapes_the_service_where_it_is() -> None:
    """And the questions in it ask for metrics that there are."""
    text = (FOLDER / "prometheus.yml").read_text("utf-8")
    (job,) = yaml.safe_load(text)["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"127.0.0.1:{PORT}"]}]
    named = set(re.findall(r"batchmill_\w+", text))
    assert len(named) > 5
    assert named <= prometheus_names()
