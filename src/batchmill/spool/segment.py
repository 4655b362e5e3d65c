"""Segments on the disk: Parquet files that are whole and safe, or not there at all.

A segment is written beside its place under a name that no reader looks at, synced, renamed, and
then its folder is synced: when :func:`write_segment` returns, it survives a crash of the machine.
A writer that is alive holds a lock on its file; a file without one was left by a dead writer. The
pipeline removes the segments that it has committed, so what is there is unread.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from batchmill import files
from batchmill.errors import BatchmillError
from batchmill.wording import count_of

log = logging.getLogger("batchmill.spool")

SUFFIX = ".parquet"
TMP_SUFFIX = ".tmp"
_NAME = re.compile(rf"\d{{16}}-[0-9a-f]{{8}}-(\d{{1,12}})\{SUFFIX}$")
_BYTES_PER_ROW = 32
"""What a row takes in a segment, about."""
_NEW_FILE = (
    os.O_WRONLY
    | os.O_CREAT
    | os.O_EXCL
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_NOFOLLOW", 0)
)


_ADVICE = {
    errno.ENOSPC: "make room on the disk, or let the pipeline catch up",
    errno.EDQUOT: "make room in the quota, or let the pipeline catch up",
    errno.EROFS: "mount the disk for writing",
    errno.EACCES: "let this user write there",
    errno.EPERM: "let this user write there",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the system's limit of open files",
    errno.ENOENT: "put the folder back; it was removed while the spool was open",
}


class SpoolWriteError(BatchmillError, OSError):
    """A segment could not be written. Nothing in it was acknowledged, so it may be sent again."""

    folder: str
    number: int | None
    """The errno."""
    detail: str

    def __str__(self) -> str:
        advice = _ADVICE.get(self.number or 0, "check the disk")
        return f"no segment can be written in {self.folder} ({self.detail}): {advice}; then resend"


def write_error(folder: Path, error: OSError) -> SpoolWriteError:
    """The error to raise for what the operating system answered."""
    failure = SpoolWriteError(str(folder), error.errno, error.strerror or str(error))
    failure.__cause__ = error
    return failure


class Disk:
    """The calls to the operating system; tests watch them, or make them fail."""

    def create(self, path: str) -> int | None:
        """Create a file that only its owner can read, locked; its handle.

        None if another process removed it as a dead writer's file before it was locked.
        """
        handle = os.open(path, _NEW_FILE, 0o600)
        with contextlib.suppress(OSError):  # no locks on this disk: then no files are removed
            if not files.try_lock(handle) or os.fstat(handle).st_nlink == 0:
                os.close(handle)
                return None
        return handle

    def write(self, handle: int, data: memoryview) -> int:
        """Write some of ``data``; how many bytes."""
        return os.write(handle, data)

    def sync(self, handle: int) -> None:
        """Wait until the file is on the disk."""
        os.fsync(handle)

    def close(self, handle: int) -> None:
        """Close a file, which releases its lock."""
        os.close(handle)

    def rename(self, path: str, place: str) -> None:
        """Give a file its final name."""
        os.rename(path, place)  # noqa: PTH104

    def sync_folder(self, path: str) -> None:
        """Wait until the names in a folder are on the disk."""
        files.sync(path)

    def remove(self, path: str) -> None:
        """Remove a file."""
        os.unlink(path)  # noqa: PTH108

    def make_folder(self, path: str) -> None:
        """Create a folder that only its owner can enter, durably; one that is there is fine."""
        try:
            os.mkdir(path, 0o700)  # noqa: PTH102
        except FileExistsError:
            return
        self.sync_folder(os.path.dirname(path))  # noqa: PTH120


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """A segment that is on the disk."""

    path: Path
    bytes: int


def new_name(rows: int) -> str:
    """A name that no other segment has, in any process: the time, a random part, and the rows."""
    return f"{time.time_ns() // 1000}-{secrets.token_hex(4)}-{rows}{SUFFIX}"


def rows_in(name: str, size: int) -> int:
    """How many rows a segment of that name and size has; about, if its name does not tell."""
    match = _NAME.search(name)
    return size // _BYTES_PER_ROW if match is None else int(match[1])


def write_segment(folder: Path, data: memoryview, rows: int, disk: Disk) -> SegmentFile:
    """Write ``data`` as a new segment of ``folder``; when this returns, the segment is durable.

    If it raises OSError there is no segment, with one exception: where the folder could not be
    synced after the rename, the segment is there and may be gone after a crash.
    """
    place = str(folder)
    disk.make_folder(place)
    handle = None
    while handle is None:
        name = new_name(rows)
        target, tmp = f"{place}/{name}", f"{place}/.{name}{TMP_SUFFIX}"
        handle = disk.create(tmp)
    try:
        try:
            rest = data
            while rest:
                rest = rest[disk.write(handle, rest) :]
            disk.sync(handle)
            # Renamed while locked: nobody can take it for a dead writer's file.
            disk.rename(tmp, target)
        finally:
            disk.close(handle)
    except BaseException:
        with contextlib.suppress(OSError):
            disk.remove(tmp)
        raise
    disk.sync_folder(place)
    return SegmentFile(Path(target), len(data))


def remove_leftovers(root: Path) -> int:
    """Remove the unfinished files of dead writers; how many. Those of live writers are locked."""
    removed = 0
    for folder in source_folders(str(root)):
        for name in os.listdir(folder):  # noqa: PTH208
            if name.startswith(".") and name.endswith(SUFFIX + TMP_SUFFIX):
                removed += _remove_unlocked(f"{folder}/{name}")
    if removed:
        log.warning(
            "spool %s: removed %s of a process that died; nothing in them was acknowledged",
            root,
            count_of(removed, "unfinished segment"),
        )
    return removed


def _remove_unlocked(path: str) -> bool:
    try:
        handle = os.open(path, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
    except OSError:
        return False  # gone, or not ours
    try:
        if not files.try_lock(handle):
            return False
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # noqa: PTH108
        return True
    except OSError:
        return False
    finally:
        os.close(handle)


@dataclass(frozen=True, slots=True)
class Unread:
    """The complete segments that are there now."""

    segments: int
    bytes: int
    oldest_s: float
    """How old the oldest is, in seconds; 0 if there is none."""
    rows: int = 0
    """How many rows they have; about, where a segment is of an older version or another program."""


def unread(folder: str | Path) -> Unread:
    """The segments that the pipeline has not read; a folder that does not exist has none."""
    return UnreadScan(folder).scan(time.time())


def is_segment(name: str) -> bool:
    """Whether a file's name is that of a complete segment."""
    return name.endswith(SUFFIX) and not name.startswith((".", "_"))


