"""The log of a command: what a stranger can cause does not flood it."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

from batchmill.logs import LogLimit, configure_logs
from tests.kit.files import ROOT
from tests.kit.ingest import QUICK, ingest, read_all
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


def test_noise_on_a_port_is_a_few_lines(tmp_path: Path) -> None:
    """And a count; each connection is answered, and counted in the status."""
    times = 300
    with ingest(tmp_path / "home", *QUICK) as running:
        for _ in range(times):
            with running.connect() as link:
                link.sendall(b"\x16\x03\x01 noise\r\n\r\n")
                assert read_all(link).startswith(b"HTTP/1.1 400")
        assert running.metric('requests_total{outcome="bad_http",protocol="http"}') == times
    lines = running.stderr().splitlines()
    assert 0 < len(lines) < 10, lines[:20]
    assert "295 messages like this in 60 s: Invalid HTTP request received." in lines[-1]


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
