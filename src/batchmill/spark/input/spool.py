"""Reads a spool as a stream of segments, and removes those that were read."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from batchmill.spark.errors import PipelineError
from batchmill.spark.input.base import Choice, Unread
from batchmill.spark.input.choice import Pace, Segment, how_many
from batchmill.spark.input.segments import spark_path
from batchmill.spark.runtime.books import Books, Plan
from batchmill.spark.settings import MEBIBYTE, PipelineSettings

log = logging.getLogger("batchmill.spark")

_POLL_S = 10.0
_LEAST = 4 * MEBIBYTE
"""A batch with less to read is not made smaller to be quicker."""


class SpoolInput:
    """The segments of a folder."""

    def __init__(
        self,
        folder: Path,
        books: Books,
        settings: PipelineSettings,
        remove_from: Path | None = None,
    ) -> None:
        """``remove_from``: the quarantine, if segments that were read are to be removed."""
        self._folder = folder
        self._books = books
        self._settings = settings
        self._remover = None if remove_from is None else SegmentRemover(folder, books, remove_from)
        self._waiting: deque[Segment] = deque()

    @property
    def name(self) -> str:
        """The folder."""
        return str(self._folder)

    @property
    def poll_s(self) -> float:
        """Seldom: anybody can look into the folder."""
        return _POLL_S

    def check(self) -> None:
        """A folder can always be read."""

    def look(self, *, patient: bool) -> None:
        """List the folder; segments that are gone are forgotten."""
        # First what was read: a segment may be removed, and forgotten, while the folder is listed.
        read = self._books.read()
        paths = list(segment_paths(self._folder))
        gone = read.difference(paths)
        if gone:
            self._forget(gone)
        waiting = _with_sizes(path for path in paths if path not in read)
        self._waiting = deque(sorted(waiting, key=lambda segment: (segment.mtime, segment.path)))

    @property
    def waiting(self) -> bool:
        """Whether segments were listed that are not chosen yet."""
        return bool(self._waiting)

    def choose(self, pace: Pace) -> Choice | None:
        """The oldest segments, within the limits; a larger one is a batch of its own."""
        if not self._waiting:
            return None
        count = self._settings.max_batch_files
        if count is None:
            most = self._settings.max_batch_bytes
            count = how_many(self._waiting, pace.limit(max(most, _LEAST), _LEAST), most)
        chosen = [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]
        cost = sum(segment.cost for segment in chosen)
        return Choice(cost, tuple(segment.path for segment in chosen))

    def segments(self, plan: Plan) -> Sequence[str]:
        """Those of the plan."""
        return [spark_path(Path(path)) for path in plan.segments]

    def unread(self, last: int | None, now: float) -> Unread:
        """By listing the folder."""
        read = self._books.read(last)
        paths = (path for path in segment_paths(self._folder) if path not in read)
        segments = list(_with_sizes(paths))
        oldest = min((segment.mtime for segment in segments), default=now)
        size = sum(segment.size for segment in segments)
        return Unread(len(segments), size, max(0.0, now - oldest))

    def remove_read(self) -> None:
        """Remove segments that were read, if the pipeline is set to do so."""
        if self._remover is not None:
            self._remover.remove()

    def explain(self, failure: BaseException) -> str | None:
        """None: errors about files are explained where they are read."""
        return None

    def _forget(self, gone: set[str]) -> None:
        """Segments that are gone need not be remembered, if they are gone for good.

        An empty folder may be one that is not mounted: then all of them may be there again.
        """
        inside = [path for path in gone if self._folder in Path(path).parents]
        if not is_empty(self._folder):
            self._books.forget([path for path in inside if not os.path.lexists(path)])


class SegmentRemover:
    """Removes the segments of one stream's spool that were read. May be used by several threads.

    Those of batches that are done: until then a batch may be run again. They are removed when the
    next batch begins, when the stream ends, and from time to time while it is idle. What a crash
    leaves behind is removed after the restart, since the books still have it.

    A quarantined segment is removed as well, since the quarantine has a copy; where it could not be
    copied, it stays.
    """

    def __init__(self, spool: Path, books: Books, quarantine: Path) -> None:
        self._spool = spool
        self._books = books
        self._quarantine = quarantine
        self._lock = threading.Lock()
        self._warned: set[str] = set()

    def remove(self) -> int:
        """Remove what can be; how many were removed."""
        with self._lock:
            removed = [name for name in sorted(self._books.read()) if self._removed(Path(name))]
            self._books.forget(removed)
            return len(removed)

    def _removed(self, path: Path) -> bool:
        """Remove a segment; False if it stays, or is not there."""
        # The books may be of another spool.
        if self._spool not in path.parents or ".." in path.parts or self._is_only_copy(path):
            return False
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            self._warn(path, f"cannot be removed ({error}): let this user write its folder")
            return False
        return True

    def _is_only_copy(self, path: Path) -> bool:
        """Whether it was quarantined, but the quarantine has only the reason."""
        copy = self._quarantine / path.parent.name / path.name
        if copy.exists() or not copy.with_name(f"{path.name}.reason").exists():
            return False
        if path.exists():
            self._warn(path, "stays: it was quarantined, but the quarantine has no copy of it")
        return True

    def _warn(self, path: Path, what: str) -> None:
        if str(path) not in self._warned:
            self._warned.add(str(path))
            log.warning("the segment %s, which is in the store, %s", path, what)


def segment_paths(folder: Path | str) -> Iterator[str]:
    """The segments in a folder: at any depth, but no name that begins with ``.`` or ``_``."""
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if entry.name.startswith((".", "_")):
            continue
        if entry.is_dir():
            yield from segment_paths(entry.path)
        elif entry.name.endswith(".parquet"):
            yield entry.path


def is_empty(folder: Path) -> bool:
    """Whether nothing is in a folder, or it does not exist: it may not be mounted."""
    try:
        with os.scandir(folder) as entries:
            return next(entries, None) is None
    except FileNotFoundError:
        return True


def present_segments(folder: Path) -> set[str]:
    """The segments in a folder that was read before; an error if it is not mounted."""
    if is_empty(folder):
        raise PipelineError(
            f"{folder} is empty, though segments were read from it: if it is not mounted, mount "
            "it; if it was emptied on purpose, make a folder in it, then start again"
        )
    return set(segment_paths(folder))


def _with_sizes(paths: Iterator[str]) -> Iterator[Segment]:
    """Those that are still there."""
    for path in paths:
        try:
            stat = os.stat(path)  # noqa: PTH116 - called for every segment
        except FileNotFoundError:
            continue
        yield Segment(stat.st_mtime, path, stat.st_size)
