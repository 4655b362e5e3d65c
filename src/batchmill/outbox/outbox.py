"""The outbox's folder and files: durable, removed when the store lists them no more.

<outbox>/outbox.json                 its id, by which the store's rows refer to it
<outbox>/<stream>/<batch>-<x>.arrow  the changes of one batch by minute

A file is several Arrow IPC streams one behind the other. The first has the entities; then one for
each source, whose schema says which columns belong to which metric: the layout that it was made
under. Hours and days are not in it: they are the sums of minutes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from batchmill import files
from batchmill.outbox.settings import NoOutboxError, OutboxFileError, OutboxSettings
from batchmill.sources import Grain
from batchmill.store import Batch, ChangeFile, Deltas, EntityRow, Layout

ROWS = 2_000
"""How many rows are written, and read, at a time."""
_HEAD = b"batchmill"
_VERSION = 1
_OPTIONS = pa.ipc.IpcWriteOptions(compression="lz4")


@dataclass(frozen=True, slots=True)
class LayoutEntry:
    """A metric in a file: its version, and its columns, one a cell."""

    name: str
    version: int
    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Changes:
    """Some rows of one source: what a batch added, by minute and entity."""

    source: str
    metrics: tuple[LayoutEntry, ...]
    buckets: list[int]
    entities: list[EntityRow]
    """The entity of each row."""
    cells: Mapping[str, list[Any]]
    """By column; None where nothing was added."""


def write_changes(file: IO[bytes], batch: Batch, layout: Layout) -> int:
    """Write the minutes of a batch; how many rows there were."""
    minutes = _minutes(batch)
    entities = batch.entities
    table = pa.table(
        {
            "kind": pa.array([entity.kind for entity in entities], pa.string()),
            "id": pa.array([entity.id for entity in entities], pa.string()),
            "name": pa.array([entity.name for entity in entities], pa.string()),
            "layers": pa.array(
                [sorted(entity.layers) for entity in entities], pa.list_(pa.string())
            ),
        }
    )
    _write(file, table, {"version": _VERSION, "sources": len(minutes)})
    for deltas in minutes:
        columns = {
            "bucket": pa.array(deltas.buckets, pa.int64()),
            "entity": pa.array(deltas.entities, pa.int64()),
            **{name: pa.array(values) for name, values in deltas.cells.items()},
        }
        _write(file, pa.table(columns), _source_head(deltas, layout))
    return count_rows(batch)


def count_rows(batch: Batch) -> int:
    """How many rows a batch's file has."""
    return sum(len(deltas.buckets) for deltas in _minutes(batch))


def read_changes(path: Path) -> Iterator[Changes]:
    """The changes in a file, :data:`ROWS` rows at a time."""
    try:
        with path.open("rb") as file:
            entities: list[EntityRow] = []
            with pa.ipc.open_stream(file) as stream:
                sources = _head(stream.schema)["sources"]
                for part in stream:
                    columns = (part[name].to_pylist() for name in ("kind", "id", "name", "layers"))
                    entities += [
                        EntityRow(kind, id_, name, frozenset(layers))
                        for kind, id_, name, layers in zip(*columns, strict=True)
                    ]
            for _ in range(sources):
                with pa.ipc.open_stream(file) as stream:
                    yield from _source_changes(stream, entities)
    except (pa.ArrowException, KeyError, IndexError, TypeError, ValueError) as error:
        raise OutboxFileError(str(path), " ".join(str(error).split())) from error


def _minutes(batch: Batch) -> list[Deltas]:
    return [
        deltas for deltas in batch.deltas if deltas.grain is Grain.MINUTE and len(deltas.buckets)
    ]


def _source_head(deltas: Deltas, layout: Layout) -> dict[str, Any]:
    metrics: dict[tuple[str, int], tuple[str, ...]] = {}
    for column in deltas.columns:
        name, version = layout.owners[deltas.source, column]
        metrics[name, version] = layout.columns[name]
    return {
        "source": deltas.source,
        "shared": dict(deltas.shared),
        "metrics": [[name, version, *cells] for (name, version), cells in metrics.items()],
    }


