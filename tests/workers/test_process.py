"""Exit, SIGTERM, SIGKILL, fork, and several processes on one store."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.kit.files import ROOT

pytest.importorskip("pyarrow")

from batchmill import Embedded
from batchmill.store import MetricConflictError, open_store
from tests.kit.processes import Child, Life, run_script
from tests.kit.stores import Backend
from tests.kit.threads import WAIT_S, spawn, until
from tests.workers.kit import OAL, MillSale, embedded, totals

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork()")

LONG = 3600.0
HEADER = f"""
import atexit, sys
sys.path.insert(0, {str(ROOT)!r})
# Registered before batchmill's own exit hook, so it is called after that.
atexit.register(lambda: print("accepted", mill.stats().accepted, mill.stats().failed, flush=True))
from tests.workers.kit import MillSale, embedded
mill = embedded(url, l1_period_s={LONG}, l2_period_s={LONG})
"""


@pytest.fixture
def url(tmp_path: Path) -> str:
    """The address of an empty place for a store."""
    return f"sqlite:///{tmp_path}/metrics.db"


def accepted_by(process: Life) -> int:
    """What a script of :data:`HEADER` had accepted; it lost none of it."""
    word, accepted, failed = process.lines[-1].split()
    assert (word, failed) == ("accepted", "0")
    return int(accepted)


def test_events_are_committed_at_exit(backend: Backend) -> None:
    """Though nobody closes it, nor refers to it any more, and its periods are long."""
    script = f"""
        import gc, sys
        sys.path.insert(0, {str(ROOT)!r})
        from tests.workers.kit import MillSale, embedded
        embedded({backend.url!r}, l1_period_s=3600).emit_many([MillSale("a", 2)] * 1000)
        gc.collect()
    """
    done = run_script(script)
    assert (done.returncode, done.stderr) == (0, "")
    assert totals(backend.url) == (1000, 2000)


@pytest.mark.parametrize("then", ["", "; mill.flush()"], ids=["emitting", "flushing"])
def test_events_are_committed_on_sigterm(url: str, then: str) -> None:
    """All that were accepted, in the middle of a call; the exit code says that it was ended."""
    source = f'print("ready", flush=True)\nwhile True: mill.emit(MillSale("a", 3)){then}'
    with Life.of_script(HEADER + source, url=url) as process:
        process.must_hear("ready")
        os.kill(process.pid, signal.SIGTERM)
        process.end(128 + signal.SIGTERM)
    accepted = accepted_by(process)
    assert totals(url) == (accepted, 3 * accepted)


def test_a_handler_of_the_application_stays(url: str) -> None:
    """SIGTERM is left alone where it is handled, or where that is wanted."""

    def own(*_: object) -> None: ...

    before = signal.signal(signal.SIGTERM, own)
    try:
        with embedded(url):
            assert signal.getsignal(signal.SIGTERM) is own
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with embedded(url, handle_sigterm=False):
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        spawn(embedded, url).result().close()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_killed_process_loses_no_commit(url: str) -> None:
    """What was committed is there, whole; another process takes its stream, and goes on."""
    source = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.workers.kit import MillSale, embedded
mill = embedded(url, l1_period_s=0.01, l2_period_s=0.01)
committed = 0
while True:
    mill.emit_many([MillSale("a", 5)] * 10, timeout=60)
    if mill.stats().committed > committed:
        committed = mill.stats().committed
        print(committed, flush=True)
"""
    with Life.of_script(source, url=url) as process:
        process.must_hear(r"\d+", 3)
        process.kill()
    count, cents = totals(url)
    assert count >= int(process.lines[-1])
    assert cents == 5 * count
    with embedded(url) as mill:
        mill.emit(MillSale("a", 5))
    assert totals(url) == (count + 1, cents + 5)
    with open_store(url) as store:
        assert [stream.name for stream in store.streams()] == ["embedded-0"]


def test_a_child_of_multiprocessing_commits_at_its_end(url: str) -> None:
    """A forked one with the parent's instance, which ends without Python's exit hooks."""
    with embedded(url, l1_period_s=LONG) as mill:
        mill.emit(MillSale("a", 1))

        def work() -> None:
            mill.emit_many([MillSale("a", 10)] * 7)

        child = multiprocessing.get_context("fork").Process(target=work)
        child.start()
        child.join(WAIT_S)
        assert child.exitcode == 0
        assert totals(url) == (7, 70)
        assert mill.stats().accepted == 1
    assert totals(url) == (8, 71)


