"""What lies in a spool and has not been read: the pipeline removes what it has committed.

A complete segment never changes, so its size is asked for once.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SUFFIX = ".parquet"
TMP_SUFFIX = ".tmp"


@dataclass(frozen=True, slots=True)
class Unread:
    """The complete segments that are there now."""

    segments: int
    bytes: int
    oldest_s: float
    """How old the oldest is, in seconds; 0 if there is none."""


def unread(folder: str | Path) -> Unread:
    """What of the spool in ``folder`` has not been read; a folder that is not there is empty."""
    return UnreadScan(folder).look(time.time())


def is_segment(name: str) -> bool:
    """Whether a file's name is that of a complete segment."""
    return name.endswith(SUFFIX) and not name.startswith((".", "_"))


class UnreadScan:
    """Looks at a spool again and again; only what is new since the last time costs anything."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = os.fspath(folder)
        self._known: dict[str, tuple[int, float]] = {}

    def look(self, now: float) -> Unread:
        """What is there; ``now`` is the time of day, for the age of the oldest."""
        known = self._known
        found: dict[str, tuple[int, float]] = {}
        total, oldest = 0, now
        for path in self._paths():
            facts = known.get(path) or _facts(path)
            if facts is not None:
                found[path] = facts
                total += facts[0]
                oldest = min(oldest, facts[1])
        self._known = found
        return Unread(len(found), total, max(0.0, now - oldest))

    def _paths(self) -> Iterator[str]:
        for source in source_folders(self._folder):
            try:
                names = os.listdir(source)  # noqa: PTH208
            except (FileNotFoundError, NotADirectoryError):
                continue  # gone since
            for name in names:
                if is_segment(name):
                    yield f"{source}/{name}"


def source_folders(folder: str) -> list[str]:
    """The folders of the event types in a spool."""
    try:
        with os.scandir(folder) as entries:
            return sorted(
                each.path for each in entries if each.is_dir() and not each.name.startswith(".")
            )
    except FileNotFoundError:
        return []


def free_bytes(folder: str | Path) -> int | None:
    """What is left on the disk of ``folder`` for this user; None where nobody can tell."""
    try:
        disk = os.statvfs(folder)
    except (OSError, AttributeError):
        return None
    return disk.f_bavail * disk.f_frsize


def _facts(path: str) -> tuple[int, float] | None:
    """Size and time of a file; None if it is none, or gone."""
    try:
        facts = os.stat(path)  # noqa: PTH116 - many files: no Path for each
    except FileNotFoundError:
        return None
    return (facts.st_size, facts.st_mtime) if stat.S_ISREG(facts.st_mode) else None
