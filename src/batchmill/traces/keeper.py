"""Keeps the spans of committed segments, within limits of age and size.

A committed segment is moved here, not removed: that costs a batch nothing, and what is moved is
kept exactly once, because a segment has one name. A thread of low priority, :meth:`SpanKeeper.
start`, then sorts the spans into the files of :mod:`.layout`, merges small files of an hour to
larger ones, and drops what is too old or too much.

Files are exchanged by a change that is written down first (``.change.json``): after a crash at any
moment the next keeper finishes it, so that no span is lost or kept twice.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from batchmill.files import read_json, sync, write_json
from batchmill.traces.layout import (
    CHANGE,
    HOUR_US,
    INCOMING,
    MAPS,
    STATS,
    KeepSettings,
    KeptFile,
    hour_folder,
    list_files,
)
from batchmill.traces.rewrite import by_hour, read_kept, read_segment, sorted_once, write_kept
from batchmill.wording import count_of

log = logging.getLogger("batchmill.traces")

SERVICES = b"batchmill.services"
"""Metadata of a file: JSON with the names and kinds of spans by service."""
KEYS = b"batchmill.keys"
"""Metadata of a file: JSON with the keys in its maps, by column; null if there are very many."""
_MOST_NAMES = 1000
"""How many names of spans a file lists for a service."""
_MOST_KEYS = 1000
_MOST_ROWS = 500_000
"""How many spans are sorted at a time: that takes some hundred MB of memory."""
_SEGMENTS, _SEGMENT_ROWS_BYTES = 24, 8 * 2**20
"""So many segments, or bytes of them, are sorted at once."""
_AFTER_S = 15.0
"""So long a segment waits for others, at most."""
_POLL_S = 1.0
_TIER, _FILES_OF_TIER = 8, 8
"""Files of about one size (within a factor of 8) are merged when there are 8 of an hour."""
_SMALLEST = 8_000
TOO_OLD, TOO_MUCH = "older than the limit", "beyond the size limit"
INVALID, UNREADABLE = "not a valid span", "the file cannot be read"


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
    ) -> None:
        self.folder = folder
        self.settings = settings or KeepSettings()
        self._clock = clock
        self._incoming = folder / INCOMING
        self._incoming.mkdir(0o700, parents=True, exist_ok=True)
        self._wake = threading.Event()
        self._stopping = False
        self._fault = ""
        self._turn = threading.Lock()
        self._thread: threading.Thread | None = None
        self._recover()
        self._stats = KeepStats.read(folder)

    @property
    def stats(self) -> KeepStats:
        """What is kept, and what was dropped."""
        return self._stats

    def take(self, segment: Path) -> None:
        """Move a committed segment here; raises FileNotFoundError if it is gone."""
        target = self._incoming / segment.name
        try:
            segment.rename(target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            hidden = self._incoming / f".{segment.name}.part"
            shutil.copyfile(segment, hidden)
            hidden.replace(target)
            segment.unlink()
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
            for segments in self._ripe(everything=everything):
                self._sort(segments)
            for files in self._mergeable():
                self._merge(files)
            self._drop()

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # where threads have no priority
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        while not self._stopping:
            try:
                self.tend()
                self._fault = ""
            except Exception as error:  # noqa: BLE001 - metrics do not depend on it
                if str(error) != self._fault:
                    log.warning("kept spans cannot be sorted now, trying again later: %s", error)
                self._fault = str(error)
            self._wake.wait(_POLL_S)
            self._wake.clear()

    def _ripe(self, *, everything: bool) -> Iterator[list[Path]]:
        """Segments to sort together."""
        waiting = []
        for path in self._incoming.glob("*.parquet"):
            with contextlib.suppress(FileNotFoundError):
                waiting.append((path.stat().st_mtime, path.stat().st_size, path))
        waiting.sort()
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
        tables, dropped = [], Counter[str]()
        for path in segments:
            try:
                table, invalid = read_segment(path)
            except (pa.ArrowException, OSError) as error:
                if isinstance(error, OSError) and error.errno is not None:
                    raise  # a fault of the system, not of the file
                log.warning("the spans of %s are not kept: %s", path.name, error)
                dropped[UNREADABLE] += 1
                continue
            dropped[INVALID] += invalid
            tables.append(table)
        self._replace(tables, segments, dropped)

    def _merge(self, files: Sequence[KeptFile]) -> None:
        self._replace([read_kept(file.path) for file in files], [file.path for file in files])

    def _mergeable(self) -> Iterator[list[KeptFile]]:
        """Files of one hour and about one size."""
        tiers: dict[tuple[int, int], list[KeptFile]] = defaultdict(list)
        for file in list_files(self.folder):
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
    ) -> None:
        """Write the spans of ``tables`` to new files, in the place of ``old``."""
        dropped = dropped if dropped is not None else Counter()
        duplicates, new = 0, []
        if tables:
            whole, duplicates = sorted_once(tables)
            oldest = self._oldest_us()
            for hour_us, spans in by_hour(whole):
                if hour_us + HOUR_US <= oldest:
                    dropped[TOO_OLD] += spans.num_rows
                    continue
                for first in range(0, spans.num_rows, _MOST_ROWS):
                    new.append(self._write(hour_us, spans.slice(first, _MOST_ROWS)))
        self._change(new, old, dropped, duplicates)

    def _write(self, hour_us: int, spans: pa.Table) -> tuple[Path, Path]:
        """Write a hidden file; its path, and the one that it is to get."""
        place = hour_folder(self.folder, hour_us)
        place.mkdir(0o755, exist_ok=True)
        final = place / f"{spans.num_rows}-{uuid.uuid4().hex[:12]}.parquet"
        hidden = place / f".{final.name}.part"
        try:
            keys = {name: _keys(spans[name]) for name in MAPS}
            metadata = {SERVICES: json.dumps(_services(spans)), KEYS: json.dumps(keys)}
            write_kept(spans, hidden, {name.decode(): text for name, text in metadata.items()})
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
        stats = self._stats
        for reason, count in dropped.items():
            if count:
                stats.dropped[reason] = stats.dropped.get(reason, 0) + count
        stats.duplicates += duplicates
        change = {
            "new": [[self._name(hidden), self._name(final)] for hidden, final in new],
            "old": [self._name(path) for path in old],
            "stats": asdict(stats),
        }
        write_json(self.folder / CHANGE, change, durable=True)
        self._finish(change)
        self._stats = KeepStats.read(self.folder)

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def _recover(self) -> None:
        """Finish a change that a crash has interrupted, and remove what belongs to none."""
        change = read_json(self.folder / CHANGE)
        if change is not None:
            self._finish(change)
        for path in (*self.folder.glob("hour=*/.*.part"), *self._incoming.glob(".*.part")):
            path.unlink(missing_ok=True)

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
        return (self._clock() - self.settings.max_age_h * 3600) * 1_000_000

    def _drop(self) -> None:
        """Drop files beyond the limits, the oldest first."""
        oldest_us = self._oldest_us()
        sizes: dict[KeptFile, int] = {}
        for file in list_files(self.folder):
            with contextlib.suppress(FileNotFoundError):
                sizes[file] = file.path.stat().st_size
        total = sum(sizes.values())
        old, dropped = [], Counter[str]()
        kept = [file for file in sizes if file.hour_us is not None]
        for file in sorted(kept, key=lambda file: (file.hour_us, file.path.stat().st_mtime)):
            assert file.hour_us is not None
            if file.hour_us + HOUR_US <= oldest_us:
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
            self._change([], old, dropped)


def _services(spans: pa.Table) -> dict[str, list[list[str | None]]]:
    """The names and kinds of spans by service."""
    pairs = spans.select(["service", "name", "kind"])
    pairs = pa.table({name: pairs[name].cast(pa.string()) for name in pairs.column_names})
    names: dict[str, list[list[str | None]]] = defaultdict(list)
    for row in pairs.group_by(["service", "name", "kind"]).aggregate([]).to_pylist():
        own = names[row["service"] or ""]
        if len(own) < _MOST_NAMES:
            own.append([row["name"], row["kind"]])
    return names


def _keys(maps: pa.ChunkedArray) -> list[str] | None:
    """The keys in a column of maps; None: too many to name."""
    keys: set[str] = set()
    for chunk in maps.chunks:
        keys.update(pc.unique(chunk.keys).to_pylist())
    return sorted(keys) if len(keys) <= _MOST_KEYS else None
