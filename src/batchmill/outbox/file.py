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

from batchmill.outbox.errors import OutboxFileError
from batchmill.sources import Grain
from batchmill.store import Batch, Deltas, EntityRow, Layout

ROWS = 2_000
"""How many rows lie together, and are read at a time."""
_HEAD = b"batchmill"
_VERSION = 1
_OPTIONS = pa.ipc.IpcWriteOptions(compression="lz4")


@dataclass(frozen=True, slots=True)
class LayoutEntry:
    """A metric in a file: which version of it, and its columns, one a cell."""

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
    """That of each row."""
    cells: Mapping[str, list[Any]]
    """By column; None where nothing was added."""


def write(file: IO[bytes], batch: Batch, layout: Layout) -> int:
    """Write the minutes of a batch; how many rows there were."""
    minutes = _minutes(batch)
    entities = batch.entities
    table = pa.table(
        {
            "kind": pa.array([each.kind for each in entities], pa.string()),
            "id": pa.array([each.id for each in entities], pa.string()),
            "name": pa.array([each.name for each in entities], pa.string()),
            "layers": pa.array([sorted(each.layers) for each in entities], pa.list_(pa.string())),
        }
    )
    _write(file, table, {"version": _VERSION, "sources": len(minutes)})
    for each in minutes:
        _write(file, *_source(each, layout))
    return count_rows(batch)


def count_rows(batch: Batch) -> int:
    """How many rows a batch's file has."""
    return sum(len(each.buckets) for each in _minutes(batch))


def read(path: Path) -> Iterator[Changes]:
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
                    yield from _changes(stream, entities)
    except (pa.ArrowException, KeyError, IndexError, TypeError, ValueError) as error:
        raise OutboxFileError(str(path), " ".join(str(error).split())) from error


def _minutes(batch: Batch) -> list[Deltas]:
    return [each for each in batch.deltas if each.grain is Grain.MINUTE and each.buckets]


def _source(deltas: Deltas, layout: Layout) -> tuple[pa.Table, dict[str, Any]]:
    made: dict[int, str] = {}
    columns: dict[str, pa.Array] = {
        "bucket": pa.array(deltas.buckets, pa.int64()),
        "entity": pa.array(deltas.entities, pa.int64()),
    }
    shared: dict[str, str] = {}
    for name, values in deltas.cells.items():
        # Metrics that share a state share the list, too: it is written once.
        first = made.setdefault(id(values), name)
        if first != name:
            shared[name] = first
        else:
            columns[name] = pa.array(values)
    metrics: dict[tuple[str, int], tuple[str, ...]] = {}
    for name in deltas.cells:
        metric, version = layout.owners[deltas.source, name]
        metrics[metric, version] = layout.columns[metric]
    head = {
        "source": deltas.source,
        "shared": shared,
        "metrics": [[name, version, *cells] for (name, version), cells in metrics.items()],
    }
    return pa.table(columns), head


def _changes(stream: Any, entities: Sequence[EntityRow]) -> Iterator[Changes]:
    head = _head(stream.schema)
    metrics = tuple(LayoutEntry(each[0], each[1], tuple(each[2:])) for each in head["metrics"])
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
