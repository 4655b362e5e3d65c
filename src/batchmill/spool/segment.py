"""One segment: a Parquet file that is either there, whole and safe, or not there at all.

It is written beside its place under a name that nobody reads, synced, renamed, and then its folder
is synced: when :func:`write_segment` returns, it survives a crash of the machine. A lock on the
file tells a writer that is alive from what a dead one left.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from batchmill.spool.backlog import SUFFIX, TMP_SUFFIX, source_folders

log = logging.getLogger("batchmill.spool")

_NEW_FILE = (
    os.O_WRONLY
    | os.O_CREAT
    | os.O_EXCL
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_NOFOLLOW", 0)
)


class Disk:
    """What is asked of the operating system; a test may watch it, or have it fail."""

    def create(self, path: str) -> int | None:
        """A new file that only its owner can read, locked; its handle.

        None if somebody who tidies up took it for a dead writer's before it was locked.
        """
        handle = os.open(path, _NEW_FILE, 0o600)
        with contextlib.suppress(OSError):  # a disk without locks: then nobody tidies up either
            if not _lock(handle) or os.fstat(handle).st_nlink == 0:
                os.close(handle)
                return None
        return handle

    def write(self, handle: int, data: memoryview) -> int:
        """Write some of ``data``; how much."""
        return os.write(handle, data)

    def sync(self, handle: int) -> None:
        """Wait until the file is on the disk."""
        os.fsync(handle)

    def close(self, handle: int) -> None:
        """Close a file, and with it let go of its lock."""
        os.close(handle)

    def rename(self, path: str, place: str) -> None:
        """Give a file its name."""
        os.rename(path, place)  # noqa: PTH104

    def sync_folder(self, path: str) -> None:
        """Wait until the names in a folder are on the disk."""
        if os.name == "nt":
            return  # a folder cannot be opened there
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def remove(self, path: str) -> None:
        """Remove a file."""
        os.unlink(path)  # noqa: PTH108

    def make_folder(self, path: str) -> None:
        """Make a folder that only its owner can enter, and make that last."""
        try:
            os.mkdir(path, 0o700)  # noqa: PTH102
        except FileExistsError:
            return
        self.sync_folder(os.path.dirname(path))  # noqa: PTH120


@dataclass(frozen=True, slots=True)
class Written:
    """A segment that is on the disk."""

    path: Path
    bytes: int


def new_name() -> str:
    """A name that no other segment has, on any process: the time and something random."""
    return f"{time.time_ns() // 1000}-{secrets.token_hex(4)}{SUFFIX}"


def write_segment(folder: Path, data: memoryview, disk: Disk) -> Written:
    """Write ``data`` as a new segment of ``folder``; when it returns, the segment is safe.

    What it raises is an OSError, and then there is no segment; but for one case: where the folder
    could not be synced after the rename, it is there and may be gone after a crash.
    """
    place = str(folder)
    disk.make_folder(place)
    handle = None
    while handle is None:
        name = new_name()
        target, tmp = f"{place}/{name}", f"{place}/.{name}{TMP_SUFFIX}"
        handle = disk.create(tmp)
    try:
        try:
            rest = data
            while rest:
                rest = rest[disk.write(handle, rest) :]
            disk.sync(handle)
            # Renamed while it is locked: nobody can take it for a dead writer's.
            disk.rename(tmp, target)
        finally:
            disk.close(handle)
    except BaseException:
        with contextlib.suppress(OSError):
            disk.remove(tmp)
        raise
    disk.sync_folder(place)
    return Written(Path(target), len(data))


def remove_leftovers(root: Path) -> int:
    """Remove what writers left that are dead; how many files. A live writer's are locked."""
    removed = 0
    for folder in source_folders(str(root)):
        for name in os.listdir(folder):  # noqa: PTH208
            if name.startswith(".") and name.endswith(SUFFIX + TMP_SUFFIX):
                removed += _remove_unlocked(f"{folder}/{name}")
    if removed:
        log.warning(
            "batchmill spool %s: removed %d unfinished segments of a process that died; "
            "nothing in them was acknowledged",
            root,
            removed,
        )
    return removed


def _remove_unlocked(path: str) -> bool:
    try:
        handle = os.open(path, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
    except OSError:
        return False  # gone, or not ours
    try:
        if not _lock(handle):
            return False
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # noqa: PTH108
        return True
    except OSError:
        return False
    finally:
        os.close(handle)


def _lock(handle: int) -> bool:
    """Lock a file; False if somebody has it. Where there are no such locks, nobody has."""
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
