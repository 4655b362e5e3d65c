"""A store that Embedded writes is read like a pipeline's: query, web UI, PromQL, Prometheus."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.request import urlopen

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("starlette")

from batchmill import Embedded
from batchmill.cli import main
from batchmill.sources import minute_bucket
from batchmill.store import open_store
from batchmill.workers import Statement
from tests.kit.processes import Life
from tests.kit.servers.prometheus import expected, metrics_of, parsed
from tests.kit.threads import PATIENCE_S
from tests.web.kit import serving
from tests.workers.kit import OAL, MillSale

CALLS = """
service_cpm = from(Service.*).cpm();
service_resp_time = from(Service.latency).longAvg();
"""


@pytest.fixture
def minute() -> datetime:
    """The newest complete minute: of this test, since readers leave out what is old."""
    return datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(minutes=1)


@pytest.fixture
def url(tmp_path: Path, minute: datetime) -> str:
    """A store with a complete minute of a shop."""
    url = f"sqlite:///{tmp_path}/metrics.db"
    with Embedded(oal=OAL + CALLS, store=url) as mill:
        mill.emit_many([MillSale("corner", cents, minute) for cents in (100, 250)])
        call = {"time": minute, "name": "corner", "latency": 30, "status": True}
        mill.emit({**call, "layer": "GENERAL"}, "Service")
        mill.emit(Statement(minute, "corner", "db", 900, "SELECT 1"))
        mill.emit(
            MillSale("corner", 1, minute + timedelta(minutes=1))
        )  # the newest minute, which is not complete
    return url


def test_batchmill_query(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A metric, the list of metrics, and slow statements."""

    def query(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["batchmill", "query", *arguments, "--store", url])
        assert main() == 0
        return capsys.readouterr().out

    lines = query("mill_cents", "--from", "-10m", "--json").splitlines()
    assert [json.loads(line)["value"] for line in lines] == [350, 1]
    assert "mill_sales" in query("--list")
    (record,) = query("--top", "top_n_database_statement", "--json").splitlines()
    assert json.loads(record)["statement"] == "SELECT 1"


def test_web(url: str, minute: datetime) -> None:
    """The API, PromQL and the pages, without a pipeline."""
    end = minute + timedelta(minutes=1)
    between = {"from_": minute.isoformat(), "to": end.isoformat()}
    with serving(url) as client:
        listed = client.get("/api/v1/metrics")["metrics"]
        assert {"mill_sales", "service_cpm"} <= {metric["name"] for metric in listed}
        assert "350" in json.dumps(client.get("/api/v1/metrics/mill_cents/values", **between))
        assert "corner" in json.dumps(client.get("/api/v1/services", **between))
        answer = client.get("/api/v1/query", query="batchmill_mill_cents", time=end.timestamp())
        assert [sample["value"][1] for sample in answer["data"]["result"]] == ["350"]
        assert client.raw("/")[0] == 200


def test_the_page_for_prometheus(url: str, minute: datetime, tmp_path: Path) -> None:
    """``batchmill export`` serves the newest complete minute."""
    command = [sys.executable, "-m", "batchmill", "export", "--store", url]
    command += ["--to", "prometheus://127.0.0.1:0"]
    with Life(command, tmp_path / "errors", os.environ) as process:
        process.must_hear(r".*http://127.0.0.1:\d+/metrics.*")
        address = re.search(r"http://127.0.0.1:\d+/metrics", process.lines[-1])
        assert address is not None
        with urlopen(address[0], timeout=PATIENCE_S) as response:
            page = response.read().decode()
        os.kill(process.pid, signal.SIGTERM)
        process.end(0)
    with open_store(url) as store:
        assert metrics_of(parsed(page)) == expected(store, minute_bucket(minute))
    assert "mill_cents" in page
