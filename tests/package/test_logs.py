"""The log of a command: what a stranger can cause does not flood it."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from batchmill.logs import LogLimit, configure_logs
from batchmill.store import open_store
from tests.kit.files import ROOT
from tests.kit.ingest import QUICK, ingest, read_all
from tests.kit.processes import Life
from tests.kit.threads import PATIENCE_S


def test_messages_of_one_kind_are_limited_and_counted() -> None:
    """Whatever their arguments; others are not affected."""
    written: list[str] = []
    limit = LogLimit(lambda record: written.append(record.getMessage()), burst=2)
    logger = logging.Logger("tests")

    def passes(text: str, *arguments: object) -> bool:
        record = logger.makeRecord("tests", logging.WARNING, "", 0, text, arguments, None)
        return limit.filter(record)

    assert [passes("peer %s failed", number) for number in range(5)] == [True, True, *[False] * 3]
    assert passes("another")
    limit.flush()
    assert written == ["3 messages like this in 60 s: peer 4 failed"]
    assert passes("peer %s failed", 6)
    limit.flush()
    assert len(written) == 1


def test_kinds_are_limited_too() -> None:
    """Texts that a library has filled in already are as many as strangers want."""
    written: list[str] = []
    limit = LogLimit(lambda record: written.append(record.getMessage()), burst=1)
    logger = logging.Logger("tests")
    passed = 0
    for number in range(5000):
        text = f"failed: {number}"
        passed += limit.filter(logger.makeRecord("tests", 30, "", 0, text, (), None))
    assert passed <= 201
    limit.flush()
    assert written == [f"{5000 - passed:,} messages like this in 60 s: failed: 4999"]


NOISE = b"\x16\x03\x01 noise\r\n\r\n"
INVALID = "Invalid HTTP request received."


def test_noise_on_a_port_is_a_few_lines(tmp_path: Path) -> None:
    """And a count; each connection is answered, and counted in the status."""
    times = 300
    with ingest(tmp_path / "home", *QUICK) as running:
        for _ in range(times):
            with running.connect() as link:
                link.sendall(NOISE)
                assert read_all(link).startswith(b"HTTP/1.1 400")
        assert running.metric('requests_total{outcome="bad_http",protocol="http"}') == times
    lines = running.stderr().splitlines()
    assert 0 < len(lines) < 10, lines[:20]
    assert f"295 messages like this in 60 s: {INVALID}" in lines[-1]


def test_noise_on_the_port_for_grpc_is_counted_alone(tmp_path: Path) -> None:
    """It is no line of the log."""
    times = 100
    with ingest(tmp_path / "home", *QUICK) as running:
        host, _, port = running.grpc.rpartition(":")
        for _ in range(times):
            with socket.create_connection((host, int(port)), PATIENCE_S) as link:
                link.sendall(NOISE)
                read_all(link)
        assert running.metric('requests_total{outcome="bad_http",protocol="grpc"}') == times
    assert running.stderr() == ""


@pytest.mark.parametrize(
    "command", [("web", "--port=0"), ("export", "--to=prometheus://127.0.0.1:0")], ids=" ".join
)
def test_noise_on_a_page_is_a_few_lines(tmp_path: Path, command: tuple[str, ...]) -> None:
    """Of the web UI, or for Prometheus: all of it is written or counted, and a few lines."""
    times, url, log = 100, f"sqlite:///{tmp_path}/store.db", tmp_path / "errors"
    with open_store(url):
        pass
    words = [sys.executable, "-m", "batchmill", *command, "--store", url]
    with Life(words, log, os.environ) as process:
        process.must_hear(r".*http://127\.0\.0\.1:\d+.*")
        port = re.search(r"http://127\.0\.0\.1:(\d+)", process.lines[-1])
        assert port is not None
        for _ in range(times):
            with socket.create_connection(("127.0.0.1", int(port[1])), PATIENCE_S) as link:
                link.sendall(NOISE)
                assert read_all(link).startswith(b"HTTP/1.1 400")
        os.kill(process.pid, signal.SIGTERM)
        process.end(0)
    lines = [line for line in log.read_text().splitlines() if INVALID in line]
    left_out = [re.search(r"(\d+) messages? like this in 60 s", line) for line in lines]
    assert sum(int(count[1]) if count else 1 for count in left_out) == times
    assert len(lines) < times / 2


GRPC = """
import socket, sys, threading
from batchmill.cli import main
sys.argv = ["batchmill", "config", "show"]
main()
import grpc
server = socket.create_server(("127.0.0.1", 0))
def serve():
    while True:
        link, _ = server.accept()
        link.sendall(b"HTTP/1.1 400 no TLS here\\r\\n\\r\\n")
        link.close()
threading.Thread(target=serve, daemon=True).start()
address = f"127.0.0.1:{server.getsockname()[1]}"
channel = grpc.secure_channel(address, grpc.ssl_channel_credentials())
try:
    channel.unary_unary("/x/y")(b"", timeout=2)
except grpc.RpcError as error:
    print("error:", error.code().name)
"""


def test_grpc_s_own_library_does_not_write_to_the_log(tmp_path: Path) -> None:
    """What went wrong is in the error of the call."""
    done = subprocess.run(
        [sys.executable, "-c", GRPC],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert "error: " in done.stdout, done
    assert done.stderr == ""


def test_a_log_that_is_set_up_already_has_no_limit() -> None:
    """A command may be called by another program, or by a test."""
    handlers = list(logging.getLogger().handlers)
    assert handlers  # pytest's
    filters = [list(handler.filters) for handler in handlers]
    configure_logs(verbose=False)
    assert logging.getLogger().handlers == handlers
    assert [list(handler.filters) for handler in handlers] == filters
