"""``batchmill run`` as a whole, with real senders, processes and signals, but without Spark."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from batchmill.files import read_json
from batchmill.run import Health, Home, read_counted, read_status, spool_backlog
from tests.kit.processes import Life, running_pid, wait_for_json
from tests.kit.threads import PATIENCE_S, until

for needed in ("grpc", "opentelemetry.exporter.otlp.proto.http", "opentelemetry.sdk", "uvicorn"):
    pytest.importorskip(needed)


def run(home: Home, *given: str) -> Life:
    """A run on ``home``."""
    slow, options = (given[:1], given[1:]) if given[:1] == ("slow",) else ((), given)
    command = [sys.executable, "-m", "tests.run.run_process", *slow]
    command += [f"--home={home.folder}", *options]
    return Life(command, home.folder.parent / "errors", os.environ)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """Where a run keeps everything."""
    return Home(tmp_path / "home")


def test_the_demo_ends_with_a_balance(home: Home) -> None:
    """Also if ingest is killed meanwhile: senders try again, and it is said."""
    with run(home, "--demo=5", "--no-web") as life:
        life.must_hear("OpenTelemetry: http://127.0.0.1:.*")
        wait_for_json(home.ingest, "acknowledged_spans")
        os.kill(running_pid(home.supervisor, "ingest"), signal.SIGKILL)
        life.must_hear(r"ingest died \(SIGKILL\): starting it again in 0.5 s")
        life.end(0)
    said = [line for line in life.lines if line.startswith("balance: ")]
    assert len(said) == 1, life.report()
    spans = read_counted(home.store_url).spans
    assert spans > 0
    assert said[0].startswith(f"balance: {spans:,} spans sent = {spans:,} acknowledged = {spans:,}")
    assert spool_backlog(home.spool).count == 0
    assert (home.folder.stat().st_mode & 0o777) == 0o700


@pytest.mark.system
def test_the_demo_balances_with_two_processes_of_ingest(home: Home) -> None:
    """Also if one of them is killed: ingest as a whole goes on, and the status is the sum."""
    with run(home, "--demo=5", "--no-web", "--ingest-processes=2") as life:
        life.must_hear("OpenTelemetry: http://127.0.0.1:.*")
        wait_for_json(home.ingest, "acknowledged_spans")
        before = wait_for_json(home.ingest)
        os.kill(before["workers"][0]["pid"], signal.SIGKILL)
        wait_for_json(home.ingest, "restarts")
        assert (read_json(home.ingest) or {})["pid"] == before["pid"]
        life.end(0)
    said = [line for line in life.lines if line.startswith("balance: ")]
    assert len(said) == 1, life.report()
    spans = read_counted(home.store_url).spans
    assert said[0].startswith(f"balance: {spans:,} spans sent")
    assert not any("ingest died" in line for line in life.lines)


@pytest.mark.system
def test_the_demo_tells_if_it_does_not_balance(home: Home) -> None:
    """Nobody counts; Ctrl-C ends it, the spool keeps what came, and the next run counts it."""
    with run(home, "slow", "--demo=forever", "--drain=0.1", "--no-web") as life:
        until(lambda: spool_backlog(home.spool).count, "a segment")
        os.killpg(life.pid, signal.SIGINT)
        life.end(1)
    assert any("OUT OF BALANCE" in line and "≠ 0 counted" in line for line in life.lines)
    acknowledged = (read_json(home.ingest) or {})["acknowledged_spans"]
    assert acknowledged > 0
    assert any("left in the spool for the next run" in line for line in life.lines)
    with run(home, "--no-web") as life:
        until(lambda: not spool_backlog(home.spool).count, "an empty spool")
        os.kill(life.pid, signal.SIGTERM)
        life.end(0)
    assert read_counted(home.store_url).spans == acknowledged


def pages_of(life: Life) -> str:
    """The address of its pages, which its first line tells, unless they took very long."""
    life.must_hear(r".*web UI: http://.*")
    match = re.search(r"web UI: (http://[^\s;]+)", "\n".join(life.lines))
    assert match is not None
    return match[1]


def asked_for(address: str) -> Any:
    """What a server answers."""
    with urllib.request.urlopen(address, timeout=PATIENCE_S) as answer:
        return json.load(answer)


def test_status_tells_of_a_run(home: Home) -> None:
    """Healthy, with its processes; so do its pages. Down after a second Ctrl-C, which does not
    wait."""
    status = [sys.executable, "-m", "batchmill", "status", f"--home={home.folder}", "--json"]
    log = home.folder.parent / "status"
    with run(home) as life:
        pages = pages_of(life)
        until(lambda: asked_for(f"{pages}/api/v1/pipeline")["health"] == "healthy")
        pids = [running_pid(home.supervisor, name) for name in ("ingest", "pipeline", "web")]
        with Life(status, log, os.environ) as command:
            command.end(0)
        report = json.loads(command.lines[0])
        assert [process["pid"] for process in report["processes"].values()] == pids
        shown = asked_for(f"{pages}/api/v1/pipeline")
        assert (shown["health"], shown["web"]) == ("healthy", pages)
        assert [queue["process"] for queue in shown["queues"]] == ["ingest"]
        assert shown["thresholds"]["level"] == "NORMAL"
        os.kill(pids[1], signal.SIGSTOP)  # so that it cannot end when it is asked to
        until(lambda: read_status(home).health is Health.DEGRADED)
        assert any("pipeline is stopped" in reason for reason in read_status(home).reasons)
        os.kill(life.pid, signal.SIGINT)
        life.must_hear("stopping: .*")
        os.kill(life.pid, signal.SIGINT)
        life.end(130)
    Life(status, log, os.environ).end(2)


@pytest.mark.system
def test_a_run_goes_on_where_its_pages_cannot_be_served(home: Home) -> None:
    """A port that is taken is reported, with what to do; the run is degraded, and ends as ever.

    Be it that of the web UI or of an exporter's page, and from the first start on: ingest runs.
    So it is after a second run on its home, which is refused.
    """
    status = [sys.executable, "-m", "batchmill", "status", f"--home={home.folder}"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        pages = (f"--web-port={port}", f"--export-to=prometheus://127.0.0.1:{port}")
        with run(home, *pages) as life:
            life.must_hear(rf"no page on port {port} of .*it is tried again \(set export_to\)")
            life.must_hear(rf"web UI unavailable: port {port} is in use \(set web_port.*")
            running_pid(home.supervisor, "pipeline")
            # The supervisor says it first, and writes it down a moment later.
            until(lambda: f"port {port}" in " ".join(read_status(home).reasons))
            until(lambda: re.search(rf"export is .*{port}", " ".join(read_status(home).reasons)))
            running_pid(home.supervisor, "ingest")
            with Life(status, home.folder.parent / "status", os.environ) as command:
                command.end(1)
            assert any(re.search(rf"web is \w+: port {port} is in", x) for x in command.lines)
            with run(home) as second:
                second.end(1)
            errors = (home.folder.parent / "errors").read_text()
            assert "is in use: another `batchmill run`" in errors
            os.kill(life.pid, signal.SIGTERM)
            life.end(0)


@pytest.mark.system
def test_an_exporter_whose_port_was_taken_stops_nobody(home: Home) -> None:
    """Ingest goes on, the status has the reason, and the exporter runs once the port is free."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with run(home, f"--export-to=prometheus://127.0.0.1:{port}", "--no-web") as life:
        first = running_pid(home.supervisor, "export")
        ingest = running_pid(home.supervisor, "ingest")
        os.kill(first, signal.SIGKILL)
        until(lambda: not is_listening(port), "the port is free")
        with socket.create_server(("127.0.0.1", port)):

            def failed_starts() -> int:
                return int(wait_for_json(home.supervisor)["processes"]["export"]["failed_starts"])

            until(lambda: failed_starts() >= 5, "as many failed starts as once ended a run")
            life.must_hear(r"export unavailable: .*, 4 times in a row; trying again in \d+ s")
            assert running_pid(home.supervisor, "ingest") == ingest
            status = read_status(home)
            assert status.health is Health.DEGRADED
            assert any(f"{port}" in reason for reason in status.reasons), status.reasons
        os.kill(life.pid, signal.SIGTERM)
        life.end(0)


def is_listening(port: int) -> bool:
    """Whether somebody listens there."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
