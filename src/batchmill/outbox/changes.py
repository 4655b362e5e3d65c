"""A file of the outbox: the changes of one batch by minute, as Arrow.

Several Arrow IPC streams one behind the other. The first has the entities; then one for each
source, whose schema says which columns belong to which metric: the layout that it was made under.
Hours and days are not in it: they are the sums of minutes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from batchmill.outbox.settings import OutboxFileError
from batchmill.sources import Grain
from batchmill.store import Batch, Deltas, EntityRow, Layout

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
    return [deltas for deltas in batch.deltas if deltas.grain is Grain.MINUTE and deltas.buckets]


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
