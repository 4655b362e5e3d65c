"""What lies in a spool and has not been read."""

from __future__ import annotations

import os
import time
from pathlib import Path

from batchmill.spool import Unread, unread
from batchmill.spool.segment import UnreadScan


def _segment(path: Path, size: int, age_s: float = 0) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"x" * size)
    moment = time.time() - age_s
    os.utime(path, (moment, moment))
    return path


def test_a_folder_that_is_not_there_is_empty(tmp_path: Path) -> None:
    """Nobody has written yet."""
    assert unread(tmp_path / "spool") == Unread(0, 0, 0.0)


def test_complete_segments_of_all_types_count(tmp_path: Path) -> None:
    """Unfinished ones, other files and folders do not."""
    _segment(tmp_path / "Span" / "1-a.parquet", 10, age_s=100)
    _segment(tmp_path / "Endpoint" / "2-b.parquet", 5)
    _segment(tmp_path / "Span" / ".3-c.parquet.tmp", 1000)
    _segment(tmp_path / "Span" / "_SUCCESS.parquet", 1000)
    _segment(tmp_path / "Span" / "notes.txt", 1000)
    (tmp_path / "Span" / "folder.parquet").mkdir()
    _segment(tmp_path / "stray.parquet", 1000)
    backlog = unread(tmp_path)
    assert (backlog.segments, backlog.bytes) == (2, 15)
    assert 100 <= backlog.oldest_s < 200


def test_what_is_removed_is_read(tmp_path: Path) -> None:
    """A second look knows what was there, and notices what is not any more."""
    scan = UnreadScan(tmp_path)
    first = _segment(tmp_path / "Span" / "1-a.parquet", 10)
    assert scan.scan(time.time()).bytes == 10
    _segment(tmp_path / "Span" / "2-b.parquet", 7)
    first.unlink()
    backlog = scan.scan(time.time())
    assert (backlog.segments, backlog.bytes) == (1, 7)


def test_a_clock_that_went_back_makes_no_negative_age(tmp_path: Path) -> None:
    """A segment of the future is new."""
    _segment(tmp_path / "Span" / "1-a.parquet", 10, age_s=-100)
    assert unread(tmp_path).oldest_s == 0
