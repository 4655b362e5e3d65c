"""``batchmill web``: what it serves, from which folder or store, and what it says on the way."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchmill.cli import main
from batchmill.files import read_json, write_json
from batchmill.run import Home
from batchmill.store import open_store
from tests.kit.processes import Life, wait_for_json
from tests.kit.threads import PATIENCE_S

for needed in ("starlette", "uvicorn"):
    pytest.importorskip(needed)

TOKEN = "let-me-in"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """The folder of a run that is over, with a store that is empty."""
    made = Home(tmp_path_factory.mktemp("web") / "home")
    made.prepare()
    write_json(made.supervisor, {"pid": 1, "processes": {}})
    with open_store(made.store_url):
        pass
    return made


@pytest.fixture(scope="module")
def served(home: Home, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Life]:
    """A server of it, which asks for a token."""
    command = [sys.executable, "-m", "batchmill", "web", f"--home={home.folder}", "--port=0"]
    command += [f"--status={home.web}"]
    log = tmp_path_factory.mktemp("log") / "errors"
    with Life(command, log, {**os.environ, "BATCHMILL_TOKEN": TOKEN}) as life:
        life.must_hear(r"serving http://127\.0\.0\.1:\d+; .*")
        yield life
        os.kill(life.pid, signal.SIGTERM)
        life.end(0)
        assert life.lines[-1] == "ended"
        assert (read_json(home.web) or {})["state"] == "ended"


def ask(life: Life, path: str, token: str | None = TOKEN) -> tuple[int, Any]:
    """Status and JSON of an answer."""
    address = re.search(r"http://\S+(?=;)", life.lines[0])
    assert address is not None
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        request = urllib.request.Request(address[0] + path, headers=headers)
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_the_pipeline_comes_from_the_folder_of_the_run(home: Home, served: Life) -> None:
    """It is what `batchmill status --json` prints."""
    code, report = ask(served, "/api/v1/pipeline")
    assert code == 200
    assert (report["health"], report["home"]) == ("down", str(home.folder))


def test_the_store_is_that_of_the_run(served: Life) -> None:
    """One that is there, and empty."""
    code, report = ask(served, "/api/v1/status")
    assert code == 200
    assert (report["store"]["ok"], report["newest_minute_s"]) == (True, None)


def test_the_token_is_that_of_the_environment(served: Life) -> None:
    """Without it no data is given."""
    assert ask(served, "/api/v1/pipeline", token=None)[0] == 401


@pytest.mark.system
def test_a_database_that_cannot_be_reached_is_given_up(tmp_path: Path) -> None:
    """A request is answered before its client gives up, though the host says nothing."""
    pytest.importorskip("psycopg")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = f"--store=postgresql://nobody@127.0.0.1:{silent.getsockname()[1]}/none"
        command = [sys.executable, "-m", "batchmill", "web", store, "--port=0"]
        with Life(command, tmp_path / "errors", {**os.environ}) as life:
            life.must_hear(r"serving http://127\.0\.0\.1:\d+; .*")
            code, answer = ask(life, "/api/v1/services", token=None)
    assert code == 503
    assert "Check that the database runs" in answer["error"]


def test_it_tells_where_it_is(home: Home, served: Life) -> None:
    """For a supervisor: its number and its address."""
    report = wait_for_json(home.web)
    assert report["pid"] == served.pid
    assert served.lines[0] == f"serving {report['address']}; Ctrl-C ends it"


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *given: str
) -> tuple[int, str]:
    """Run the command in this process; exit code and what it says of errors."""
    monkeypatch.setattr(sys, "argv", ["batchmill", "web", *given])
    return main(), capsys.readouterr().err


def test_a_taken_port_is_reported_with_how_to_choose_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2: started again, it would fail again."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, said = run(monkeypatch, capsys, f"--home={tmp_path}", f"--port={port}")
    assert code == 2
    assert f"port {port} is in use (set web_port, or --port of batchmill web)" in said


def test_listening_beyond_this_machine_takes_an_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beyond this machine it takes a token, a certificate, or --insecure."""
    code, said = run(monkeypatch, capsys, f"--home={tmp_path}", "--bind=0.0.0.0", "--port=0")
    assert code == 2
    assert "--insecure" in said


def test_the_web_ui_can_be_switched_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It is on by default."""
    monkeypatch.chdir(tmp_path)
    for flags, expected in (((), True), (("--no-web",), False)):
        monkeypatch.setattr(sys, "argv", ["batchmill", "config", "show", "--json", *flags])
        assert main() == 0
        assert json.loads(capsys.readouterr().out)["web"]["value"] is expected
