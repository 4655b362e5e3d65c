"""What the tests of the pipeline share."""

from __future__ import annotations

import ctypes
import os
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from batchmill.spark.input.rows import REASON, CheckedRows
from tests.kit.events import NOON

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LATEST = int(NOON.timestamp()) * 1_000_000
"""The latest valid start in tests of rows and spans, in microseconds since 1970."""
TEXT = pa.dictionary(pa.int32(), pa.string())
"""How names and labels are read."""
_IN_CLOSE, _IN_OPEN = 0x10, 0x20
_EVENT = struct.Struct("iIII")
"""Watch, mask, cookie and the length of the name that follows."""


def forget_commit(checkpoint: Path) -> None:
    """Take the mark off the newest batch that is done: it will be run again."""
    books = checkpoint / "books.jsonl"
    *lines, mark = books.read_text().splitlines(keepends=True)
    assert mark.startswith('{"done"'), mark
    books.write_text("".join(lines))


class JobLog:
    """The jobs that Spark has run since this was made."""

    def __init__(self, spark: SparkSession) -> None:
        self._context: Any = spark.sparkContext._jsc.sc()
        self._before = self._ids()

    def count(self) -> int:
        """How many there were."""
        return len(self._ids() - self._before)

    def _ids(self) -> set[int]:
        # Spark notes in a thread of its own.
        self._context.listenerBus().waitUntilEmpty()
        return {job.jobId() for job in _items(self._context.statusStore().jobsList(None))}


class OpenLog:
    """Counts how often any process opens the files of a folder (inotify, so on Linux only)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> Self:
        libc = ctypes.CDLL(None, use_errno=True)
        self._handle = libc.inotify_init1(os.O_NONBLOCK)
        if self._handle < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")
        # With the closes in between: two events in a row that are equal become one.
        mask = _IN_OPEN | _IN_CLOSE
        if libc.inotify_add_watch(self._handle, bytes(self._folder), mask) < 0:
            raise OSError(ctypes.get_errno(), "inotify_add_watch")
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.close(self._handle)

    def opened(self) -> Counter[str]:
        """How often each file was opened since the last call, by its name."""
        names: Counter[str] = Counter()
        while True:
            try:
                data = os.read(self._handle, 2**16)
            except BlockingIOError:
                return names
            place = 0
            while place < len(data):
                _, mask, _, length = _EVENT.unpack_from(data, place)
                place += _EVENT.size + length
                name = data[place - length : place].rstrip(b"\0")  # none: the folder itself
                if name and mask & _IN_OPEN:
                    names[name.decode()] += 1


def replaced(table: pa.Table, name: str, column: Any) -> pa.Table:
    """A table with a column replaced, added, or removed if it is None."""
    if name in table.column_names:
        place = table.column_names.index(name)
        return (
            table.remove_column(place) if column is None else table.set_column(place, name, column)
        )
    return table.append_column(name, column)


def written(table: pa.Table, path: Path, **options: Any) -> Path:
    """A table as a file."""
    pq.write_table(table, path, **options)
    return path


def listed(table: pa.Table | None) -> list[dict[str, Any]]:
    """The rows of a table that may not be there."""
    return [] if table is None else table.to_pylist()


def reasons(checked: CheckedRows) -> Counter[str]:
    """How many rows are invalid for which reason."""
    return Counter() if checked.invalid is None else Counter(checked.invalid[REASON].to_pylist())


def _items(sequence: Any) -> Iterator[Any]:
    """The items of a sequence of Scala's."""
    return (sequence.apply(place) for place in range(sequence.size()))
