"""Reads a spool as a stream of segments, and removes those that were read."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from pyspark.sql import SparkSession

from batchmill.spark.errors import PipelineError
from batchmill.spark.files.paths import AnyPath, file_at, is_empty, is_uri, segments_in
from batchmill.spark.input.base import Choice, Unread
from batchmill.spark.input.books import Books, Plan
from batchmill.spark.input.choice import Cut, Pace, Room, Segment, cut, how_many
from batchmill.spark.input.segments import spark_path
from batchmill.spark.settings import MEBIBYTE, PipelineSettings
from batchmill.spool import SPAN_SOURCE
from batchmill.traces import SpanKeeper

log = logging.getLogger("batchmill.spark")

_POLL_S = 10.0
_ANY = 2**62
_LEAST = 4 * MEBIBYTE
"""A batch with less to read is not made smaller to be quicker."""


class SpoolInput:
    """The segments of a folder."""

    def __init__(
        self,
        folder: AnyPath,
        books: Books,
        settings: PipelineSettings,
        remove_from: AnyPath | None = None,
        spark: SparkSession | None = None,
        *,
        max_rows: Callable[[], int] = lambda: _ANY,
        keeper: SpanKeeper | None = None,
    ) -> None:
        """``remove_from``: the quarantine, if segments that were read are to be removed; ``keeper``
        takes those of spans.

        ``spark`` opens what is not on this machine. ``max_rows``: the most rows of a batch, unless
        the settings say it.
        """
        self._folder = folder
        self._books = books
        self._settings = settings
        self._spark = spark
        self._remover = (
            None
            if remove_from is None
            else SegmentRemover(folder, books, remove_from, spark, keeper)
        )
        self._max_rows = max_rows
        self._waiting: Sequence[Segment] = ()
        """The oldest first."""
        self._known: dict[str, Segment] = {}
        self._in_order = True
        self._behind = False
        """Whether more waited than the last batch took."""
        self._since: float | None = None
        """When the newest segment was written that had been found as the last batch was chosen."""
        self._newest: dict[int, float] = {}
        """By batch, of the newest ones: when the newest segment was written that was read by then.
        """

    @property
    def name(self) -> str:
        """The folder."""
        return str(self._folder)

    @property
    def poll_s(self) -> float:
        """Rarely: others can list the folder for what is unread."""
        return _POLL_S

    def check(self) -> None:
        """A folder can always be read."""

    def look(self, *, patient: bool) -> None:
        """List the folder; segments that are gone are forgotten."""
        # First what was read: a segment may be removed, and forgotten, while the folder is listed.
        read = self._books.read()
        present, waiting = self._listed(read)
        gone = read.difference(present)
        if gone:
            self._forget(gone)
        self._waiting = sorted(waiting, key=lambda segment: (segment.mtime, segment.path))
        self._in_order = not patient

    def _listed(self, read: set[str]) -> tuple[set[str], Collection[Segment]]:
        """The names of all segments in the folder, and the segments that are not ``read``.

        Called by several threads.
        """
        # A complete segment never changes: its size is read once.
        known = self._known
        present, new = segments_in(self._folder, read.union(known))
        known = {
            **{path: known[path] for path in present.intersection(known).difference(read)},
            **{segment.path: segment for segment in new},
        }
        self._known = known
        return present, known.values()

    @property
    def waiting(self) -> bool:
        """Whether segments were listed that are not chosen yet."""
        return bool(self._waiting)

    def choose(self, pace: Pace) -> Choice | None:
        """The oldest segments, within the limits; a larger one is a batch of its own.

        Beside a backlog, also those that were written since the last choice.
        """
        if not self._waiting:
            return None
        # What a wrong clock has dated later would make all that comes look old.
        now = time.time()
        newest = min(self._waiting[-1].mtime, now)
        made = self._cut(pace, newest)
        chosen = [*made.old, *made.new]
        self._waiting, self._since = made.left, newest
        read = min(max(chosen[-1].mtime, *self._newest.values(), 0.0), now)
        batch = self._books.next_batch
        self._newest = {batch - 1: self._newest.get(batch - 1, 0.0), batch: read}
        left = made.left[0].mtime if made.left else None
        return Choice(
            sum(segment.cost for segment in chosen),
            tuple(segment.path for segment in chosen),
            backlog=0 if left is None else sum(segment.rows for segment in made.old),
            settled=left if left is not None and left < read else None,
        )

    def _cut(self, pace: Pace, newest: float) -> Cut:
        waiting = self._waiting
        if (count := self._settings.max_batch_files) is not None:
            return Cut(waiting[:count], waiting[count:])
        count = how_many(waiting, self._room(pace, behind=self._behind))
        self._behind = count < len(waiting)
        if self._in_order or not self._behind:
            return Cut(waiting[:count], waiting[count:])
        since = newest - (pace.target_s or 0.0) if self._since is None else self._since
        return cut(waiting, self._room(pace, behind=True), since)

    def _room(self, pace: Pace, *, behind: bool) -> Room:
        most = self._settings.max_batch_bytes
        cost = pace.limit(max(most, _LEAST), _LEAST, behind=behind and not self._in_order)
        rows = self._settings.max_batch_rows or self._max_rows()
        return Room(cost, most, min(rows, pace.ceiling or rows))

    def halve(self, plan: Plan) -> tuple[Plan, int] | None:
        """The first half of the segments, by their rows."""
        if len(plan.segments) < 2:
            return None
        known = {segment.path: segment.rows for segment in segments_in(self._folder)[1]}
        rows = [known.get(path, 0) for path in plan.segments]
        end, kept = 1, rows[0]
        while end < len(rows) - 1 and 2 * (kept + rows[end]) <= sum(rows):
            kept += rows[end]
            end += 1
        # Half of the rows is what fits: a first segment that is small does not make batches small.
        return replace(plan, segments=plan.segments[:end]), max(kept, sum(rows) // 2)

    def segments(self, plan: Plan) -> Sequence[str]:
        """Those of the plan."""
        return [path if is_uri(path) else spark_path(Path(path)) for path in plan.segments]

    def unread(self, last: int | None, now: float) -> Unread:
        """By listing the folder."""
        _, segments = self._listed(self._books.read(last))
        return unread_of(segments, now, self._newest.get(-1 if last is None else last))

    def remove_read(self) -> None:
        """Remove segments that were read, if the pipeline is set to do so."""
        if self._remover is not None:
            self._remover.remove()

    def _forget(self, gone: set[str]) -> None:
        """Segments that are gone need not be remembered, if they are gone for good.

        An empty folder may be one that is not mounted: then all of them may be there again.
        """
        if not is_empty(self._folder):
            inside = (path for path in gone if path.startswith(f"{self._folder}/"))
            self._books.forget([path for path in inside if not self._is_there(path)])

    def _is_there(self, path: str) -> bool:
        return file_at(path, self._spark).exists() if is_uri(path) else os.path.lexists(path)


class SegmentRemover:
    """Removes the segments of one stream's spool that were read. May be used by several threads.

    Those of batches that are done: until then a batch may be run again. They are removed when the
    next batch begins, when the stream ends, and from time to time while it is idle. What a crash
    leaves behind is removed after the restart, since the books still have it.

    A quarantined segment is removed as well, since the quarantine has a copy; where it could not be
    copied, it stays. A segment of spans goes to the ``keeper``, if there is one.
    """

    def __init__(
        self,
        spool: AnyPath,
        books: Books,
        quarantine: AnyPath,
        spark: SparkSession | None = None,
        keeper: SpanKeeper | None = None,
    ) -> None:
        self._keeper = keeper
        self._spool = spool
        self._books = books
        self._quarantine = quarantine
        self._spark = spark
        self._lock = threading.Lock()
        self._warned: set[str] = set()

    def remove(self) -> int:
        """Remove what can be; how many were removed."""
        with self._lock:
            removed = [name for name in sorted(self._books.read()) if self._removed(name)]
            self._books.forget(removed)
            return len(removed)

    def _removed(self, name: str) -> bool:
        """Remove a segment; False if it stays, or is not there."""
        # The books may be of another spool.
        if not name.startswith(f"{self._spool}/") or "/../" in name:
            return False
        path = file_at(name, self._spark)
        if self._is_only_copy(path):
            return False
        try:
            if self._is_kept(path):
                assert self._keeper is not None
                assert isinstance(path, Path)
                self._keeper.take(path)
            else:
                path.unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            self._warn(path, f"cannot be removed ({error}): let this user write its folder")
            return False
        return True

    def _is_kept(self, path: AnyPath) -> bool:
        """Whether it has spans that are to be kept; a quarantined segment has none."""
        if self._keeper is None or path.parent.name != SPAN_SOURCE or not isinstance(path, Path):
            return False
        return not (self._quarantine / path.parent.name / path.name).exists()

    def _is_only_copy(self, path: AnyPath) -> bool:
        """Whether it was quarantined, but the quarantine has only the reason."""
        copy = self._quarantine / path.parent.name / path.name
        if copy.exists() or not copy.with_name(f"{path.name}.reason").exists():
            return False
        if path.exists():
            self._warn(path, "stays: it was quarantined, but the quarantine has no copy of it")
        return True

    def _warn(self, path: AnyPath, what: str) -> None:
        if str(path) not in self._warned:
            self._warned.add(str(path))
            log.warning("the segment %s, which is in the store, %s", path, what)


def present_segments(folder: AnyPath) -> set[str]:
    """The segments in a folder that was read before; an error if it is not mounted."""
    if is_empty(folder):
        raise PipelineError(
            f"{folder} is empty, though segments were read from it: if it is not mounted, mount "
            "it; if it was emptied on purpose, make a folder in it, then start again"
        )
    return segments_in(folder)[0]


def unread_of(segments: Collection[Segment], now: float, committed: float | None) -> Unread:
    """What waits; ``committed``: when the newest committed segment was written, None: not known."""

    def age(some: Iterable[Segment]) -> float:
        return max(0.0, now - min((segment.mtime for segment in some), default=now))

    new = [segment for segment in segments if committed is None or segment.mtime > committed]
    return Unread(
        len(segments),
        sum(segment.size for segment in segments),
        age(segments),
        sum(segment.rows for segment in segments),
        age(new),
    )
