"""Opens the files of kept spans: what each holds, remembered between queries, and rows of it."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchmill.traces.layout import REPEATING, SCHEMA, KeptFile
from batchmill.traces.rewrite import KEYS, SERVICES, read_segment, trace_number, trace_numbers

log = logging.getLogger("batchmill.traces")

_MOST_NUMBERS = 8_000_000
"""How many trace ids are remembered: 8 bytes each."""
_MOST_BYTES = 256 * 2**20
"""How much of the rows of segments is remembered."""
_AGAIN_S = 60.0
"""A file that could not be read is tried again after that time."""


class UnreadableError(Exception):
    """A file is damaged, or gone by now: its rows are left out."""


@dataclass(frozen=True)
class RowGroup:
    """Rows of a file that are read together."""

    number: int
    rows: int
    first_trace: str
    last_trace: str
    first_us: int
    last_us: int
    longest_us: int
    """The longest duration."""


@dataclass
class OpenFile:
    """A file of kept spans: its times, rows and bytes."""

    path: Path
    sorted: bool
    groups: Sequence[RowGroup]
    services: Mapping[str, Sequence[Sequence[str | None]]]
    keys: Mapping[str, frozenset[str] | None]
    """The keys in its maps, by column; None: they are not known."""
    metadata: Any = field(repr=False)
    report: Callable[[Path, Exception], None] = field(repr=False)
    """Is told why the file cannot be read."""
    rows: Callable[[], pa.Table] | None = field(default=None, repr=False)
    """The rows of a segment, which is read as a whole."""

    @property
    def first_us(self) -> int:
        """When the first of its spans began, in microseconds since 1970."""
        return min((group.first_us for group in self.groups), default=0)

    @property
    def last_us(self) -> int:
        """When the last of its spans began."""
        return max((group.last_us for group in self.groups), default=0)

    @property
    def longest_us(self) -> int:
        """The longest duration."""
        return max((group.longest_us for group in self.groups), default=0)

    def read(self, group: RowGroup, columns: Sequence[str]) -> pa.Table:
        """Some columns of a group; raises :class:`UnreadableError`."""
        try:
            return self._read(group, columns)
        except MemoryError:
            raise
        except Exception as error:
            self.report(self.path, error)
            raise UnreadableError(str(self.path)) from error

    def _read(self, group: RowGroup, columns: Sequence[str]) -> pa.Table:
        if self.rows is not None:
            return self.rows().select(list(columns))
        file = pq.ParquetFile(
            self.path, metadata=self.metadata, read_dictionary=["trace_id", *REPEATING]
        )
        return file.read_row_group(group.number, list(columns), use_threads=False)


class FileCache:
    """Footers and trace ids of files, which never change. May be used by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[Path, OpenFile] = {}
        self._numbers: OrderedDict[Path, npt.NDArray[np.uint64] | None] = OrderedDict()
        self._held = 0
        self._tables: OrderedDict[Path, pa.Table] = OrderedDict()
        self._table_bytes = 0
        self._unreadable: dict[Path, float] = {}
        """When they are tried again, by a clock that goes on steadily."""

    @property
    def unreadable_files(self) -> int:
        """How many files are there that cannot be read, of those that were wanted."""
        return len(self._unreadable)

    def keep_only(self, files: Collection[KeptFile]) -> None:
        """Forget files that are gone."""
        present = {file.path for file in files}
        with self._lock:
            for path in self._files.keys() - present:
                self._forget(path)
            for path in self._unreadable.keys() - present:
                del self._unreadable[path]

    def open(self, file: KeptFile) -> OpenFile | None:
        """The description of a file; None if it is gone by now, or damaged."""
        known = self._files.get(file.path)
        if known is not None:
            return known
        if time.monotonic() < self._unreadable.get(file.path, 0.0):
            return None
        try:
            opened = (
                _open_sorted(file.path, self._report)
                if file.sorted
                else _open_segment(file.path, self._rows_of(file.path), self._report)
            )
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever somebody else's file makes of it
            self._report(file.path, error)
            return None
        with self._lock:
            self._files[file.path] = opened
            self._unreadable.pop(file.path, None)
        return opened

    def _report(self, path: Path, error: Exception) -> None:
        """A file cannot be read: it is left out for some time, and said so once."""
        with self._lock:
            self._forget(path)
            if isinstance(error, FileNotFoundError):  # merged into another one, or dropped
                return
            is_new = path not in self._unreadable
            self._unreadable[path] = time.monotonic() + _AGAIN_S
        if is_new:
            log.warning("the kept spans of %s cannot be read, and are left out: %s", path, error)

    def _forget(self, path: Path) -> None:
        self._files.pop(path, None)
        numbers = self._numbers.pop(path, None)
        self._held -= 0 if numbers is None else len(numbers)
        table = self._tables.pop(path, None)
        self._table_bytes -= 0 if table is None else table.nbytes

    def _rows_of(self, path: Path) -> Callable[[], pa.Table]:
        """Reads the rows of a segment, unless they are remembered."""

        def rows() -> pa.Table:
            with self._lock:
                if path in self._tables:
                    self._tables.move_to_end(path)
                    return self._tables[path]
            table, _ = read_segment(path)
            with self._lock:
                if path not in self._tables:
                    self._tables[path] = table
                    self._table_bytes += table.nbytes
                while self._table_bytes > _MOST_BYTES and len(self._tables) > 1:
                    _, oldest = self._tables.popitem(last=False)
                    self._table_bytes -= oldest.nbytes
            return table

        return rows

    def may_have(self, file: OpenFile, trace_ids: Sequence[str]) -> bool:
        """Whether a file may have spans of one of these traces; see :meth:`OpenFile.read`."""
        if not file.groups:
            return False
        last = max(group.last_trace for group in file.groups)
        first = min(group.first_trace for group in file.groups)
        wanted = [trace_id for trace_id in trace_ids if first <= trace_id <= last]
        if not wanted or not file.sorted:
            return bool(wanted)
        numbers = self._trace_numbers(file)
        if numbers is None:
            return True
        for trace_id in wanted:
            try:
                number = trace_number(trace_id)
            except ValueError:
                continue
            place = int(np.searchsorted(numbers, np.uint64(number)))
            if place < len(numbers) and int(numbers[place]) == number:
                return True
        return False

    def _trace_numbers(self, file: OpenFile) -> npt.NDArray[np.uint64] | None:
        """The traces of a file as sorted numbers; None if they are not known."""
        with self._lock:
            if file.path in self._numbers:
                self._numbers.move_to_end(file.path)
                return self._numbers[file.path]
        parts = []
        for group in file.groups:
            ids = file.read(group, ["trace_id"])["trace_id"].unify_dictionaries()
            for chunk in ids.chunks:
                texts = chunk.dictionary if pa.types.is_dictionary(chunk.type) else chunk
                part = trace_numbers(texts)
                if part is None:
                    return None
                parts.append(part)
        numbers = np.unique(np.concatenate(parts)) if parts else np.empty(0, np.uint64)
        with self._lock:
            if file.path not in self._numbers:
                self._numbers[file.path] = numbers
                self._held += len(numbers)
            while self._held > _MOST_NUMBERS and len(self._numbers) > 1:
                _, oldest = self._numbers.popitem(last=False)
                self._held -= 0 if oldest is None else len(oldest)
        return numbers


