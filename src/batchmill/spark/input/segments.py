"""Segments: the Parquet files of a spool, inspected before Spark reads them.

Inspecting reads the file's footer: whether it can be read at all, its number of rows, its columns
and their types. A file that cannot be read is quarantined before it can fail a batch.
"""

from __future__ import annotations

import concurrent.futures
import errno
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs
import pyarrow.parquet as pq

from batchmill.aggregate import ROW_COUNT, STATEMENT_SOURCE, is_deltas, is_statements
from batchmill.spark.errors import PipelineError

_T = TypeVar("_T")

MOST_SLICES = 8
"""Each slice makes the query longer. With more cores than this, rows are shuffled instead."""
_THREADS = 8
_RETRY_AFTER_S = (0.05, 0.2, 0.8)
"""Pauses before a file is read again after a fault that is not the file's."""
_MOST_UNEVEN_ROWS = 1_000_000
"""With fewer segments than cores, a single core may get this many rows."""
FILE_FAULTS = {
    errno.ENOENT: "missing",
    errno.ENOTDIR: "missing",
    errno.EACCES: "not permitted",
    errno.EPERM: "not permitted",
    errno.EISDIR: "unreadable",
    errno.ELOOP: "unreadable",
    errno.ENAMETOOLONG: "unreadable",
}
"""Errors of the system that are the file's fault, with the reason in counters and quarantine."""
_TOO_MANY = "raise the limit of open files (ulimit -n), or have fewer of them open"
_ADVICE = {
    errno.EMFILE: _TOO_MANY,
    errno.ENFILE: _TOO_MANY,
    errno.ENOMEM: "give the process more memory",
}


@dataclass(frozen=True)
class Segment:
    """A file that can be read."""

    path: str
    """As Spark names it."""
    source: str
    """The name of its folder: the event type."""
    rows: int
    """Its rows; of a segment of deltas, the events that went into them."""
    schema: pa.Schema

    @property
    def has_deltas(self) -> bool:
        """Whether a process has aggregated its events itself; see :mod:`.deltas`."""
        return is_deltas(self.schema)

    @property
    def has_statements(self) -> bool:
        """Whether it holds slow statements of a process, as it has counted them itself."""
        return self.source == STATEMENT_SOURCE and is_statements(self.schema)


@dataclass(frozen=True)
class BadSegment:
    """A file that cannot be used, and why."""

    path: str
    source: str
    reason: str
    """A few fixed words, for the counter."""
    detail: str
    rows: int = 0


def inspect(paths: Iterable[str]) -> tuple[list[Segment], list[BadSegment]]:
    """Read the footers of all ``paths``, several at a time; the usable and the bad, by path."""
    ordered = sorted(paths)
    if len(ordered) < _THREADS:
        inspected = [_inspect(path) for path in ordered]
    else:
        with concurrent.futures.ThreadPoolExecutor(_THREADS, "batchmill-inspect") as pool:
            inspected = list(pool.map(_inspect, ordered))
    good = [segment for segment in inspected if isinstance(segment, Segment)]
    return good, [segment for segment in inspected if isinstance(segment, BadSegment)]


def find_corrupt(segments: Iterable[Segment]) -> list[BadSegment]:
    """Read ``segments`` to their ends, after a batch has failed; those that cannot be."""
    results = (_read(segment.path, _read_all) for segment in segments)
    return [result for result in results if isinstance(result, BadSegment)]


def reason_for(error: Exception) -> str | None:
    """Why a file that gave this error is quarantined; None if it is not the file's fault.

    pyarrow's errors about a file's content carry no error number.
    """
    if isinstance(error, MemoryError):
        return None
    if isinstance(error, OSError) and error.errno is not None:
        return FILE_FAULTS.get(error.errno)
    return "corrupt"


def source_of(path: str) -> str:
    """The name of the folder that a segment lies in."""
    return path.rstrip("/").rsplit("/", 2)[-2]


