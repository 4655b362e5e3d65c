"""``batchmill web``: what it serves, from which folder or store, and what it says on the way."""

from __future__ import annotations

import argparse
import importlib.util
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
from batchmill.cli.config import add_options, load
from batchmill.cli.web import FRESH_S, Pipeline, missing
from batchmill.run.home import Home, read_json, write_json
from batchmill.run.specs import pinned, web_spec
from batchmill.store import open_store
from tests.kit.processes import Life

for needed in ("starlette", "uvicorn"):
    pytest.importorskip(needed)

PATIENCE_S = 60.0
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
    life = Life(command, log, {**os.environ, "BATCHMILL_TOKEN": TOKEN})
    try:
        life.must_hear(r"serving http://127\.0\.0\.1:\d+; .*")
        yield life
        os.kill(life.pid, signal.SIGTERM)
        life.end(0)
        assert life.lines[-1] == "ended"
        assert (read_json(home.web) or {})["state"] == "ended"
    finally:
        life.kill()


def ask(life: Life, path: str, token: str | None = TOKEN) -> tuple[int, Any]:
    """Status and JSON of an answer."""
    found = re.search(r"http://\S+(?=;)", life.lines[0])
    assert found is not None
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        request = urllib.request.Request(found[0] + path, headers=headers)
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_the_pipeline_comes_from_the_folder_of_the_run(home: Home, served: Life) -> None:
    """It is what `batchmill status --json` prints."""
    code, found = ask(served, "/api/v1/pipeline")
    assert code == 200
    assert (found["health"], found["home"]) == ("down", str(home.folder))


def test_the_store_is_that_of_the_run(served: Life) -> None:
    """One that is there, and empty."""
    code, found = ask(served, "/api/v1/status")
    assert code == 200
    assert (found["store"]["ok"], found["newest_minute"]) == (True, None)


def test_the_token_is_that_of_the_environment(served: Life) -> None:
    """Without it no data is given."""
    assert ask(served, "/api/v1/pipeline", token=None)[0] == 401


def test_it_tells_where_it_is(home: Home, served: Life) -> None:
    """For a supervisor: its number and its address."""
    told = read_json(home.web) or {}
    assert told["pid"] == served.pid
    assert served.lines[0] == f"serving {told['address']}; Ctrl-C ends it"


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *given: str
) -> tuple[int, str]:
    """Run the command in this process; exit code and what it says of errors."""
    monkeypatch.setattr(sys, "argv", ["batchmill", "web", *given])
    return main(), capsys.readouterr().err


def test_a_port_that_is_taken_is_told_with_how_to_choose_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2: started again, it would fail again."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, said = run(monkeypatch, capsys, f"--home={tmp_path}", f"--port={port}")
    assert code == 2
    assert f"port={port} is not valid: it must be a free port of 127.0.0.1" in said
    assert "--port" in said
    assert "--web-port" in said


def test_strangers_are_not_let_in_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beyond this machine it takes a token, a certificate, or --insecure."""
    code, said = run(monkeypatch, capsys, f"--home={tmp_path}", "--bind=0.0.0.0", "--port=0")
    assert code == 2
    assert "--insecure" in said


def test_a_folder_is_looked_at_twice_a_second_at_most(tmp_path: Path) -> None:
    """However many ask."""
    home, now = Home(tmp_path / "home"), [10.0]
    home.prepare()
    pipeline = Pipeline(home, lambda: now[0])
    first = pipeline()
    assert pipeline() is first
    now[0] += FRESH_S
    later = pipeline()
    assert later is not first
    assert later["health"] == "down"


def settings(*given: str) -> Any:
    """Settings of a run."""
    parser = argparse.ArgumentParser()
    add_options(parser)
    return load(parser.parse_args(given), environ={})


def test_a_run_hands_on_who_may_look(tmp_path: Path) -> None:
    """As for ingest; the token is on no command line."""
    home = Home(tmp_path)
    found = settings(
        "--token=secret", "--bind=0.0.0.0", "--web-port=81", "--tls-cert=c", "--tls-key=k"
    )
    spec = web_spec(found, home)
    words = list(spec.arguments)
    assert words[:5] == ["web", "--home", str(tmp_path), "--port", "81"]
    for option, value in (("--bind", "0.0.0.0"), ("--tls-cert", "c"), ("--tls-key", "k")):
        assert words[words.index(option) + 1] == value
    assert spec.environment == {"BATCHMILL_TOKEN": "secret"}
    assert not any("secret" in each for each in words)
    assert not spec.vital


def test_the_next_life_has_the_port_of_the_first(tmp_path: Path) -> None:
    """So that a page that is open finds it again."""
    spec = pinned(
        web_spec(settings("--web-port=0"), Home(tmp_path)), {"address": "http://[::1]:4711"}
    )
    words = list(spec.arguments)
    assert words[words.index("--port") + 1] == "4711"


def test_what_is_not_installed_is_told_by_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run says so, and goes on."""
    assert missing() == ""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'batchmill[web]'" in missing()


def test_pages_can_be_switched_off() -> None:
    """They are on by default."""
    assert settings()["web"] is True
    assert settings("--no-web")["web"] is False
