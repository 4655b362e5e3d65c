"""The benchmark of the whole path: the same requests for all, and the time of all processes."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.road_cost import REQUEST_SPANS, requests
from tests.kit.files import ROOT

END_NS = 1_800_000_000 * 10**9
BUSY = "import time\nwhile time.process_time() < 0.3: pass"


def test_all_receivers_get_the_same_requests() -> None:
    """Byte by byte, however often they are made."""
    sent = [list(requests(2 * REQUEST_SPANS, 1, END_NS)) for _ in range(2)]
    assert sent[0] == sent[1]
    assert len(set(sent[0])) == 2


def test_requests_of_another_batch_have_other_ids() -> None:
    """Or the pipeline would drop them as duplicates."""
    one, other = (next(requests(REQUEST_SPANS, number, END_NS)) for number in (1, 2))
    assert one != other


def test_processor_time_includes_processes_that_have_ended() -> None:
    """A task's worker may have ended before the batch has."""
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY!r}], check=True)"
    # In a process of its own: servers of other tests may end meanwhile.
    script = (
        "import os, subprocess, sys; from benchmarks.machine import tree_cpu_s; "
        "before = tree_cpu_s(os.getpid()); "
        f"subprocess.run([sys.executable, '-c', {nested!r}], check=True); "
        "print(tree_cpu_s(os.getpid()) - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, cwd=ROOT
    )
    assert float(done.stdout) >= 0.3
