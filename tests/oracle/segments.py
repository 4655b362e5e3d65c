"""Rows as Parquet segments: `<folder>/<source>/<n>.parquet`, and back."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.oracle.catalog import Row, column_of, load_catalog

SPAN_SOURCE = "Span"

_SPAN_TEXTS = ("trace_id", "span_id", "parent_span_id", "name", "kind", "status", "service")
_SCALARS = {
    "string": pa.string(),
    "layer": pa.string(),
    "int": pa.int32(),
    "long": pa.int64(),
    "double": pa.float64(),
    "bool": pa.bool_(),
}
_TIME = pa.timestamp("us", tz="UTC")
_STRING_MAP = pa.map_(pa.string(), pa.string())


def write_segments(
    events: Mapping[str, Sequence[Row]], folder: Path, files_per_source: int, seed: int
) -> list[Path]:
    """Deal each source's rows out to its files at random; a file has at least one row."""
    rng = random.Random(seed)
    written = []
    for source in sorted(events):
        rows = list(events[source])
        rng.shuffle(rows)
        target = folder / source
        target.mkdir(parents=True, exist_ok=True)
        for number in range(min(files_per_source, len(rows))):
            path = target / f"{number}.parquet"
            pq.write_table(to_table(source, rows[number::files_per_source]), path)
            written.append(path)
    return written


def read_segments(folder: Path) -> dict[str, list[Row]]:
    """All rows below a folder, nulls as None, in the order of the files' numbers."""
    events: dict[str, list[Row]] = {}
    for source in sorted(path for path in folder.iterdir() if path.is_dir()):
        schema = schema_of(source.name)
        maps = [field.name for field in schema if pa.types.is_map(field.type)]
        rows = events.setdefault(source.name, [])
        for path in sorted(source.glob("*.parquet"), key=lambda file: int(file.stem)):
            for row in pq.read_table(path, schema=schema).to_pylist():
                rows.append(row | {name: _as_dict(row[name]) for name in maps})
    return events


def to_table(source: str, rows: Sequence[Row]) -> pa.Table:
    """The rows as a table of the source's columns; absent fields are null."""
    return pa.Table.from_pylist([dict(row) for row in rows], schema=schema_of(source))


def schema_of(source: str) -> pa.Schema:
    """The columns of a source; `time` is the event's own time."""
    columns: list[tuple[str, pa.DataType]] = [("time", _TIME)]
    if source == SPAN_SOURCE:
        columns += [("end_time", _TIME), ("resource", _STRING_MAP), ("attributes", _STRING_MAP)]
        columns += [(name, pa.string()) for name in _SPAN_TEXTS]
    else:
        fields = load_catalog().fields[source]
        columns += [(column_of(name), arrow_type(kind)) for name, kind in fields.items()]
    return pa.schema([pa.field(name, kind, nullable=name != "time") for name, kind in columns])


def arrow_type(kind: str) -> pa.DataType:
    """The Arrow type of a field, from its type in the catalog."""
    if kind in _SCALARS:
        return _SCALARS[kind]
    if kind.startswith("enum:"):
        return pa.string()
    if kind.startswith("list<"):
        return pa.list_(arrow_type(kind[5:-1]))
    if kind.startswith("map<"):
        return _STRING_MAP
    if kind.startswith("struct:"):
        fields = load_catalog().structs[kind.removeprefix("struct:")]
        return pa.struct([(name, arrow_type(inner)) for name, inner in fields.items()])
    raise ValueError(f"no Arrow type for {kind}")


def _as_dict(pairs: Any) -> dict[str, str] | None:
    return None if pairs is None else dict(pairs)
