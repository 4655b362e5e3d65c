"""The newcomer's minute: a demo run with real Spark, its alert, and the files that it leaves."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import pytest

from batchmill.run import Home
from batchmill.sources import Grain
from batchmill.store import open_store
from tests.kit.files import ROOT
from tests.kit.jvm import java_missing, jvm_options
from tests.kit.pipelines import QUICK_SPARK
from tests.kit.processes import Life, wait_for_json
from tests.kit.servers.alertmanager import Webhooks
from tests.kit.servers.browser import find_chromium
from tests.run.test_home import BOUNDS, check_home
from tests.web.pages_kit import serving

for needed in ("grpc", "opentelemetry.exporter.otlp.proto.http", "pyspark", "uvicorn"):
    pytest.importorskip(needed)

pytestmark = [
    pytest.mark.slow(90),
    pytest.mark.timeout(600),
    pytest.mark.skipif(java_missing() is not None, reason=java_missing() or ""),
]

FIRES = r"alert service_errors fires: catalogue: only \d.* % of its calls succeeded in a minute"
NOT_ALWAYS = {
    *(".*.tmp", "checkpoint/.*.tmp", "run/.*.tmp", "traces/.*.tmp", "remote-write-<id>.json"),
    *("spool/<type>/*.parquet", "spool/<type>/.*.tmp", "spool-quarantine/.<stream>-<batch>/**"),
    *("checkpoint/kafka/<batch>/**", "checkpoint/backfill-<name>/**", "traces/hour=*/.*.part"),
    *("metrics.db-wal", "metrics.db-shm", "traces/.incoming/*.parquet", "traces/.change.json"),
    *("traces/.incoming/.*.part", "traces/.export.lock", "tmp/batchmill-<id>/**"),
}
"""Files that a run does not leave when it ends as it should, or has no use for."""


class Demo(NamedTuple):
    """What a demo run left."""

    home: Home
    lines: Sequence[str]
    alerts: Sequence[tuple[str, str, str]]
    """Sent to a webhook."""


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """A run of a minute: all parts run, one segment is broken, and a writer has died before."""
    folder = tmp_path_factory.mktemp("demo")
    home = Home(folder / "home")
    home.prepare()
    (home.spool / "Span").mkdir()
    (home.spool / "Span" / "broken.parquet").write_bytes(b"broken")
    (home.spool / "Span" / ".1-2.parquet.tmp").touch()
    command = [
        *(sys.executable, "-m", "batchmill", "run", "--demo=61", f"--home={home.folder}"),
        *("--http-port=0", "--grpc-port=0", "--web-port=0", "--master=local[2]"),
        *("--export-to=prometheus://127.0.0.1:0", "--export-to=otlp+grpc://127.0.0.1:9"),
        *(f"--conf={name}={value}" for name, value in QUICK_SPARK.items()),
    ]
    with Webhooks() as hooks:
        environment = {
            **os.environ,
            "SPARK_SUBMIT_OPTS": jvm_options(),
            "BATCHMILL_ALERTS_TO": hooks.address,
        }
        with Life(command, folder / "errors", environment) as life:
            life.must_hear(".*OpenTelemetry: http://127.0.0.1:.*")
            wait_for_json(home.ingest, "acknowledged_spans", timeout_s=300)
            life.must_hear("the demo's traffic is over: .*")
            life.end(0)
        return Demo(home, life.lines, hooks.alerts())


def test_a_demo_of_a_minute_shows_an_alert(demo: Demo) -> None:
    """It is said in the terminal, sent to a webhook, and in the store; the run still balances."""
    assert any(re.fullmatch(FIRES, line) for line in demo.lines)
    assert ("firing", "service_errors", "catalogue") in demo.alerts
    assert any(line.startswith("balance: ") for line in demo.lines)
    with open_store(demo.home.store_url, create=False) as store:
        episodes = store.alert_episodes(0, 2**40)
    assert "catalogue" in [one.entity_name for one in episodes if one.rule == "service_errors"]


def test_a_run_leaves_only_files_whose_bound_is_known(demo: Demo) -> None:
    """Each is in the table of the documentation, and no larger and no more than it says."""
    home = demo.home
    used = check_home(home.folder)
    assert BOUNDS.keys() - used <= NOT_ALWAYS
    assert not (home.spool / "Span" / ".1-2.parquet.tmp").exists()


def test_the_script_takes_the_pictures_of_the_documentation(demo: Demo, tmp_path: Path) -> None:
    """All of them, from what the run left; none if the service is not red in the overview."""
    pytest.importorskip("playwright.sync_api")
    find_chromium()
    with open_store(demo.home.store_url, create=False) as store:
        episodes = store.alert_episodes(0, 2**40)
        success = store.values("service_sla")
    [ended_s] = [
        one.starts_s
        for one in episodes
        if (one.rule, one.entity_name) == ("service_errors", "catalogue")
    ]
    minute = f"--incident=from={ended_s - 60}&to={ended_s}"
    bucket = Grain.MINUTE.bucket(datetime.fromtimestamp(ended_s - 60, UTC))
    # Calls of others fail at times, too.
    healthy = [
        value.entity_name for value in success if (value.bucket, value.value) == (bucket, 10_000)
    ]
    with serving(tmp_path, f"--home={demo.home.folder}") as (address, _):

        def take(*given: str) -> subprocess.CompletedProcess[str]:
            script = (sys.executable, str(ROOT / "scripts" / "screenshots.py"), address)
            return subprocess.run(
                [*script, f"--into={tmp_path}", minute, *given],
                check=False,
                capture_output=True,
                text=True,
            )

        refused = take(f"--service={healthy[0]}", "--wait=1")
        assert refused.returncode == 1
        assert f"{healthy[0]} is not red" in refused.stderr
        assert not list(tmp_path.glob("*.png"))
        taken = take("--range=from=now-1d", "--wait=60")
        assert taken.returncode == 0, taken.stderr
    shown = {path.name for path in (ROOT / "docs" / "img").glob("*.png")}
    pictures = {path.name: path.read_bytes() for path in tmp_path.glob("*.png")}
    assert pictures.keys() == shown
    assert all(picture.startswith(b"\x89PNG") for picture in pictures.values())
