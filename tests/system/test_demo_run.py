"""The newcomer's minute: a demo run with real Spark, its alert, and the files that it leaves."""

from __future__ import annotations

import fnmatch
import os
import re
import sys
from collections.abc import Sequence
from typing import NamedTuple

import pytest

from batchmill.run import Home
from batchmill.store import open_store
from tests.kit.jvm import java_missing, jvm_options
from tests.kit.pipelines import QUICK_SPARK
from tests.kit.processes import Life, wait_for_json
from tests.kit.servers.alertmanager import Webhooks
from tests.run.test_home import bounds, matches

for needed in ("grpc", "opentelemetry.exporter.otlp.proto.http", "pyspark", "uvicorn"):
    pytest.importorskip(needed)

pytestmark = [
    pytest.mark.slow(75),
    pytest.mark.timeout(600),
    pytest.mark.skipif(java_missing() is not None, reason=java_missing() or ""),
]

FIRES = r"alert service_errors fires: catalogue: only \d.* % of its calls succeeded in a minute"
SMALL = {
    "checkpoint/batchmill.json": 1_000,
    "checkpoint/books.jsonl": 256 * 1024,
    "checkpoint/progress.json": 100_000,
    "checkpoint/outbox/outbox.json": 1_000,
    "metrics.db.*.lock": 0,
    "source.json": 1_000,
    "run/*.json": 100_000,
    "run/*.lock": 0,
}
"""The most bytes of files that stay small, whatever the traffic."""


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
    """Each is in the table of the documentation, and those that stay small are small."""
    home, known = demo.home, bounds()
    files = [
        str(path.relative_to(home.folder)) for path in home.folder.rglob("*") if path.is_file()
    ]
    unknown = [file for file in files if not any(matches(file, pattern) for pattern in known)]
    assert unknown == []
    for parts in ("spool-quarantine/Span/", "checkpoint/state/", "checkpoint/outbox/", "log/"):
        assert any(file.startswith(parts) for file in files), parts
    assert not (home.spool / "Span" / ".1-2.parquet.tmp").exists()
    for pattern, most in SMALL.items():
        own = [file for file in files if fnmatch.fnmatchcase(file, pattern)]
        assert own, pattern
        for file in own:
            assert (home.folder / file).stat().st_size <= most, file
