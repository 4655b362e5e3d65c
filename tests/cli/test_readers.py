"""Commands for a store that is there: where they find it, and how long they wait for it."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from batchmill.alerts import DEMO_RULES
from tests.kit.processes import run_here

REMOTE = "export --to remote+http://127.0.0.1:1/write"
ALERTS = f"alerts run --rules {DEMO_RULES}"


@pytest.mark.parametrize(
    ("command", "place"),
    [
        (REMOTE, "metrics.db"),
        ("export --to otlp+http://127.0.0.1:1 --once", "checkpoint"),
        (ALERTS, "metrics.db"),
        ("query calls", "metrics.db"),
        ("backfill old", "metrics.db"),
    ],
    ids=["remote write", "outbox", "alerts", "query", "backfill"],
)
def test_a_command_finds_the_store_in_the_home_folder(
    command: str, place: str, tmp_path: Path
) -> None:
    """And the checkpoint; here there is something else, which the error names."""
    (tmp_path / "metrics.db").write_text("this is no database, whatever its name says" * 100)
    code, _, errors = run_here(*command.split(), "--home", str(tmp_path))
    assert code == 1
    assert str(tmp_path / place) in errors


@pytest.mark.parametrize("command", ["query calls", "backfill old"])
def test_a_home_without_a_store_is_an_error(command: str, tmp_path: Path) -> None:
    """Which says how to name another; none is made there."""
    code, _, errors = run_here(*command.split(), "--home", str(tmp_path))
    assert code == 1
    assert str(tmp_path / "metrics.db") in errors
    assert "--home names the folder of another run" in errors
    assert list(tmp_path.iterdir()) == []


@pytest.mark.system
@pytest.mark.parametrize(
    ("command", "silent"),
    [
        ("query calls", True),
        (REMOTE, True),
        (REMOTE, False),
        ("alerts list", True),
        ("store repair", True),
    ],
    ids=["query, silent", "export, silent", "export, refused", "alerts list", "store repair"],
)
def test_a_reader_gives_up_on_a_database_that_cannot_be_reached(command: str, silent: bool) -> None:
    """After seconds, and says so; a host that takes the connection and says nothing, too."""
    pytest.importorskip("psycopg")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        if not silent:
            listener.close()
        began_s = time.monotonic()
        store = f"postgresql://nobody@127.0.0.1:{port}/none"
        code, _, errors = run_here(*command.split(), "--store", store)
    assert code == 1
    assert "Check that the database runs" in errors
    assert time.monotonic() - began_s < 9
