"""Segments: the Parquet files of a spool, looked at before Spark reads them.

A look is the file's footer: whether it can be read at all, how many rows it has, and which columns
of which type. What cannot be read is set aside before it can stop a batch.
"""

from __future__ import annotations

import concurrent.futures
import errno
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq

from batchmill.spark.errors import PipelineError

_T = TypeVar("_T")

_LOOKERS = 8
_WAITS_S = (0.05, 0.2, 0.8)
"""How long a fault that is not the file's is waited for to pass."""
_OF_THE_FILE = {
    errno.ENOENT: "missing",
    errno.ENOTDIR: "missing",
    errno.EACCES: "not permitted",
    errno.EPERM: "not permitted",
    errno.EISDIR: "unreadable",
    errno.ELOOP: "unreadable",
    errno.ENAMETOOLONG: "unreadable",
}
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
    schema: pa.Schema


@dataclass(frozen=True)
class BadSegment:
    """A file that cannot be used, and why."""

    path: str
    source: str
    reason: str
    """One of a few words, for the counter."""
    detail: str
    rows: int = 0


def look_at(paths: Iterable[str]) -> tuple[list[Segment], list[BadSegment]]:
    """The footers of all ``paths``, several at a time; sorted by path."""
    ordered = sorted(paths)
    if len(ordered) < _LOOKERS:
        looks = [_look(each) for each in ordered]
    else:
        with concurrent.futures.ThreadPoolExecutor(_LOOKERS, "batchmill-look") as pool:
            looks = list(pool.map(_look, ordered))
    good = [each for each in looks if isinstance(each, Segment)]
    return good, [each for each in looks if isinstance(each, BadSegment)]


def read_through(segments: Iterable[Segment]) -> list[BadSegment]:
    """Those of ``segments`` that do not survive being read to the end: for after a failed batch."""
    found = (_read(each.path, _to_the_end) for each in segments)
    return [each for each in found if isinstance(each, BadSegment)]


def reason_for(error: Exception) -> str | None:
    """Why a file that gave this error is set aside; None if that is not the file's fault.

    What pyarrow finds wrong with the content is no error of the system's: it has no number.
    """
    if isinstance(error, MemoryError):
        return None
    if isinstance(error, OSError) and error.errno is not None:
        return _OF_THE_FILE.get(error.errno)
    return "corrupt"


def source_of(path: str) -> str:
    """The folder that a segment lies in."""
    return path.rstrip("/").rsplit("/", 2)[-2]


def _look(path: str) -> Segment | BadSegment:
    return _read(
        path, lambda file: Segment(path, source_of(path), file.metadata.num_rows, _schema(file))
    )


def _to_the_end(file: pq.ParquetFile) -> None:
    for _ in file.iter_batches():
        pass


def _read(path: str, use: Callable[[pq.ParquetFile], _T]) -> _T | BadSegment:
    """What ``use`` makes of a file, or what is wrong with the file.

    A fault that is not the file's is waited for to pass, then raised: the data may be good.
    """
    waits = iter(_WAITS_S)
    while True:
        try:
            filesystem, inside = _open(path)
            with pq.ParquetFile(filesystem.open_input_file(inside)) as file:
                return use(file)
        except (pa.ArrowException, OSError, UnicodeError, MemoryError) as error:
            if (reason := reason_for(error)) is not None:
                return _bad(path, reason, error)
            if (wait := next(waits, None)) is None:
                raise _not_now(path, error) from error
        time.sleep(wait)


def _not_now(path: str, error: Exception) -> PipelineError:
    number = errno.ENOMEM if isinstance(error, MemoryError) else getattr(error, "errno", None)
    advice = _ADVICE.get(number or 0, "look after the disk, or what it is reached through")
    return PipelineError(
        f"the segment {path} cannot be read now ({error}): {advice}, then start again; nothing of "
        "the batch was committed, and it will be tried anew"
    )


def _schema(file: pq.ParquetFile) -> pa.Schema:
    """The schema, with the old kind of timestamps (INT96) as what Spark reads them as."""
    schema: pa.Schema = file.schema_arrow
    old = {
        each.name
        for each in (file.schema.column(i) for i in range(len(file.schema)))
        if each.physical_type == "INT96" and each.path == each.name
    }
    for name in old:
        index = schema.get_field_index(name)
        schema = schema.set(index, pa.field(name, pa.timestamp("us", tz="UTC")))
    return schema


def _bad(path: str, reason: str, error: Exception) -> BadSegment:
    detail = f"{type(error).__name__}: {error}".splitlines()[0]
    return BadSegment(path, source_of(path), reason, detail)


def _open(path: str) -> tuple[pyarrow.fs.FileSystem, str]:
    local = local_path(path)
    if local is not None:
        return pyarrow.fs.LocalFileSystem(), local
    filesystem, inside = pyarrow.fs.FileSystem.from_uri(path)
    return filesystem, inside


def spark_path(path: Path, *, glob: bool = False) -> str:
    """How Spark is told of a path on this machine; nothing in a name needs to be encoded for it.

    With ``glob``, for where Spark takes a pattern: special characters then stand for themselves.
    """
    text = str(path)
    if glob:
        text = "".join(f"\\{each}" if each in "\\*?[]{}" else each for each in text)
    return f"file:{text}"


def local_path(path: str) -> str | None:
    """The path on this machine that Spark's name for a file means; None if it lies elsewhere."""
    if path.startswith("file:"):
        return "/" + path.removeprefix("file:").lstrip("/")
    return path if path.startswith("/") else None
