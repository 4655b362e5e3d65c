"""A disk that is really full."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

from batchmill.spool import Level, Overloaded, Spool, SpoolWriteError
from tests.kit.events import numbers_in, segments, spans, unfinished
from tests.kit.files import fill, small_disk
from tests.kit.threads import WAIT_S, until


def test_a_full_disk_fails_what_it_cannot_hold_and_nothing_else(tmp_path: Path) -> None:
    """Senders hear why and are refused; with room again they are served, and nothing is lost."""
    with (
        small_disk(tmp_path / "disk") as disk,
        Spool(disk / "spool", linger_s=0, min_free_bytes=0, retry_after_s=0.05) as spool,
    ):
        before = spool.submit("Span", spans([1])).result(WAIT_S)
        filler = fill(disk)
        error = spool.submit("Span", spans(range(100))).exception(WAIT_S)
        assert isinstance(error, SpoolWriteError)
        assert error.number == errno.ENOSPC
        assert "make room on the disk" in str(error)
        assert unfinished(disk / "spool") == []
        filler.unlink()

        until(lambda: spool.level() is Level.NORMAL, "somebody may try again")
        after = spool.submit("Span", spans([2])).result(WAIT_S)
        assert spool.level() is Level.NORMAL
        assert segments(disk / "spool") == sorted([before, after])
        assert numbers_in([before, after]) == [1, 2]
        stats = spool.stats()
        assert (stats.written_rows, stats.failed_rows, stats.queue_rows) == (2, 100, 0)


def test_while_the_disk_is_full_batches_are_refused(tmp_path: Path) -> None:
    """At CRITICAL, with the disk as the reason: before anything is converted for nothing."""
    with (
        small_disk(tmp_path / "disk") as disk,
        Spool(disk, linger_s=0, min_free_bytes=0, retry_after_s=60) as spool,
    ):
        spool.submit("Span", spans([1])).result(WAIT_S)
        fill(disk)
        assert spool.submit("Span", spans(range(100))).exception(WAIT_S) is not None
        assert spool.level() is Level.CRITICAL
        with pytest.raises(Overloaded, match="No space left"):
            spool.submit("Span", spans([2]))


def test_room_is_kept_for_the_pipeline(tmp_path: Path) -> None:
    """Before the disk is full, batches are refused: the store lies on it, too."""
    with (
        small_disk(tmp_path / "disk", kibibytes=512) as disk,
        Spool(disk, linger_s=0, min_free_bytes=256 << 10) as spool,
    ):
        assert spool.level() is Level.NORMAL
        fill(disk, leave=128 << 10)
        until(lambda: spool.level() is Level.CRITICAL, "the level rises")
        with pytest.raises(Overloaded, match="must stay free"):
            spool.submit("Span", spans([1]))
