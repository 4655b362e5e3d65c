"""The FastAPI service of the examples: run by uvicorn, asked over HTTP, then its store is read."""

from __future__ import annotations

import json
import os
import signal
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("pyarrow")

from batchmill.sources import Grain
from batchmill.store import open_store
from tests.kit.processes import SOURCE, Life, free_port
from tests.kit.threads import PATIENCE_S, until


def status_of(address: str, body: object = None) -> int:
    """The status that a request is answered with; 0 if nobody answers."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        address, data, {"Content-Type": "application/json"} if data else {}
    )
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def test_requests_become_metrics_of_their_routes(tmp_path: Path) -> None:
    """Every request of two workers is in the store after SIGTERM, by route and status."""
    url, port = f"sqlite:///{tmp_path}/metrics.db", free_port()
    home = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "uvicorn", "examples.fastapi_embedded.app:app"]
    command += ["--port", str(port), "--workers", "2", "--log-level", "warning"]
    path = os.pathsep.join((SOURCE, os.environ.get("PYTHONPATH", "")))
    environment = dict(os.environ, STORE=url, PYTHONPATH=path)
    with Life(command, tmp_path / "log", environment) as process:
        until(lambda: status_of(f"{home}/unknown") == 404, process.report)
        for number in (1, 2, 3, 100):
            assert status_of(f"{home}/products/{number}") == (404 if number == 100 else 200)
        assert status_of(f"{home}/orders", [1, 2]) == 200
        assert status_of(f"{home}/orders", []) == 500
        os.kill(process.pid, signal.SIGTERM)
        until(lambda: not process.running, "it ends")
    with open_store(url, create=False) as store:
        status = {
            value.entity_name: value.value
            for value in store.values("route_status", grain=Grain.DAY)
        }
        sla = {
            value.entity_name: value.value for value in store.values("route_sla", grain=Grain.DAY)
        }
    assert status["GET /products/{number}"] == {"{n=200}": 3, "{n=404}": 1}
    assert status["POST /orders"] == {"{n=200}": 1, "{n=500}": 1}
    assert sla == {"GET /products/{number}": 10000, "POST /orders": 5000, "GET unknown": 10000}