def _open_sorted(path: Path, report: Callable[[Path, Exception], None]) -> OpenFile:
    metadata = pq.read_metadata(path)
    schema = metadata.schema.to_arrow_schema()
    names = schema.names
    if schema.remove_metadata() != SCHEMA:
        raise ValueError("it has other columns than kept spans")
    ids, times, took = (names.index(name) for name in ("trace_id", "time", "duration_us"))
    groups = []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        traces, moments = group.column(ids).statistics, group.column(times).statistics
        groups.append(
            RowGroup(
                number,
                group.num_rows,
                traces.min,
                traces.max,
                int(moments.min_raw),
                int(moments.max_raw),
                int(group.column(took).statistics.max),
            )
        )
    notes = metadata.metadata or {}
    services = json.loads(notes.get(SERVICES, b"{}"))
    listed = json.loads(notes.get(KEYS, b"{}"))
    keys = {name: None if own is None else frozenset(own) for name, own in listed.items()}
    return OpenFile(path, True, groups, services, keys, metadata, report)


def _open_segment(
    path: Path, rows: Callable[[], pa.Table], report: Callable[[Path, Exception], None]
) -> OpenFile:
    table = rows()
    if not table.num_rows:
        return OpenFile(path, False, (), {}, {}, None, report, rows)
    traces = pc.min_max(table["trace_id"])
    moments = pc.min_max(table["time"].cast(pa.int64()))
    group = RowGroup(
        0,
        table.num_rows,
        traces["min"].as_py(),
        traces["max"].as_py(),
        moments["min"].as_py(),
        moments["max"].as_py(),
        pc.max(table["duration_us"]).as_py(),
    )
    services: dict[str, list[list[str | None]]] = {}
    plain = pa.table({name: table[name].cast(pa.string()) for name in ("service", "name", "kind")})
    for row in plain.group_by(["service", "name", "kind"]).aggregate([]).to_pylist():
        services.setdefault(row["service"] or "", []).append([row["name"], row["kind"]])
    return OpenFile(path, False, (group,), services, {}, None, report, rows)
