"""``batchmill export`` to Prometheus: both ways to Prometheus, run as a user does."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from batchmill.files import read_json
from batchmill.store import open_store
from tests.kit.processes import Life, run_here, wait_for_json
from tests.kit.servers.prometheus import (
    after,
    expected,
    last_minutes,
    metrics_of,
    parsed,
    receiving,
)
from tests.kit.stores import Measurement, Writer
from tests.kit.threads import PATIENCE_S, until


def export(folder: Path, *arguments: str) -> Life:
    """The command, started; its errors go to a file in ``folder``."""
    command = [sys.executable, "-m", "batchmill", "export", *arguments]
    return Life(command, folder / "errors", os.environ)


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A store with a complete minute."""
    address = f"sqlite:///{tmp_path}/store.db"
    first, second = last_minutes(2)
    with open_store(address) as store:
        Writer(store).write(Measurement(30, minute=first), Measurement(70, minute=second))
    return address


def test_it_serves_until_sigterm(url: str, tmp_path: Path) -> None:
    """It says where the page is, asks for the token, and ends in order at SIGTERM."""
    (tmp_path / "token").write_text("s3cret\n")
    given = ("--to", "prometheus://127.0.0.1:0", "--token-file", str(tmp_path / "token"))
    with export(tmp_path, "--store", url, *given) as process:
        process.must_hear(r".*http://127.0.0.1:\d+/metrics.*")
        address = re.search(r"http://127.0.0.1:\d+/metrics", process.lines[-1])
        assert address is not None
        request = Request(address[0], headers={"Authorization": "Bearer s3cret"})
        with urlopen(request, timeout=PATIENCE_S) as response:
            page = response.read().decode()
        os.kill(process.pid, signal.SIGTERM)
        process.end(0)
        assert (tmp_path / "errors").read_text() == ""
    with open_store(url) as store:
        minute = min(value.bucket for value in store.values("calls"))
        assert metrics_of(parsed(page)) == expected(store, minute)


def test_it_writes_until_sigint(url: str, tmp_path: Path) -> None:
    """It sends the complete minute, notes how far it has come, and says what it did."""
    position, status = tmp_path / "position.json", tmp_path / "status.json"
    given = ["--store", url, "--position", str(position), "--status", str(status)]
    given += ["--header", "X-Scope-OrgID=shop"]
    with receiving() as receiver, export(tmp_path, *given, "--to", receiver.url) as process:
        wait_for_json(position)
        wait_for_json(status, "sent_values")
        os.kill(process.pid, signal.SIGINT)
        process.end(0)
        count = len(receiver.samples())
        assert receiver.requests[0][1]["X-Scope-OrgID"] == "shop"
    report = json.loads(status.read_text())
    assert (report["state"], report["sent_values"], report["dropped"]) == ("ended", count, {})
    assert (tmp_path / "errors").read_text() == ""
    assert f"ended: {count} samples sent, of 1 minute" in "\n".join(process.lines)
    with open_store(url) as store:
        first = min(value.bucket for value in store.values("calls"))
        assert json.loads(position.read_text()) == {
            "store": store.id,
            "to": receiver.url,
            "minute": first,
        }


def test_a_remote_write_has_so_many_samples_at_most(url: str, tmp_path: Path) -> None:
    """``--batch`` is for remote write too: one sample a request, and all of them arrive."""
    position = tmp_path / "position.json"
    given = ("--store", url, "--position", str(position), "--batch", "1", "--poll", "0.05")
    with receiving() as receiver, export(tmp_path, *given, "--to", receiver.url) as process:
        wait_for_json(position)
        os.kill(process.pid, signal.SIGINT)
        process.end(0)
        assert len(receiver.requests) == len(receiver.samples()) > 1


def test_killed_it_goes_on_where_it_was(tmp_path: Path) -> None:
    """After kill -9 the next one sends every minute since, and none from before."""
    url, position = f"sqlite:///{tmp_path}/store.db", tmp_path / "position.json"
    minutes = last_minutes(6)

    def reached(minute: int) -> bool:
        return (read_json(position) or {}).get("minute") == minute

    with receiving() as receiver, open_store(url) as store:
        given = ("--store", url, "--to", receiver.url, "--position", str(position), "--late", "0")
        rows = Writer(store)
        rows.write(*(Measurement(5, minute=minute) for minute in minutes[:3]))
        with export(tmp_path, *given):
            until(lambda: reached(minutes[1]))
        rows.write(*(Measurement(5, minute=minute) for minute in minutes[3:]))
        with export(tmp_path, *given):
            until(lambda: reached(minutes[4]))
        times = [at_ms for _, _, at_ms in receiver.samples()]
    assert sorted(set(times)) == [after(minute) * 1000 for minute in minutes[1:5]]
    assert len(set(times)) == len(receiver.requests)  # none of them twice


def test_it_waits_for_a_store(tmp_path: Path) -> None:
    """Started before the pipeline, remote write waits until there is a store."""
    url, position = f"sqlite:///{tmp_path}/store.db", tmp_path / "position.json"
    given = ("--store", url, "--position", str(position))
    with receiving() as receiver, export(tmp_path, *given, "--to", receiver.url) as process:
        process.must_hear("waiting for the pipeline: there is no store.*")
        with open_store(url) as store:
            first, second = last_minutes(2)
            Writer(store).write(Measurement(30, minute=first), Measurement(70, minute=second))
        until(receiver.samples)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["--to", "prometheus://0.0.0.0:0"], "loopback"),
        (["--to", "prometheus://127.0.0.1:0/elsewhere"], "such as prometheus://127.0.0.1:9464"),
        (["--to", "prometheus://127.0.0.1:0", "--once"], "for targets with an outbox"),
        (["--to", "prometheus://127.0.0.1:0", "--buffer", "9"], "sends nothing"),
        (["--to", "prometheus://127.0.0.1:0", "--retry-max", "9"], "--retry-max"),
        (["--to", "remote+http://:1", "--poll", "0"], "--poll"),
        (["--to", "remote+http://:1"], "remote+http://host:port/path"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, given: list[str], why: str) -> None:
    """An address that will not do ends the command with a line that says what would."""
    code, _, errors = run_here("export", "--store", f"sqlite:///{tmp_path}/store.db", *given)
    assert code == 2
    assert why in errors
    assert "Traceback" not in errors
