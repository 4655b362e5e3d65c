"""A receiver of several processes, ``batchmill ingest --processes 2``."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.kit.files import ROOT
from tests.kit.ingest import PROTOBUF, QUICK, Ingest, ingest, read_all, request, span_id
from tests.kit.processes import free_ports
from tests.kit.threads import PATIENCE_S, until

TRACES = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
TWO = ("--processes", "2")

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="several processes need Linux"),
    pytest.mark.slow(35),
    pytest.mark.system,
]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ingest]:
    """One receiver for the tests that leave it as it was."""
    with ingest(tmp_path_factory.mktemp("ingest"), *TWO, *QUICK) as running:
        yield running


def pids(running: Ingest) -> list[int]:
    """The workers, once all of them run."""
    status = await_status(running, lambda status: status["state"] == "running")
    return [worker["pid"] for worker in status["workers"]]


def await_status(running: Ingest, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The status, once it is as wanted."""

    def status() -> dict[str, Any]:
        current = running.status()
        return current if wanted(current) else {}

    return until(status, lambda: str(running.status()))


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or waits only for its exit code to be read."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in ("Z", "X")


def refusal(*options: str, home: Path) -> str:
    """What a receiver says that does not start."""
    command = [sys.executable, "-m", "batchmill", "ingest", "--home", str(home)]
    done = subprocess.run(
        [*command, "--http-port", "0", "--grpc-port", "0", *options],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 1, done.stdout
    assert "Traceback" not in done.stderr
    return done.stderr


@contextlib.contextmanager
def half_sent(running: Ingest, body: bytes) -> Iterator[socket.socket]:
    """A connection on which the last byte of a request is missing."""
    with running.connect() as link:
        head = f"POST /v1/traces HTTP/1.1\r\nhost: h\r\ncontent-type: {PROTOBUF}\r\n"
        head += f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        link.sendall(head.encode() + body[:-1])
        yield link


def test_spans_of_both_protocols_are_stored_once(shared: Ingest) -> None:
    """And status and metrics are the sum, whichever process is asked."""
    ids = Counter(span_id(number) for number in range(1, 41))
    before = shared.status()
    with contextlib.ExitStack() as stack:
        for number in range(1, 21):
            body = request(number)
            link = stack.enter_context(
                contextlib.closing(http.client.HTTPConnection(*shared.http, timeout=PATIENCE_S))
            )
            link.request("POST", "/v1/traces", body, {"content-type": PROTOBUF})
            answer = link.getresponse()
            answer.read()
            assert answer.status == 200
        for number in range(21, 41):
            own = [("grpc.use_local_subchannel_pool", 1)]
            with grpc.insecure_channel(shared.grpc, options=own) as channel:
                channel.unary_unary(TRACES)(request(number), timeout=PATIENCE_S)
        # Connections that stay open are spread evenly.
        await_status(
            shared,
            lambda status: [w["connections"] for w in status["workers"]] == [10, 10],
        )
    assert Counter(span["span_id"] for span in shared.spans()) == ids
    for name in ("received_spans", "acknowledged_spans"):
        wanted = before[name] + 40
        after = await_status(shared, lambda s, n=name, w=wanted: s[n] == w)  # type: ignore[misc]
    assert after["acknowledged_spans"] == sum(w["acknowledged_spans"] for w in after["workers"])
    # A connection each: they go to the processes in turn.
    assert {shared.metric("acknowledged_spans_total") for _ in range(4)} == {40.0}
    page = shared.ask("GET", "/metrics").body.decode()
    calls = re.findall(r'backend_calls_total\{batcher="spool-Span",process="(\d)"\}', page)
    assert calls == ["1", "2"]
    assert {shared.ask("GET", "/healthz").body for _ in range(4)} == {b"ok\n"}
    assert {shared.ask("GET", "/readyz").body for _ in range(4)} == {b"NORMAL\n"}


@pytest.mark.parametrize(
    ("setting", "processes"), [("http_port", "1"), ("http_port", "2"), ("grpc_port", "2")]
)
def test_a_second_receiver_on_its_ports(
    shared: Ingest, tmp_path: Path, setting: str, processes: str
) -> None:
    """Is refused as beside a receiver of one process, and the message names the setting."""
    port = shared.http[1] if setting == "http_port" else int(shared.grpc.rpartition(":")[2])
    option = f"--{setting.replace('_', '-')}"
    errors = refusal(option, str(port), "--processes", processes, home=tmp_path / "home")
    assert f"{setting}={port} is not valid: it must be a free port of 127.0.0.1" in errors


def test_sigterm_drains_all_processes(tmp_path: Path) -> None:
    """A request under way in each is answered; then all of them end."""
    with ingest(tmp_path, *TWO, *QUICK) as running:
        workers = pids(running)
        with half_sent(running, request(1)) as one, half_sent(running, request(2)) as other:
            await_status(running, lambda status: status["requests_under_way"] == 2)
            os.kill(running.process.pid, signal.SIGTERM)
            await_status(running, lambda status: status["state"] == "draining")
            for link, number in ((one, 1), (other, 2)):
                link.sendall(request(number)[-1:])
                assert read_all(link).startswith(b"HTTP/1.1 200")
        running.process.end(0)
        assert all(map(has_ended, workers))
    assert {span["span_id"] for span in running.spans()} == {span_id(1), span_id(2)}
    status = running.status()
    assert (status["state"], status["acknowledged_spans"]) == ("draining", 2)
    assert "ended: everything acknowledged is in the spool" in running.process.lines


def test_workers_do_not_outlive_their_parent(tmp_path: Path) -> None:
    """Not even one that was killed; its ports are free then."""
    ports = free_ports(2)
    given = ("--http-port", str(ports[0]), "--grpc-port", str(ports[1]), *TWO, *QUICK)
    with ingest(tmp_path, *given) as running:
        workers = pids(running)
        running.process.kill()
        until(lambda: all(map(has_ended, workers)))
    with ingest(tmp_path, *given) as running:
        assert running.post(request(1)).status == 200


def test_a_worker_that_dies_is_restarted(tmp_path: Path) -> None:
    """The others go on meanwhile, and what it has counted stays in the sum."""
    with ingest(tmp_path, *TWO, *QUICK) as running:
        victim, other = pids(running)
        for number in range(1, 5):
            assert running.post(request(number)).status == 200
        before = await_status(running, lambda status: status["acknowledged_spans"] == 4)
        assert before["restarts"] == 0
        os.kill(victim, signal.SIGKILL)
        await_status(running, lambda status: status["state"] == "restarting")
        assert running.post(request(5)).status == 200
        after = await_status(running, lambda status: status["state"] == "running")
        assert after["pid"] == before["pid"]
        assert after["restarts"] == after["workers"][0]["restarts"] == 1
        assert [worker["pid"] for worker in after["workers"]] != [victim, other]
        assert running.post(request(6)).status == 200
        await_status(running, lambda status: status["acknowledged_spans"] == 6)
        assert "worker 1 died (SIGKILL): starting it again in 0.5 s" in running.stderr()


def test_the_connection_limit_is_for_all_of_them(tmp_path: Path) -> None:
    """Each takes half, and only one more than all is refused.

    A second Ctrl-C ends all at once, though a request is under way.
    """
    with ingest(tmp_path, *TWO, "--max-connections", "4") as running:
        workers = pids(running)
        with contextlib.ExitStack() as all_:
            for _ in range(4):
                link = all_.enter_context(running.connect())
                link.sendall(b"GET /metrics HTTP/1.1\r\nhost: h\r\n\r\n")
                assert link.recv(20).startswith(b"HTTP/1.1 200")
            assert running.post(request(1)).status == 503
            assert running.ask("GET", "/healthz").status == 200  # by the reserve
            await_status(running, lambda status: status["connections"]["open"] == 4)
        await_status(running, lambda status: status["connections"]["open"] == 0)
        with half_sent(running, request(1)):
            await_status(running, lambda status: status["requests_under_way"] == 1)
            os.kill(running.process.pid, signal.SIGINT)
            await_status(running, lambda status: status["state"] == "draining")
            os.kill(running.process.pid, signal.SIGINT)
            running.process.end(130)
        until(lambda: all(map(has_ended, workers)))


def test_limits_too_small_for_so_many(tmp_path: Path) -> None:
    """Are refused at the start."""
    errors = refusal("--processes", "5", "--max-connections", "4", home=tmp_path / "home")
    assert "processes=5 is not valid: it must be at most 4" in errors


def test_a_worker_that_cannot_start(tmp_path: Path) -> None:
    """Ends all of them, and its message is there."""
    (tmp_path / "spool").write_text("not a folder")
    errors = refusal(*TWO, home=tmp_path)
    assert re.search(r"worker \d: batchmill ingest: no segment can be written", errors)
    assert re.search(r"batchmill ingest: worker \d did not start \(exit code 1\)", errors)
