"""``batchmill export`` to a collector, as a process: killed, stopped, removed."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from pathlib import Path

import pytest

from batchmill import snapshot_queues
from batchmill.cli import _parser, ingest
from batchmill.files import read_json
from tests.kit.exporters import Mill, last_totals, measurements, mill, one, stored
from tests.kit.otlp import GrpcReceiver, Verdict, points_of
from tests.kit.processes import Life, run_here, wait_for_json

__all__ = ["one"]


def export(one: Mill, target: str, *more: str) -> Life:
    """The command for a mill's outbox, started."""
    command = [sys.executable, "-m", "batchmill", *words(one, target, *more)]
    return Life(command, one.checkpoint.parent / "errors", os.environ)


def words(one: Mill, target: str, *more: str) -> list[str]:
    """The command for a mill's outbox."""
    store = ["--store", one.store.url, "--checkpoint", str(one.checkpoint)]
    return ["export", "--to", target, *more, *store]


def test_killed_before_the_answer_it_sends_again(one: Mill) -> None:
    """The collector has it, the position is not stored: it comes twice, and is not lost."""
    release = threading.Event()
    with GrpcReceiver(lambda number: Verdict(hold=release)) as receiver:
        one.commit(*measurements(0))
        with export(one, receiver.target):
            receiver.wait_for(lambda: receiver.seen == 1)
        release.set()
        assert len(one.store.outbox(one.outbox.place)) == 1
        with export(one, receiver.target, "--once") as again:
            again.end(0)
        first, second = receiver.requests
        assert first.SerializeToString() == second.SerializeToString()
        assert last_totals(receiver.points()) == stored(one.store)
    assert one.files() == []


def test_it_tells_how_it_is_doing_and_ends_in_order(one: Mill, tmp_path: Path) -> None:
    """In a file, each second; SIGTERM ends it with what is in hand sent."""
    status = tmp_path / "status.json"
    with (
        GrpcReceiver() as receiver,
        export(one, receiver.target, "--status", str(status)) as process,
    ):
        process.must_hear(f"exporting to {re.escape(receiver.target)} as .*")
        one.commit(*measurements(0))
        wait_for_json(status, "sent_values")
        os.kill(process.pid, signal.SIGTERM)
        process.end(0)
        assert process.lines[-1].startswith("ended")
    report = read_json(status) or {}
    assert (report["pid"], report["state"]) == (process.pid, "ended")
    assert report["waiting"]["files"] == 0
    assert report["position"] == 1
    assert one.store.counters()["exported values", receiver.target, ""] == report["sent_values"]


def test_it_waits_for_a_pipeline_that_has_not_come_yet(tmp_path: Path) -> None:
    """And tells so; with --once it does not wait."""
    status = tmp_path / "status.json"
    given = ["export", "--to", "otlp+grpc://127.0.0.1:1"]
    given += ["--store", f"sqlite:///{tmp_path}/store.db", "--checkpoint", f"{tmp_path}/checkpoint"]
    command = [sys.executable, "-m", "batchmill", *given, "--status", str(status)]
    with Life(command, tmp_path / "errors", os.environ) as process:
        process.must_hear("waiting for the pipeline: .*")
        wait_for_json(status)
        made = mill(tmp_path)
        with made.store:
            process.must_hear("exporting to .*")
        os.kill(process.pid, signal.SIGTERM)
        process.end(0)
    code, _, errors = run_here(*given, "--once", "--checkpoint", f"{tmp_path}/elsewhere")
    assert code == 1
    assert "--outbox" in errors


def test_a_request_has_so_many_values_at_most(one: Mill) -> None:
    """``--batch`` bounds a request: more of them, and the same totals in the end."""
    one.commit(*measurements(0))
    with GrpcReceiver() as receiver:
        limits = ("--once", "--batch", "1", "--buffer", "2")
        assert run_here(*words(one, receiver.target, *limits))[0] == 0
        sizes = [len(points_of(request)) for request in receiver.requests]
        assert last_totals(receiver.points()) == stored(one.store)
    assert len(sizes) > 5
    assert max(sizes) < sum(sizes) / 5


def test_a_peer_that_is_silent_is_given_up_in_time(one: Mill, tmp_path: Path) -> None:
    """``--timeout`` ends the wait for an answer, and ``--retry-max`` the pause before the next."""
    release, status = threading.Event(), tmp_path / "status.json"
    given = ("--timeout", "0.2", "--retry-max", "0.1", "--drain", "0.1", "--status", str(status))
    with GrpcReceiver(lambda number: Verdict(hold=release)) as receiver:
        one.commit(*measurements(0))
        with export(one, receiver.target, *given) as process:
            receiver.wait_for(lambda: receiver.seen >= 3)
            os.kill(process.pid, signal.SIGTERM)
            process.end(0)
        release.set()
    assert (read_json(status) or {})["sent_values"] == 0


def test_it_can_be_forgotten(one: Mill) -> None:
    """Nothing waits for it any more."""
    one.store.join_outbox("old", one.outbox.place)
    one.commit(*measurements(0))
    given = words(one, "otlp+grpc://127.0.0.1:1", "--name", "old", "--forget")
    assert run_here(*given)[0] == 0
    assert one.files() == one.named() == []
    assert one.store.exporters() == []


def test_the_buffers_of_forwarded_requests_are_options_of_ingest() -> None:
    """``--export-forward-mb`` and ``--export-forward-buffer`` bound what waits for the broker."""
    pytest.importorskip("confluent_kafka", reason="install it: pip install 'batchmill[kafka]'")
    limits = ("--export-forward-mb", "1", "--export-forward-buffer", "7")
    topic = "kafka://127.0.0.1:1/topic"
    given = _parser().parse_args(["ingest", "--export-traces", topic, *limits])
    with ingest._forwarders(given) as forwarders:
        forwarder = forwarders["traces"]
        [queue] = snapshot_queues()
        assert queue.capacity == 7
        forwarder.offer(b"x" * (2**20 + 1), "application/x-protobuf", 2)
        assert forwarder.stats()["dropped"] == {"too many bytes in hand": 2}
