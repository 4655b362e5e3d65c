"""Many senders at once, and a close in the middle: every batch is answered, and truthfully."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

from batchmill.spool import Overloaded, Spool, SpoolClosedError
from tests.kit.events import numbers_in, segments, spans
from tests.kit.threads import SOAK, WAIT_S


@pytest.mark.parametrize("close_after", [5, 60] * SOAK)
def test_every_batch_is_answered_and_what_is_acknowledged_is_there(
    tmp_path: Path, close_after: int
) -> None:
    """Senders run into a full queue and into the end; the counters balance."""
    spool = Spool(tmp_path, linger_s=0.001, max_rows=40, capacity_rows=100)
    numbers = itertools.count()
    taken: list[tuple[int, Future[Path]]] = []
    refused = itertools.count()
    enough = threading.Event()

    def send() -> None:
        while True:
            first = next(numbers) * 10
            try:
                taken.append((first, spool.submit("Span", spans(range(first, first + 10)))))
            except Overloaded:
                next(refused)
                taken[-1][1].exception(WAIT_S)
            except SpoolClosedError:
                return
            if len(taken) >= close_after:
                enough.set()

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert enough.wait(WAIT_S)
    assert spool.close(WAIT_S)
    for thread in threads:
        thread.join(WAIT_S)

    written = {
        first + number
        for first, future in taken
        if future.exception(WAIT_S) is None
        for number in range(10)
    }
    stored = numbers_in(segments(tmp_path))
    assert sorted(stored) == sorted(written)
    stats = spool.stats()
    assert stats.submitted_rows == 10 * len(taken)
    assert stats.written_rows == len(written)
    assert stats.failed_rows == stats.submitted_rows - stats.written_rows
    assert stats.refused_rows == 10 * next(refused)
    assert (stats.queue_rows, stats.queue_bytes) == (0, 0)