def test_parent_and_children_emit(backend: Backend) -> None:
    """As with a server that forks its workers: nothing is lost, nothing counted twice."""
    stop = threading.Event()
    with embedded(backend.url, l1_period_s=0.005, l2_period_s=0.005) as mill:

        def emit() -> int:
            rounds = 0
            while not stop.is_set():
                mill.emit_many([MillSale("parent", 1)] * 10, timeout=WAIT_S)
                rounds += 1
            return rounds

        def work() -> None:
            assert mill.stats().accepted == 0
            assert mill.emit_many([MillSale("child", 1000)] * 20, timeout=WAIT_S) == 20
            assert mill.flush(WAIT_S)
            assert mill.emit(MillSale("child", 1000))
            assert mill.close()

        emitting = spawn(emit)
        try:
            children: list[Child] = []
            for _ in range(4):  # while the workers of the parent are at work
                committed = mill.stats().commits
                until(lambda: mill.stats().commits > committed, "a commit")  # noqa: B023
                children.append(Child(work))
            for child in children:
                child.succeeds()
        finally:
            stop.set()
        rounds = emitting.result()
    count = 10 * rounds + 4 * 21
    assert totals(backend.url) == (count, 10 * rounds + 4 * 21 * 1000)
    assert mill.stats().committed == 10 * rounds


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="this system has no /proc")
def test_a_child_inherits_no_connection_of_sqlite(url: str) -> None:
    """SQLite must not be carried across a fork; the parent opens the file again."""
    path = url.removeprefix("sqlite:///")

    def is_open() -> bool:
        files = Path("/proc/self/fd").iterdir()
        return any(str(file.resolve()).startswith(path) for file in files)

    def work() -> None:
        assert not is_open()

    with embedded(url) as mill:
        assert is_open()
        Child(work).succeeds()
        mill.emit(MillSale("a", 1))
        assert mill.flush(WAIT_S)
        assert is_open()
    assert totals(url) == (1, 1)


def test_a_child_of_a_closed_one(url: str) -> None:
    """It is closed in the child, too."""
    mill = embedded(url)
    mill.close()

    def work() -> None:
        assert not mill.emit(MillSale("a", 1))
        assert mill.close()

    Child(work).succeeds()


def test_processes_that_start_together(empty_backend: Backend) -> None:
    """On a store that does not exist yet: each has a stream, and nothing is lost."""
    source = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.workers.kit import MillSale, embedded
print("ready", flush=True)
sys.stdin.readline()
with embedded(url, l1_period_s=0.01, l2_period_s=0.01) as mill:
    for _ in range(20):
        mill.emit_many([MillSale("a", 1)] * 10, timeout=60)
        mill.flush(60)
    assert mill.close()
"""
    processes = [Life.of_script(source, url=empty_backend.url) for _ in range(2)]
    try:
        for process in processes:
            process.must_hear("ready")
        for process in processes:
            process.tell("go")
        with embedded(empty_backend.url, l1_period_s=0.01, l2_period_s=0.01) as mill:
            mill.emit_many([MillSale("a", 1)] * 200)
        for process in processes:
            process.end()
    finally:
        for process in processes:
            process.kill()
    assert totals(empty_backend.url) == (600, 600)


CHANGED = OAL.replace("count()", "cpm()")


def test_a_definition_that_another_process_has_otherwise(url: str) -> None:
    """Two that run disagree: an error. After the other has ended it is a new version."""
    with embedded(url) as mill:
        mill.emit(MillSale("a", 1))
        with pytest.raises(MetricConflictError, match="mill_sales"):
            embedded(url, oal=CHANGED)
    with embedded(url, oal=CHANGED) as mill:
        mill.emit(MillSale("a", 1))
    with open_store(url) as store:
        assert [metric.version for metric in store.metrics() if metric.name == "mill_sales"] == [2]


def test_processes_of_a_named_application(url: str) -> None:
    """They count as one: a changed script is a new version, a dropped metric is retired."""
    settings: dict[str, Any] = {"store": url, "name": "shop", "ttl_days": 3650}
    with (
        Embedded(oal=OAL, **settings) as one,
        Embedded(oal=OAL, **settings) as other,
    ):
        one.emit(MillSale("a", 1))
        other.emit(MillSale("a", 1))
    assert totals(url) == (2, 2)
    with Embedded(oal=OAL, **settings) as old:
        old.emit(MillSale("a", 1))
        with Embedded(oal=CHANGED.splitlines()[1], **settings) as new:
            new.emit(MillSale("a", 1))
            assert old.flush(WAIT_S)
    with open_store(url) as store:
        assert [metric.name for metric in store.metrics()] == ["mill_sales"]
        versions = {
            metric.version: metric
            for metric in store.metrics(include_retired=True)
            if metric.name == "mill_sales"
        }
        assert [value.value for value in store.values(versions[1])] == [3]
        assert [value.value for value in store.values(versions[2])] == [1]
