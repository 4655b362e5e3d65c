"""Opens the files of kept spans: what each holds, remembered between queries, and rows of it."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchmill.traces.keeper import KEYS, SERVICES
from batchmill.traces.layout import REPEATING, KeptFile
from batchmill.traces.rewrite import read_segment, trace_number, trace_numbers

_MOST_NUMBERS = 8_000_000
"""How many trace ids are remembered: 8 bytes each."""


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
    """What is known of a file."""

    path: Path
    sorted: bool
    groups: Sequence[RowGroup]
    services: Mapping[str, Sequence[Sequence[str | None]]]
    keys: Mapping[str, frozenset[str] | None]
    """The keys in its maps, by column; None: they are not known."""
    metadata: Any = field(repr=False)
    table: pa.Table | None = field(default=None, repr=False)
    """The rows of a segment, which is read as a whole."""

    @property
    def first_us(self) -> int:
        """When the first of its spans began, in microseconds since 1970."""
        return min((group.first_us for group in self.groups), default=0)

    @property
    def last_us(self) -> int:
        """When the last of its spans began."""
        return max((group.last_us for group in self.groups), default=0)

    def read(self, group: RowGroup, columns: Sequence[str]) -> pa.Table:
        """Some columns of a group."""
        if self.table is not None:
            return self.table.select(list(columns))
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

    def keep_only(self, files: Collection[KeptFile]) -> None:
        """Forget files that are gone."""
        present = {file.path for file in files}
        with self._lock:
            for path in self._files.keys() - present:
                del self._files[path]
                numbers = self._numbers.pop(path, None)
                self._held -= 0 if numbers is None else len(numbers)

    def open(self, file: KeptFile) -> OpenFile | None:
        """What is known of a file; None if it is gone by now, or damaged."""
        known = self._files.get(file.path)
        if known is not None:
            return known
        try:
            opened = _open_sorted(file.path) if file.sorted else _open_segment(file.path)
        except (OSError, pa.ArrowException):
            return None
        with self._lock:
            self._files[file.path] = opened
        return opened

    def may_have(self, file: OpenFile, trace_ids: Sequence[str]) -> bool:
        """Whether a file may have spans of one of these traces."""
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


def _open_sorted(path: Path) -> OpenFile:
    metadata = pq.read_metadata(path)
    names = metadata.schema.to_arrow_schema().names
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
    return OpenFile(path, True, groups, services, keys, metadata)


def _open_segment(path: Path) -> OpenFile:
    table, _ = read_segment(path)
    if not table.num_rows:
        return OpenFile(path, False, (), {}, {}, None, table)
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
    return OpenFile(path, False, (group,), services, {}, None, table)
