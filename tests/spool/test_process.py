"""fork, exit, and a spool that nobody closed."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from tests.kit.files import ROOT

pytest.importorskip("pyarrow")

from batchmill.spool import Spool
from tests.kit.events import HeldDisk, numbers_in, segments, spans, unfinished
from tests.kit.processes import Child, run_script
from tests.kit.threads import WAIT_S, until


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork()")
def test_a_forked_child_has_a_spool_of_its_own(tmp_path: Path) -> None:
    """Empty, with nothing waiting; what the parent had taken, the parent writes, once."""
    disk = HeldDisk()
    with Spool(tmp_path, linger_s=0, capacity_rows=10, disk=disk) as spool:
        parents = spool.submit("Span", spans(range(10)))
        disk.gate.wait_entered()

        def work() -> None:
            disk.gate.open()
            if spool.stats().queue_rows or spool.stats().submitted_rows:
                raise AssertionError(spool.stats())
            spool.submit("Span", spans([11])).result(WAIT_S)
            if spool.stats().written_rows != 1:
                raise AssertionError(spool.stats())

        Child(work).succeeds()
        assert spool.stats().queue_rows == 10
        disk.gate.open()
        parents.result(WAIT_S)
    assert sorted(numbers_in(segments(tmp_path))) == [*range(10), 11]
    assert unfinished(tmp_path) == []


def test_a_spool_that_was_never_closed_writes_at_exit(tmp_path: Path) -> None:
    """Whatever it has taken, though it would have lingered on."""
    script = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from batchmill.spool import Spool
from tests.kit.events import spans
spool = Spool({str(tmp_path)!r}, linger_s=60)
spool.submit("Span", spans([1, 2]))
"""
    done = run_script(script)
    assert (done.returncode, done.stderr) == (0, "")
    assert numbers_in(segments(tmp_path)) == [1, 2]


def test_a_spool_that_nobody_references_writes_what_it_has(tmp_path: Path) -> None:
    """Its future is answered all the same."""
    future = Spool(tmp_path, linger_s=60).submit("Span", spans([1]))
    until(lambda: (gc.collect(), future.done())[1], "it is written")
    assert numbers_in([future.result()]) == [1]


def test_two_processes_share_a_folder(tmp_path: Path) -> None:
    """Neither takes the other's unfinished segment for a dead one's, nor its name."""
    disk = HeldDisk()
    with Spool(tmp_path, linger_s=0, disk=disk) as spool:
        future = spool.submit("Span", spans([1]))
        disk.gate.wait_entered()
        script = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from batchmill.spool import Spool
from tests.kit.events import spans
with Spool({str(tmp_path)!r}, linger_s=0) as spool:
    spool.submit("Span", spans([2])).result()
"""
        done = run_script(script)
        assert (done.returncode, done.stderr) == (0, "")
        assert len(unfinished(tmp_path)) == 1
        disk.gate.open()
        future.result(WAIT_S)
    assert sorted(numbers_in(segments(tmp_path))) == [1, 2]


def test_without_pyarrow_it_says_what_to_install() -> None:
    """The package itself loads: levels, errors and unread() need nothing."""
    done = run_script("""
import sys
sys.modules["pyarrow"] = None
import batchmill.spool
from batchmill import Client
print(batchmill.spool.unread("/nowhere"))
for make in (lambda: batchmill.spool.Spool, lambda: Client("/tmp/x")):
    try:
        make()
    except ImportError as error:
        print(error)
""")
    assert done.stderr == ""
    assert done.stdout.count("pip install 'batchmill[spool]'") == 2
