"""Keeps the spans of committed segments, within limits of age and size.

A committed segment is moved here, not removed: that costs a batch nothing, and what is moved is
kept exactly once, because a segment has one name. A thread of low priority, :meth:`SpanKeeper.
start`, then sorts the spans into the files of :mod:`.layout`, merges small files of an hour to
larger ones, and drops what is too old or too much. No fault of this folder holds up a batch: what
cannot be moved here is removed and counted.

Files are exchanged by a change that is written down first (``.change.json``): after a crash at any
moment the next keeper finishes it, so that no span is lost or kept twice.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import stat
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchmill.files import (
    copy_whole,
    read_json,
    remove_stale_temporaries,
    sync,
    write_json,
)
from batchmill.traces.layout import (
    CHANGE,
    HOUR_US,
    INCOMING,
    STATS,
    KeepSettings,
    KeptFile,
    hour_folder,
    list_files,
)
from batchmill.traces.rewrite import (
    by_hour,
    read_kept,
    read_segments,
    sorted_once,
    within,
    write_kept,
)
from batchmill.wording import count_of

log = logging.getLogger("batchmill.traces")

_MOST_ROWS = 500_000
"""How many spans are sorted at a time: that takes some hundred MB of memory."""
_SEGMENTS, _SEGMENT_ROWS_BYTES = 24, 8 * 2**20
"""So many segments, or bytes of them, are sorted at once."""
_GROUPS_A_PASS = 4
"""So many groups of them are sorted before files are merged and dropped."""
_AFTER_S = 15.0
"""So long a segment waits for others, at most."""
_POLL_S = 1.0
_TIER, _FILES_OF_TIER = 8, 8
"""Files of about one size (within a factor of 8) are merged when there are 8 of an hour."""
_SMALLEST = 8_000
_HOURS_A_PASS = 24
"""So many hours, and as many as were added, are dropped for their age at once."""
_IN_DOUBT_S = 7200.0
"""A clock that is further ahead of the trusted time is in doubt."""
_MOST_AHEAD_S = 86_400.0
"""Spans that began later than so long after now are not kept: each of their hours has a folder."""
TOO_OLD, TOO_MUCH = "older than the limit", "beyond the size limit"
AHEAD = "more than a day ahead of the clock"
INVALID, UNREADABLE = "not a valid span", "the file cannot be read"
NOT_WRITTEN = "the folder cannot be written"
_OF_THE_SYSTEM = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
}


@dataclass
class KeepStats:
    """What is kept, and what was dropped since the folder was made."""

    spans: int = 0
    """Spans in sorted files."""
    bytes: int = 0
    files: int = 0
    oldest_us: int | None = None
    """The start of the oldest hour, in microseconds since 1970."""
    duplicates: int = 0
    """Spans that were delivered again, and are kept once."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Spans that are not kept any more, by reason; files that cannot be read count as one."""
    held_back: int = 0
    """Hours that are too old by the clock of this machine, and stay as long as it is in doubt."""

    @classmethod
    def read(cls, folder: Path) -> KeepStats:
        """Those of a folder; empty ones if it has none."""
        known = read_json(folder / STATS) or {}
        fields = {name: value for name, value in known.items() if name in cls.__annotations__}
        return cls(**fields)


