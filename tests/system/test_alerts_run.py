"""The newcomer's minute: a demo run with real Spark breaks a service, and its alert fires."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from batchmill.run import Home
from batchmill.store import open_store
from tests.kit.jvm import java_missing, jvm_options
from tests.kit.pipelines import QUICK_SPARK
from tests.kit.processes import Life, wait_for_json
from tests.kit.servers.alertmanager import Webhooks

pytest.importorskip("pyspark")

FIRES = r"alert service_errors fires: catalogue: only \d.* % of its calls succeeded in a minute"


@pytest.mark.timeout(600)
@pytest.mark.skipif(java_missing() is not None, reason=java_missing() or "")
def test_a_demo_of_a_minute_shows_an_alert(tmp_path: Path) -> None:
    """It is said in the terminal, sent to a webhook, and in the store; the run still balances."""
    home = Home(tmp_path / "home")
    with Webhooks() as hooks:
        command = [
            *(sys.executable, "-m", "batchmill", "run", "--demo=61", f"--home={home.folder}"),
            *("--http-port=0", "--grpc-port=0", "--no-web", "--master=local[2]"),
            *(f"--conf={name}={value}" for name, value in QUICK_SPARK.items()),
        ]
        environment = {
            **os.environ,
            "SPARK_SUBMIT_OPTS": jvm_options(),
            "BATCHMILL_ALERTS_TO": hooks.address,
        }
        with Life(command, tmp_path / "errors", environment) as life:
            life.must_hear("OpenTelemetry: http://127.0.0.1:.*")
            wait_for_json(home.ingest, "acknowledged_spans", timeout_s=300)
            life.must_hear(FIRES)
            life.end(0)
        assert ("firing", "service_errors", "catalogue") in hooks.alerts()
    assert any(line.startswith("balance: ") for line in life.lines)
    with open_store(home.store_url, create=False) as store:
        episodes = store.alert_episodes(0, 2**40)
    assert "catalogue" in [one.entity_name for one in episodes if one.rule == "service_errors"]