class UnreadScan:
    """Scans a spool again and again; asks for the size of each segment only once.

    A complete segment never changes.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = os.fspath(folder)
        self._known: dict[str, tuple[int, float]] = {}

    def scan(self, now: float) -> Unread:
        """Count, size, age and rows of unread segments; the age is that at the time ``now``."""
        segments: dict[str, tuple[int, float]] = {}
        total, oldest, rows = 0, now, 0
        for path in self._paths():
            facts = self._known.get(path) or _size_and_time(path)
            if facts is not None:
                segments[path] = facts
                total += facts[0]
                rows += rows_in(path, facts[0])
                oldest = min(oldest, facts[1])
        self._known = segments
        return Unread(len(segments), total, max(0.0, now - oldest), rows)

    def _paths(self) -> Iterator[str]:
        for source in source_folders(self._folder):
            try:
                names = os.listdir(source)  # noqa: PTH208
            except (FileNotFoundError, NotADirectoryError):
                continue  # removed since
            for name in names:
                if is_segment(name):
                    yield f"{source}/{name}"


def source_folders(folder: str) -> list[str]:
    """The folders of the event types in a spool."""
    try:
        with os.scandir(folder) as entries:
            return sorted(
                entry.path for entry in entries if entry.is_dir() and not entry.name.startswith(".")
            )
    except FileNotFoundError:
        return []


def _size_and_time(path: str) -> tuple[int, float] | None:
    """Size and modification time of a file; None if it is not a regular file, or gone."""
    try:
        facts = os.stat(path)  # noqa: PTH116 - many files: no Path for each
    except FileNotFoundError:
        return None
    return (facts.st_size, facts.st_mtime) if stat.S_ISREG(facts.st_mode) else None