class SpanKeeper:
    """Keeps spans in a folder. One process at a time may have a keeper of a folder."""

    def __init__(
        self,
        folder: Path,
        settings: KeepSettings | None = None,
        clock: Callable[[], float] = time.time,
        trusted_s: Callable[[], float | None] | None = None,
    ) -> None:
        """``trusted_s`` is a time that spans may be dropped by, if it is before that of the clock.

        While it is None, no span is dropped for its age. Without it, the clock decides alone.
        """
        self.folder = folder
        self.settings = settings or KeepSettings()
        self._clock = clock
        self._trusted_s = trusted_s or clock
        self._held_back = 0
        self._hours_added: set[int] = set()
        """Of the current pass."""
        self._incoming = folder / INCOMING
        self._incoming.mkdir(0o700, parents=True, exist_ok=True)
        self._wake = threading.Event()
        self._stopping = False
        self._fault = ""
        self._take_fault: int | None = None
        self._damaged: set[Path] = set()
        """Files that cannot be merged; they stay until they are dropped."""
        self._turn = threading.Lock()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        """For what follows, which a batch and the thread change."""
        self._in_work: frozenset[Path] = frozenset()
        """Segments that are being sorted."""
        self._waiting_bytes = 0
        self._lost = Counter[str]()
        """Dropped spans that are not written down yet."""
        self._stats = KeepStats.read(folder)
        try:
            self._finish_change()
        except OSError as error:
            log.warning("a change of kept spans is not finished, trying again later: %s", error)
        self._remove_leftovers()

    @property
    def stats(self) -> KeepStats:
        """What is kept, and what was dropped."""
        with self._lock:
            dropped = Counter(self._stats.dropped) + self._lost
            return replace(self._stats, dropped=dict(dropped), held_back=self._held_back)

    def take(self, segment: Path) -> None:
        """Move a committed segment here; raises FileNotFoundError if it is gone.

        If it cannot be moved, it is removed: spans that nobody can look at do not fill the spool.
        """
        size = segment.stat().st_size
        try:
            self._move(segment)
        except OSError as error:
            self._lose(segment, NOT_WRITTEN)
            if error.errno != self._take_fault:
                log.warning("spans cannot be kept now, and are dropped: %s", error)
            self._take_fault = error.errno
            return
        self._take_fault = None
        with self._lock:
            self._waiting_bytes += size
            too_much = self._waiting_bytes > self._most_waiting
        if too_much and self._thread is None:
            self._try_to_tend()
        if too_much:
            self._drop_waiting()
        self._wake.set()

    def start(self) -> None:
        """Tend the files in a thread of low priority, until :meth:`stop`."""
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="batchmill-kept-spans", daemon=True)
        self._thread.start()

    def stop(self) -> bool:
        """End the thread; False if there is none. What waits is sorted after the next start."""
        self._stopping = True
        self._wake.set()
        if self._thread is None:
            return False
        self._thread.join()
        self._thread = None
        return True

    def tend(self, *, everything: bool = False) -> None:
        """Sort segments that have waited long enough, or all of them; merge; drop."""
        with self._turn:
            self._finish_change()
            self._hours_added.clear()
            try:
                for number, segments in enumerate(self._ripe(everything=everything)):
                    if number >= _GROUPS_A_PASS and not everything:
                        self._wake.set()
                        break
                    self._sort(segments)
                for files in self._mergeable():
                    self._merge(files)
            finally:
                self._drop()
            if self._lost:
                self._change([], [], Counter())

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # where threads have no priority
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        while not self._stopping:
            self._try_to_tend()
            self._wake.wait(_POLL_S)
            self._wake.clear()

    def _try_to_tend(self) -> None:
        try:
            # Without a thread nobody comes back soon for the segments that are left.
            self.tend(everything=self._thread is None)
            self._fault = ""
        except Exception as error:  # noqa: BLE001 - metrics do not depend on it
            if str(error) != self._fault:
                log.warning("kept spans cannot be sorted now, trying again later: %s", error)
            self._fault = str(error)

    def _move(self, segment: Path) -> None:
        target = self._incoming / segment.name
        try:
            segment.rename(target)
        except FileNotFoundError:  # somebody has removed this folder
            self._incoming.mkdir(0o700, parents=True, exist_ok=True)
            segment.rename(target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            copy_whole(segment, target)
            try:
                segment.unlink()
            except OSError:  # it comes again, and is not to be kept twice
                target.unlink(missing_ok=True)
                raise

    def _lose(self, segment: Path, reason: str) -> None:
        """Remove a segment, and count its spans as dropped."""
        rows = _rows_in(segment)
        segment.unlink()
        with self._lock:
            self._lost[reason] += rows

    @property
    def _most_waiting(self) -> int:
        """How many bytes of segments may wait: readers open these as a whole."""
        most = self.settings.max_bytes
        return min(most, max(most // 4, 2 * _SEGMENT_ROWS_BYTES))

    def _waiting(self) -> list[tuple[float, int, Path]]:
        """The segments that wait, the oldest first: when they were written, and their size."""
        waiting = []
        for path in self._incoming.glob("*.parquet"):
            with contextlib.suppress(FileNotFoundError):
                known = path.stat()
                if stat.S_ISREG(known.st_mode):
                    waiting.append((known.st_mtime, known.st_size, path))
        waiting.sort()
        with self._lock:
            self._waiting_bytes = sum(size for _, size, _ in waiting)
        return waiting

    def _drop_waiting(self) -> None:
        """Drop the oldest segments of too many: the thread is slower than the batches."""
        waiting = self._waiting()
        total, lost = sum(size for _, size, _ in waiting), Counter[str]()
        with self._lock:
            for _, size, path in waiting:
                if total <= self._most_waiting:
                    break
                if path not in self._in_work:
                    lost[TOO_MUCH] += _rows_in(path)
                    path.unlink(missing_ok=True)
                    total -= size
            self._lost += lost
            self._waiting_bytes = total
        if lost:
            count = count_of(lost.total(), "kept span")
            log.warning("%s dropped: they come faster than they can be sorted", count)

    def _ripe(self, *, everything: bool) -> Iterator[list[Path]]:
        """Segments to sort together."""
        waiting = self._waiting()
        size = sum(entry[1] for entry in waiting)
        is_old = bool(waiting) and waiting[0][0] < self._clock() - _AFTER_S
        if not (everything or is_old or len(waiting) >= _SEGMENTS or size >= _SEGMENT_ROWS_BYTES):
            return
        group: list[Path] = []
        size = 0
        for _, own, path in waiting:
            if group and (size + own > 2 * _SEGMENT_ROWS_BYTES or len(group) >= 256):
                yield group
                group, size = [], 0
            group.append(path)
            size += own
        if group:
            yield group

    def _sort(self, segments: Sequence[Path]) -> None:
        with self._lock:
            segments = [path for path in segments if path.exists()]
            self._in_work = frozenset(segments)
        try:
            self._sort_in(segments)
        finally:
            with self._lock:
                self._in_work = frozenset()

    def _sort_in(self, segments: Sequence[Path]) -> None:
        """Sort segments into the hours of their spans, without those that cannot be read."""
        try:
            tables, invalid = read_segments(segments)
            dropped = Counter({INVALID: invalid})
            self._replace(tables, segments, dropped, self._latest_us())
        except Exception as error:
            if _is_of_the_system(error) or self._is_changing():
                raise
            if len(segments) > 1:
                for path in segments:
                    self._sort_in([path])
                return
            log.warning("the spans of %s are not kept: %s", segments[0].name, error)
            self._change([], segments, Counter({UNREADABLE: 1}))

    def _merge(self, files: Sequence[KeptFile]) -> None:
        tables = {}
        for file in files:
            try:
                tables[file.path] = read_kept(file.path)
            except Exception as error:
                if _is_of_the_system(error):
                    raise
                self._damaged.add(file.path)
                log.warning("the kept spans of %s cannot be read: %s", file.path, error)
        if len(tables) > 1:
            self._replace(list(tables.values()), list(tables))

    def _mergeable(self) -> Iterator[list[KeptFile]]:
        """Files of one hour and about one size."""
        tiers: dict[tuple[int, int], list[KeptFile]] = defaultdict(list)
        for file in list_files(self.folder):
            if file.path in self._damaged:
                continue
            if file.hour_us is not None and file.rows * 2 <= _MOST_ROWS:
                tier, most = 0, _SMALLEST
                while file.rows > most:
                    tier, most = tier + 1, most * _TIER
                tiers[file.hour_us, tier].append(file)
        for files in tiers.values():
            if len(files) >= _FILES_OF_TIER:
                chosen, rows = [], 0
                for file in sorted(files, key=lambda file: file.rows):
                    if rows + file.rows <= _MOST_ROWS:
                        chosen.append(file)
                        rows += file.rows
                if len(chosen) > 1:
                    yield chosen

    def _replace(
        self,
        tables: Sequence[pa.Table],
        old: Sequence[Path],
        dropped: Counter[str] | None = None,
        latest_us: float = math.inf,
    ) -> None:
        """Write the spans of ``tables`` to new files, in the place of ``old``."""
        dropped = dropped if dropped is not None else Counter()
        duplicates, new = 0, list[tuple[Path, Path]]()
        try:
            if tables:
                whole, duplicates = sorted_once(tables)
                whole, old_spans, early_spans = within(whole, self._oldest_us(), latest_us)
                dropped += Counter({TOO_OLD: old_spans, AHEAD: early_spans})
                for hour_us, spans in by_hour(whole):
                    self._hours_added.add(hour_us)
                    for first in range(0, spans.num_rows, _MOST_ROWS):
                        new.append(self._write(hour_us, spans.slice(first, _MOST_ROWS)))
            self._change(new, old, dropped, duplicates)
        except BaseException:
            if not self._is_changing():
                for hidden, _ in new:
                    hidden.unlink(missing_ok=True)
                self._remove_empty_hours()
            raise

    def _write(self, hour_us: int, spans: pa.Table) -> tuple[Path, Path]:
        """Write a hidden file; its path, and the one that it is to get."""
        place = hour_folder(self.folder, hour_us)
        place.mkdir(0o755, exist_ok=True)
        final = place / f"{spans.num_rows}-{uuid.uuid4().hex[:12]}.parquet"
        hidden = place / f".{final.name}.part"
        try:
            write_kept(spans, hidden)
            sync(hidden)
        except BaseException:
            hidden.unlink(missing_ok=True)
            raise
        return hidden, final

    def _change(
        self,
        new: Sequence[tuple[Path, Path]],
        old: Sequence[Path],
        dropped: Counter[str],
        duplicates: int = 0,
    ) -> None:
        """Exchange files: whatever happens, all of it or nothing."""
        with self._lock:
            lost = Counter(self._lost)
        stats = replace(
            self._stats,
            dropped=dict(Counter(self._stats.dropped) + dropped + lost),
            duplicates=self._stats.duplicates + duplicates,
        )
        change = {
            "new": [[self._name(hidden), self._name(final)] for hidden, final in new],
            "old": [self._name(path) for path in old],
            "stats": asdict(stats),
        }
        try:
            write_json(self.folder / CHANGE, change, durable=True)
        except OSError:
            if not self._is_changing():
                raise
        with self._lock:
            self._lost -= lost
            self._stats = stats
        self._finish_change()

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def _is_changing(self) -> bool:
        return (self.folder / CHANGE).exists()

    def _finish_change(self) -> None:
        """Finish a change that was written down, be it by a keeper before this one."""
        change = read_json(self.folder / CHANGE)
        if change is not None:
            self._finish(change)
            stats = KeepStats.read(self.folder)
            with self._lock:
                self._stats = stats

    def _remove_leftovers(self) -> None:
        """Remove files that a killed keeper has not finished, and no change names."""
        remove_stale_temporaries(self.folder)
        if self._is_changing():
            return
        for path in (*self.folder.glob("hour=*/.*.part"), *self._incoming.glob(".*.part")):
            path.unlink(missing_ok=True)
        self._remove_empty_hours()

    def _remove_empty_hours(self) -> None:
        for place in self.folder.glob("hour=*"):
            with contextlib.suppress(OSError):  # it is not empty
                place.rmdir()

    def _finish(self, change: dict[str, Any]) -> None:
        for hidden, final in change["new"]:
            with contextlib.suppress(FileNotFoundError):  # done before the crash
                (self.folder / hidden).rename(self.folder / final)
        for place in {(self.folder / final).parent for _, final in change["new"]}:
            sync(place)
        for name in change["old"]:
            path = self.folder / name
            path.unlink(missing_ok=True)
            if path.parent.name.startswith("hour="):
                with contextlib.suppress(OSError):  # it is not empty
                    path.parent.rmdir()
        files = [file for file in list_files(self.folder) if file.sorted]
        hours = [file.hour_us for file in files if file.hour_us is not None]
        size = 0
        for file in files:
            with contextlib.suppress(FileNotFoundError):
                size += file.path.stat().st_size
        stats = {
            **change["stats"],
            "spans": sum(file.rows for file in files),
            "bytes": size,
            "files": len(files),
            "oldest_us": min(hours, default=None),
        }
        write_json(self.folder / STATS, stats)
        (self.folder / CHANGE).unlink()

    def _oldest_us(self) -> float:
        """Hours that ended before are too old, by the trusted time and by the clock."""
        trusted_s = self._trusted_s()
        now_s = -math.inf if trusted_s is None else min(trusted_s, self._clock())
        return self._limit_us(now_s)

    def _latest_us(self) -> float:
        """Spans that began later are not kept."""
        trusted_s = self._trusted_s()
        if trusted_s is None:
            return math.inf
        return (max(trusted_s, self._clock()) + _MOST_AHEAD_S) * 1_000_000

    def _limit_us(self, now_s: float) -> float:
        return (now_s - self.settings.max_age_h * 3600) * 1_000_000

    def _drop(self) -> None:
        """Drop files beyond the limits, the oldest first."""
        if self._is_changing():
            return
        sizes: dict[KeptFile, int] = {}
        for file in list_files(self.folder):
            with contextlib.suppress(FileNotFoundError):
                sizes[file] = file.path.stat().st_size
        total = sum(sizes.values())
        old, dropped = [], Counter[str]()
        kept = [file for file in sizes if file.hour_us is not None]
        ends_us = sorted({file.hour_us + HOUR_US for file in kept if file.hour_us is not None})
        oldest_us = self._oldest_us()
        self._note_held_back(ends_us, oldest_us)
        too_old = [end_us for end_us in ends_us if end_us <= oldest_us]
        too_old = too_old[: _HOURS_A_PASS + len(self._hours_added)]
        for file in sorted(kept, key=lambda file: (file.hour_us, file.path.stat().st_mtime)):
            assert file.hour_us is not None
            if file.hour_us + HOUR_US in too_old:
                reason = TOO_OLD
            elif total > self.settings.max_bytes:
                reason = TOO_MUCH
            else:
                break
            dropped[reason] += file.rows
            total -= sizes[file]
            old.append(file.path)
        if old:
            count = sum(dropped.values())
            log.info("%s dropped: %s", count_of(count, "kept span"), ", ".join(dropped))
            try:
                self._change([], old, dropped)
            except OSError:
                if self._is_changing():
                    raise
                # There is no room to write the change down: only removing files can make some.
                for path in old:
                    path.unlink(missing_ok=True)
                with self._lock:
                    self._lost += dropped
                raise

    def _note_held_back(self, ends_us: Sequence[int], oldest_us: float) -> None:
        """Count the hours that only the clock makes too old, and report the first ones."""
        limit_us = self._limit_us(self._clock())
        held_back = 0
        if limit_us - oldest_us > _IN_DOUBT_S * 1_000_000:
            held_back = sum(oldest_us < end_us <= limit_us for end_us in ends_us)
        if held_back and not self._held_back:
            log.warning(
                "kept spans of %s are too old by the clock of this machine, and stay: the store "
                "does not trust that clock yet. If it is wrong, correct it",
                count_of(held_back, "hour"),
            )
        self._held_back = held_back


def _rows_in(segment: Path) -> int:
    """How many spans a segment has; 1 if nobody can tell."""
    try:
        return int(pq.read_metadata(segment).num_rows)
    except (OSError, pa.ArrowException):
        return 1


def _is_of_the_system(error: Exception) -> bool:
    """Whether an error has nothing to do with the file that was read."""
    return isinstance(error, OSError) and error.errno in _OF_THE_SYSTEM
