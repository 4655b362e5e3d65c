"""How far a stream has come, for people and for ``batchmill status``: ``progress.json``.

Nothing depends on it: what counts is in the store and in the checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from batchmill.spark._checkpoint import Checkpoint
from batchmill.spark._removal import write_json
from batchmill.spark._segments import local_path
from batchmill.store import Store, StreamInfo

NAME = "progress.json"
_LEFT_OUT = (
    *("duplicates", "expired", "quarantined", "quarantined segment", "unresolved", "unused"),
)


@dataclass(frozen=True)
class Unread:
    """The segments of a spool that no commit has yet."""

    segments: int = 0
    bytes: int = 0
    oldest_s: float = 0.0
    """How long the oldest of them has been there; 0 if there is none."""


@dataclass(frozen=True)
class Progress:
    """How far a stream has come. Rows, spans and what was left out are those of the whole store."""

    stream: str
    last_batch: int | None
    committed_at: float | None
    """When the store last took something of the stream, in seconds since 1970."""
    rows: int
    """Rows of event types, those made of spans included."""
    spans: int
    duplicates: int
    """Spans that were delivered again, and counted once."""
    late: int
    left_out: dict[str, dict[str, int]] = field(default_factory=dict)
    """By what became of it and the reason: how many."""
    unread_segments: int = 0
    unread_bytes: int = 0
    lag_s: float = 0.0
    """The age of the oldest segment that no commit has yet."""
    written_at: float = 0.0

    def with_lag(self, unread: Unread, now: float) -> Progress:
        """The same, with another look at the spool."""
        return replace(
            self,
            unread_segments=unread.segments,
            unread_bytes=unread.bytes,
            lag_s=round(unread.oldest_s, 3),
            written_at=now,
        )

    def write(self, folder: Path) -> None:
        """Put it into a checkpoint folder, in one piece."""
        write_json(folder / NAME, asdict(self))


def progress_of(
    stream: str,
    streams: Iterable[StreamInfo],
    counters: Mapping[tuple[str, str, str], int],
    unread: Unread,
    now: float,
) -> Progress:
    """What is known, put together."""
    own = next((each for each in streams if each.name == stream), None)
    left_out: dict[str, dict[str, int]] = {}
    totals = {"rows": 0, "spans": 0, "duplicates": 0, "late": 0}
    for (what, source, reason), n in counters.items():
        if what in _LEFT_OUT:
            reasons = left_out.setdefault(what, {})
            reasons[reason] = reasons.get(reason, 0) + n
        key = "spans" if (what, source) == ("rows", "Span") else what
        if key in totals:
            totals[key] += n
    at = None if own is None or own.committed_at is None else own.committed_at / 1000
    last = None if own is None else own.last_batch
    found = Progress(stream, last, at, **totals, left_out=left_out)
    return found.with_lag(unread, now)


def look(stream: str, last: int | None, store: Store, lag: Lag, now: float) -> Progress:
    """Ask the store and the spool."""
    unread = lag.unread(last, now)
    return progress_of(stream, store.streams(), store.counters(), unread, now)


class Lag:
    """Which segments of a spool are not in the store yet; one thread at a time.

    It remembers those that were read and are still there.
    """

    def __init__(self, spool: Path, checkpoint: Checkpoint) -> None:
        self._spool = spool
        self._checkpoint = checkpoint
        self._read: set[str] = set()
        self._until = -1

    def unread(self, last: int | None, now: float) -> Unread:
        """What is left to be read when ``last`` is the last batch in the store."""
        present = {each.path: each for each in _segments(str(self._spool))}
        until = None if last is None else self._checkpoint.log_offset(last)
        if until is not None and until > self._until:
            names = self._checkpoint.logged(self._until, until)
            if names is not None:
                self._read.update(path for each in names if (path := local_path(each)))
                self._until = until
        self._read &= present.keys()
        count, size, oldest = 0, 0, now
        for path, entry in present.items():
            if path in self._read:
                continue
            try:
                found = entry.stat()
            except FileNotFoundError:
                continue
            count += 1
            size += found.st_size
            oldest = min(oldest, found.st_mtime)
        return Unread(count, size, now - oldest)


def _segments(folder: str) -> Iterator[os.DirEntry[str]]:
    """As Spark finds them: at any depth, but for names that begin with a dot or an underscore."""
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    for each in entries:
        if each.name.startswith((".", "_")):
            continue
        if each.is_dir():
            yield from _segments(each.path)
        elif each.name.endswith(".parquet"):
            yield each
