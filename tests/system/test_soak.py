"""Parts of ``make soak`` that can be tried alone."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from tests.kit.processes import Life
from tests.soak.stage import Clock


def test_the_clock_of_a_process_is_moved_while_it_runs(tmp_path: Path) -> None:
    """The wall clock alone: how long it sleeps does not change."""
    source = """
import sys, time
for line in sys.stdin:
    start = time.monotonic()
    time.sleep(0.01)
    assert 0.01 <= time.monotonic() - start < 60
    print(round(time.time()), flush=True)
"""
    clock = Clock(tmp_path)
    with Life([sys.executable, "-c", source], env={**os.environ, **clock.environment}) as process:
        for seconds in (0, 40 * 86_400, -40 * 86_400, 0):
            clock.set(seconds)
            process.tell("now")
            process.must_hear(r"\d+")
            assert abs(int(process.lines[-1]) - time.time() - seconds) < 60
