"""One segment: whole and safe before anybody hears of it, or not there at all."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

import pyarrow.parquet as pq

from batchmill.spool import Level, Spool, SpoolWriteError
from batchmill.spool.segment import Disk, remove_leftovers, rows_in, unread, write_segment
from tests.kit.events import BrokenDisk, WatchedDisk, numbers_in, segments, spans, unfinished
from tests.kit.servers.kafka import span_batch
from tests.kit.threads import WAIT_S
from tests.kit.traces.segments import made_span

DATA = memoryview(b"some bytes")


def test_the_answer_comes_after_sync_rename_and_sync_of_the_folder(tmp_path: Path) -> None:
    """The sender is told last; before that, everything is on the disk, in this order."""
    disk = WatchedDisk()
    with Spool(tmp_path / "spool", linger_s=0, disk=disk) as spool:
        del disk.notes[:]
        spool.submit("Span", spans([1])).add_done_callback(lambda _: disk.note("answer"))
    order = ["sync folder spool", "create", "write", "sync", "rename", "sync folder Span"]
    assert disk.notes == [*order, "answer"]


def test_only_the_owner_can_read(tmp_path: Path) -> None:
    """Files are 0600 and folders 0700, whatever the umask."""
    before = os.umask(0)
    try:
        with Spool(tmp_path / "spool", linger_s=0) as spool:
            path = spool.submit("Span", spans([1])).result(WAIT_S)
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(place.stat().st_mode) for place in (path, path.parent, spool.folder)]
    assert modes == [0o600, 0o700, 0o700]


def test_a_segment_is_named_by_time_chance_and_rows(tmp_path: Path) -> None:
    """Microseconds since 1970, eight hexadecimal digits, and how many rows it has."""
    path = write_segment(tmp_path / "Span", DATA, 1234, Disk()).path
    assert re.fullmatch(r"\d{16}-[0-9a-f]{8}-1234\.parquet", path.name)
    assert rows_in(str(path), 10) == 1234
    assert unread(tmp_path).rows == 1234


@pytest.mark.parametrize("with_events", [True, False])
def test_events_of_spans_can_be_left_out(tmp_path: Path, with_events: bool) -> None:
    """And status messages; the columns stay, and so does everything that metrics read."""
    event = {"time": 1, "name": "retry", "attributes": {}}
    row = made_span(1, 1, message="no", events=[event], http__route="/cart", user__id="7")
    with Spool(tmp_path / "spool", linger_s=0, span_events=with_events) as spool:
        path = spool.submit("Span", span_batch([row])).result(WAIT_S)
    (read,) = pq.read_table(path).to_pylist()
    assert (read["http_route"], read["attributes"]) == ("/cart", [("user.id", "7")])
    extras = ("no", json.dumps([event])) if with_events else (None, None)
    assert (read["status_message"], read["events"]) == extras


@pytest.mark.parametrize("name", ["1794920504238037-ed8e5f5a.parquet", "a-5.parquet", "5.parquet"])
def test_the_rows_of_other_segments_are_estimated(name: str) -> None:
    """Of those of older versions, and of other programs."""
    assert rows_in(f"/spool/Span/{name}", 3_200) == 100


def test_a_write_may_take_several_calls(tmp_path: Path) -> None:
    """An operating system may write less than it was given."""

    class Slow(Disk):
        def write(self, handle: int, data: memoryview) -> int:
            return super().write(handle, data[:3])

    assert write_segment(tmp_path / "Span", DATA, 3, Slow()).path.read_bytes() == bytes(DATA)


@pytest.mark.parametrize("step", ["create", "write", "sync", "rename"])
def test_a_segment_that_fails_is_not_there(tmp_path: Path, step: str) -> None:
    """Whichever step fails: the future says so, and nothing is left."""
    disk = BrokenDisk(step)
    with Spool(tmp_path, linger_s=0, disk=disk) as spool:
        error = spool.submit("Span", spans([1])).exception(WAIT_S)
        assert isinstance(error, SpoolWriteError)
        assert error.number == errno.ENOSPC
        assert "make room" in str(error)
        assert spool.level() is Level.CRITICAL
        stats = spool.stats()
    left = unfinished(tmp_path) if step != "create" else []  # there the disk lies about it
    seen = segments(tmp_path) if step != "rename" else []  # and there, too
    assert (left, seen) == ([], [])
    assert (stats.submitted_rows, stats.written_rows, stats.failed_rows) == (1, 0, 1)


def test_a_folder_that_cannot_be_synced_is_a_failure(tmp_path: Path) -> None:
    """Then the segment is there, but nobody was told that it stays: it is sent again."""
    (tmp_path / "Span").mkdir()
    with Spool(tmp_path, linger_s=0, disk=BrokenDisk("sync folder Span")) as spool:
        error = spool.submit("Span", spans([1])).exception(WAIT_S)
    assert isinstance(error, SpoolWriteError)
    assert numbers_in(segments(tmp_path)) == [1]


def test_what_a_dead_writer_left_is_removed(tmp_path: Path) -> None:
    """At start; other files are nobody's business."""
    folder = tmp_path / "Span"
    folder.mkdir()
    for name in (".1-a.parquet.tmp", ".keep", "1-b.parquet"):
        (folder / name).touch()
    Spool(tmp_path).close()
    assert sorted(path.name for path in folder.iterdir()) == [".keep", "1-b.parquet"]


def test_what_a_live_writer_is_writing_stays(tmp_path: Path) -> None:
    """Another process, or another spool of this one, may be starting just now."""
    disk = Disk()
    folder = tmp_path / "Span"
    folder.mkdir()
    path = str(folder / ".1-a.parquet.tmp")
    handle = disk.create(path)
    assert handle is not None
    assert remove_leftovers(tmp_path) == 0
    disk.close(handle)
    assert remove_leftovers(tmp_path) == 1


def test_a_file_that_was_tidied_away_before_its_lock_is_made_anew(tmp_path: Path) -> None:
    """Between making a file and locking it, it looks like a dead writer's."""

    class Unlucky(Disk):
        tries = 0

        def create(self, path: str) -> int | None:
            self.tries += 1
            handle = super().create(path)
            if self.tries == 1 and handle is not None:
                os.close(handle)
                remove_leftovers(tmp_path)
                return None
            return handle

    written = write_segment(tmp_path / "Span", DATA, 3, Unlucky())
    assert [written.path] == segments(tmp_path)


def test_a_folder_that_cannot_be_made_is_reported_at_once(tmp_path: Path) -> None:
    """Not with the first batch, hours later."""
    (tmp_path / "file").touch()
    with pytest.raises(SpoolWriteError, match="file"):
        Spool(tmp_path / "file" / "spool")