def cut(segments: Sequence[Segment], cores: int) -> list[list[Segment]]:
    """Cut segments into slices of about equal rows, one for each core; empty if that is not useful.

    Neighbours stay together, since they are of about the same time: the fewer minutes two slices
    share, the fewer deltas are merged later.
    """
    count = min(cores, len(segments))
    rows = sum(segment.rows for segment in segments)
    if not count or count > MOST_SLICES or (count < cores and rows > count * _MOST_UNEVEN_ROWS):
        return []
    slices: list[list[Segment]] = [[] for _ in range(count)]
    ends = accumulate(segment.rows for segment in segments)
    for segment, end in zip(segments, ends, strict=True):
        middle = end - segment.rows / 2
        slices[min(count - 1, int(middle * count // max(1, rows)))].append(segment)
    return [members for members in slices if members]


def spark_path(path: Path, *, glob: bool = False) -> str:
    """The name of a local path for Spark, which needs no encoding.

    With ``glob``, for places where Spark takes a pattern: special characters are escaped.
    """
    text = str(path)
    if glob:
        text = "".join(f"\\{char}" if char in "\\*?[]{}" else char for char in text)
    return f"file:{text}"


def local_path(path: str) -> str | None:
    """The local path of a file that Spark names; None if the file is not on this machine."""
    if path.startswith("file:"):
        return "/" + path.removeprefix("file:").lstrip("/")
    return path if path.startswith("/") else None


def read_table(segment: Segment) -> pa.Table | BadSegment:
    """The whole content of a segment, or what is wrong with it."""
    return _read(segment.path, lambda file: file.read())


def _inspect(path: str) -> Segment | BadSegment:
    def look(file: pq.ParquetFile) -> Segment:
        schema, rows = _schema(file), file.metadata.num_rows
        if is_deltas(schema) and ROW_COUNT in schema.names:
            rows = pc.sum(file.read([ROW_COUNT])[ROW_COUNT]).as_py() or 0
        return Segment(path, source_of(path), rows, schema)

    return _read(path, look)


def _read_all(file: pq.ParquetFile) -> None:
    for _ in file.iter_batches():
        pass


def _read(path: str, use: Callable[[pq.ParquetFile], _T]) -> _T | BadSegment:
    """What ``use`` returns for a file, or what is wrong with the file.

    After a fault that is not the file's it is read again, then the fault is raised: the data may
    be good.
    """
    pauses = iter(_RETRY_AFTER_S)
    while True:
        try:
            filesystem, inner_path = _open(path)
            with pq.ParquetFile(filesystem.open_input_file(inner_path)) as file:
                return use(file)
        except (pa.ArrowException, OSError, UnicodeError, MemoryError) as error:
            if (reason := reason_for(error)) is not None:
                detail = f"{type(error).__name__}: {error}".splitlines()[0]
                return BadSegment(path, source_of(path), reason, detail)
            if (pause := next(pauses, None)) is None:
                raise _unavailable(path, error) from error
        time.sleep(pause)


def _unavailable(path: str, error: Exception) -> PipelineError:
    number = errno.ENOMEM if isinstance(error, MemoryError) else getattr(error, "errno", None)
    advice = _ADVICE.get(number or 0, "look after the disk, or what it is reached through")
    return PipelineError(
        f"the segment {path} cannot be read now ({error}): {advice}, then start again; nothing of "
        "the batch was committed, and it will be tried again"
    )


def _schema(file: pq.ParquetFile) -> pa.Schema:
    """The schema, with the old kind of timestamps (INT96) as what Spark reads them as."""
    schema: pa.Schema = file.schema_arrow
    columns = (file.schema.column(i) for i in range(len(file.schema)))
    old = {
        column.name
        for column in columns
        if column.physical_type == "INT96" and column.path == column.name
    }
    for name in old:
        index = schema.get_field_index(name)
        schema = schema.set(index, pa.field(name, pa.timestamp("us", tz="UTC")))
    return schema


def _open(path: str) -> tuple[pyarrow.fs.FileSystem, str]:
    local = local_path(path)
    if local is not None:
        return pyarrow.fs.LocalFileSystem(), local
    filesystem, inner_path = pyarrow.fs.FileSystem.from_uri(path)
    return filesystem, inner_path