def _source_changes(stream: Any, entities: Sequence[EntityRow]) -> Iterator[Changes]:
    head = _head(stream.schema)
    metrics = tuple(
        LayoutEntry(name, version, tuple(columns)) for name, version, *columns in head["metrics"]
    )
    for part in stream:
        cells = {name: part[name].to_pylist() for name in part.schema.names[2:]}
        cells |= {name: cells[first] for name, first in head["shared"].items()}
        yield Changes(
            head["source"],
            metrics,
            part["bucket"].to_pylist(),
            [entities[number] for number in part["entity"].to_pylist()],
            cells,
        )


def _write(file: IO[bytes], table: pa.Table, head: Mapping[str, Any]) -> None:
    table = table.replace_schema_metadata({_HEAD: json.dumps(head)})
    with pa.ipc.new_stream(file, table.schema, options=_OPTIONS) as stream:
        stream.write_table(table, max_chunksize=ROWS)


def _head(schema: Any) -> dict[str, Any]:
    head: dict[str, Any] = json.loads(schema.metadata[_HEAD])
    if head.get("version", _VERSION) != _VERSION:
        raise ValueError(f"a newer batchmill wrote it, version {head['version']}")
    return head


log = logging.getLogger("batchmill.outbox")

FOLDER = "outbox"
_NAME = "outbox.json"
_SUFFIX = ".arrow"
_OLD_S = 86_400.0
"""An unlisted file of another stream that is older than this is not about to be committed."""


class Outbox:
    """A folder of changes. Several streams may write it at once, each its own sub-folder."""

    def __init__(self, folder: Path, settings: OutboxSettings | None = None) -> None:
        """Use :meth:`open` or :meth:`of`."""
        self.folder = folder
        self.settings = settings or OutboxSettings()
        self.place = str(json.loads((folder / _NAME).read_text("utf-8"))["id"])
        """Its id."""

    @classmethod
    def open(cls, checkpoint: Path, settings: OutboxSettings | None = None) -> Outbox:
        """The outbox of a pipeline with that checkpoint; created if there is none."""
        folder = checkpoint / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        name = folder / _NAME
        if not name.exists() and files.create_whole(name, json.dumps({"id": uuid.uuid4().hex})):
            files.sync(checkpoint)
        return cls(folder, settings)

    @classmethod
    def of(cls, checkpoint: Path) -> Outbox:
        """The outbox that is there; raises :class:`NoOutboxError` if there is none."""
        try:
            return cls(checkpoint / FOLDER)
        except FileNotFoundError:
            raise NoOutboxError(str(checkpoint)) from None

    def write(self, batch: Batch, layout: Layout) -> list[ChangeFile]:
        """Write a batch's changes, if it has any, to a file that survives a power cut."""
        if not count_rows(batch):
            return []
        folder = self.folder / batch.stream
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            files.sync(self.folder)
        path = folder / f"{batch.number}-{uuid.uuid4().hex[:12]}{_SUFFIX}"
        try:
            with path.open("wb") as file:
                rows = write_changes(file, batch, layout)
                file.flush()
                os.fsync(file.fileno())
                size = file.tell()
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        files.sync(folder)
        name = f"{batch.stream}/{path.name}"
        settings = self.settings
        return [
            ChangeFile(self.place, name, rows, size, settings.max_files, settings.max_bytes),
        ]

    def read(self, path: str) -> Iterator[Changes]:
        """The changes in a file, some rows at a time."""
        return read_changes(self.folder / path)

    def remove(self, paths: Iterable[str]) -> None:
        """Remove files that the store lists no more."""
        for path in paths:
            try:
                (self.folder / path).unlink(missing_ok=True)
            except OSError as error:
                log.warning("%s stays until its stream is claimed again: %s", path, error)

    def tidy(self, stream: str, listed: Collection[str]) -> None:
        """Remove the files of a stream that the store does not list: their commit failed.

        Call it only while the stream is claimed. Of other streams, which may be about to commit,
        only files that are a day old are removed.
        """
        old = time.time() - _OLD_S
        for path in self.folder.glob(f"*/*{_SUFFIX}"):
            if f"{path.parent.name}/{path.name}" in listed:
                continue
            with contextlib.suppress(FileNotFoundError):
                if path.parent.name == stream or path.stat().st_mtime < old:
                    path.unlink()
        for folder in self.folder.iterdir():
            # Of a backfill that has ended.
            if folder.is_dir() and folder.name != stream and folder.stat().st_mtime < old:
                with contextlib.suppress(OSError):  # it is not empty
                    folder.rmdir()
