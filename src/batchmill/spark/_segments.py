"""Segments: the Parquet files of a spool, looked at before Spark reads them.

A look is the file's footer: whether it can be read at all, how many rows it has, and which columns
of which type. What cannot be read is set aside before it can stop a batch.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq

_LOOKERS = 8


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
    bad = []
    for segment in segments:
        try:
            filesystem, inside = _open(segment.path)
            with pq.ParquetFile(filesystem.open_input_file(inside)) as file:
                for _ in file.iter_batches():
                    pass
        except FileNotFoundError as error:
            bad.append(_bad(segment.path, "missing", error))
        except (pa.ArrowException, OSError) as error:
            bad.append(_bad(segment.path, "corrupt", error))
    return bad


def source_of(path: str) -> str:
    """The folder that a segment lies in."""
    return path.rstrip("/").rsplit("/", 2)[-2]


def _look(path: str) -> Segment | BadSegment:
    try:
        filesystem, inside = _open(path)
        with pq.ParquetFile(filesystem.open_input_file(inside)) as file:
            return Segment(path, source_of(path), file.metadata.num_rows, _schema(file))
    except FileNotFoundError as error:
        return _bad(path, "missing", error)
    except (pa.ArrowException, OSError) as error:
        return _bad(path, "corrupt", error)


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
