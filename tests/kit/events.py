"""Events in tests: types of an application, spans, and the segments and disks of a spool."""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow.parquet as pq

from batchmill.sources import user
from batchmill.spool import SpanBatch
from batchmill.spool.rows import SpanTable as SpanTable
from batchmill.spool.rows import encode as encode
from batchmill.spool.rows import joined_spans as joined_spans
from batchmill.spool.segment import Disk
from tests.kit.threads import Gate


@contextlib.contextmanager
def temporary_sources() -> Iterator[None]:
    """Forget the event types that are registered in this block."""
    with mock.patch.dict(user._added), mock.patch.dict(user._by_class):
        yield


NOON = datetime(2026, 11, 15, 12, tzinfo=UTC)


class Mood(enum.Enum):
    """A field of an event that is an enum."""

    GOOD = 1
    BAD = 2


@dataclass(frozen=True)
class Basket:
    """A field of an event that is a struct."""

    items: int
    note: str | None = None


BASKET = Basket(3)

START = 1_763_222_400_000_000


def spans(numbers: Sequence[int], **columns: Sequence[Any]) -> SpanBatch:
    """One span for each number, which is its span id; ``columns`` may say otherwise."""
    resource = {"service.name": "shop", "host.name": "a"}
    count = len(numbers)
    made: dict[str, list[Any]] = {
        "trace_id": [f"{number:032x}" for number in numbers],
        "span_id": [f"{number:016x}" for number in numbers],
        "parent_span_id": [None] * count,
        "name": ["GET /"] * count,
        "kind": ["SERVER"] * count,
        "time": [START + number for number in numbers],
        "end_time": [START + number + 1000 for number in numbers],
        "status": ["OK"] * count,
        "service": ["shop"] * count,
        "resource": [resource] * count,
        "attributes": [{"http.status": str(number)} for number in numbers],
    }
    made.update({name: list(values) for name, values in columns.items()})
    return SpanBatch(made, approx_bytes=100 * count)


def segments(folder: Path) -> list[Path]:
    """The complete segments of a spool."""
    return sorted(folder.glob("*/[!.]*.parquet"))


def unfinished(folder: Path) -> list[Path]:
    """What is there under names that nobody reads."""
    return sorted(folder.glob("*/.*"))


def numbers_in(paths: Sequence[Path]) -> list[int]:
    """The numbers of the spans in segments."""
    return [
        int(span_id, 16)
        for path in paths
        for span_id in pq.read_table(path, partitioning=None).column("span_id").to_pylist()
    ]


class WatchedDisk(Disk):
    """Does what a disk does, and notes it."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.locked = threading.Lock()

    def note(self, what: str) -> None:
        with self.locked:
            self.notes.append(what)

    def create(self, path: str) -> int | None:
        handle = super().create(path)
        self.note("create")
        return handle

    def write(self, handle: int, data: memoryview) -> int:
        written = super().write(handle, data)
        self.note("write")
        return written

    def sync(self, handle: int) -> None:
        super().sync(handle)
        self.note("sync")

    def rename(self, path: str, place: str) -> None:
        super().rename(path, place)
        self.note("rename")

    def sync_folder(self, path: str) -> None:
        super().sync_folder(path)
        self.note(f"sync folder {Path(path).name}")


class BrokenDisk(WatchedDisk):
    """Fails at one step, for as long as it is told to."""

    def __init__(self, step: str, number: int = errno.ENOSPC) -> None:
        super().__init__()
        self.step: str | None = step
        self.number = number

    def note(self, what: str) -> None:
        if what == self.step:
            raise OSError(self.number, os.strerror(self.number))
        super().note(what)


class HeldDisk(WatchedDisk):
    """Waits in the sync of each segment until the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()

    def sync(self, handle: int) -> None:
        self.gate.wait()
        super().sync(handle)
