"""Parts of ``make soak`` that can be tried alone."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.kit.files import leave_no_room, resize, small_disk
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


def test_a_disk_is_made_full_while_others_write(tmp_path: Path) -> None:
    """What they write between two looks is no error, and in the end nobody can write."""
    end = threading.Event()

    def write(folder: Path) -> None:
        number = 0
        while not end.is_set():
            number += 1
            with contextlib.suppress(OSError):
                (folder / str(number % 500)).write_bytes(b"x" * 65_536)

    with small_disk(tmp_path / "disk", 65_536) as folder:
        writer = threading.Thread(target=write, args=(folder,))
        writer.start()
        try:
            for _ in range(20):
                leave_no_room(folder)
                resize(folder, 65_536)
        finally:
            end.set()
            writer.join()
        leave_no_room(folder)
        with pytest.raises(OSError, match="No space left"):
            (folder / "more").write_bytes(b"x" * 65_536)
