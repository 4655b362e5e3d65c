"""What travels between the steps of a batch: Arrow tables as blobs, divided into parts.

A blob is a table as one value of a row: Spark moves a few hundred such rows where it would move
millions of spans, so its own work does not grow with them. Traces and entities are divided into
parts, so that tasks can share them: all rows of a trace, or of an entity, get to one task.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql.types import BinaryType, IntegerType, StringType, StructType

from batchmill.sources import (
    BLANK_NAME,
    ENDPOINT_NAME_LIMIT,
    INSTANCE_NAME_LIMIT,
    SERVICE_NAME_LIMIT,
    SourceType,
)
from batchmill.spans import combine, hash64, part_of

SCHEMA = pa.schema(
    [
        ("kind", pa.string()),
        ("source", pa.string()),
        ("part", pa.int32()),
        ("data", pa.binary()),
    ]
)
COLUMNS = (
    StructType()
    .add("kind", StringType())
    .add("source", StringType())
    .add("part", IntegerType())
    .add("data", BinaryType())
)
"""The same for Spark; not as text, which it would parse in every batch."""
_MOST_BYTES = 16 * 2**20
"""A larger table becomes several blobs: Spark holds a few of them at a time."""
_FEW_TEXTS = 64
"""A dictionary of so few texts stays as it is."""
_COMPRESSED = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
"""For deltas, which shrink to a quarter: the JVM copies a blob several times."""
Parts: TypeAlias = npt.NDArray[Any]
"""The part of each row."""
_COUNTING = min(SERVICE_NAME_LIMIT, INSTANCE_NAME_LIMIT, ENDPOINT_NAME_LIMIT)
"""Characters of a name that are in every entity's id."""


class Kind(StrEnum):
    """What a blob holds."""

    SPANS = "spans"
    """Spans of this batch, as :func:`batchmill.spans.compact` gives them."""
    DELTAS = "deltas"
    """Deltas of an event type, by minute."""
    TOPN = "topn"
    """Slow statements."""
    STATEMENTS = "statements"
    """How often each statement ran."""
    SLOWEST = "slowest"
    """Slow statements of a process that has counted them itself."""
    AHEAD = "ahead"
    """Deltas for the quarantine: of a minute that is too far ahead."""
    ROWS = "rows"
    """Valid rows of an event type, for a hook of the application."""
    INVALID = "invalid"
    """Rows for the quarantine, where tasks cannot write there themselves."""
    PENDING = "pending"
    """State: spans that wait for a partner, of an earlier batch or for later ones."""
    IDS = "ids"
    """State: the ids of spans that were counted, likewise."""
    REPORT = "report"
    """What a task has counted."""


@dataclass(frozen=True)
class Blob:
    """A table, or a report, on its way."""

    kind: Kind
    source: str
    """The event type; empty for those that have none."""
    part: int
    """Which share of the traces, or of the entities: a part, or the number of the task that is to
    get it."""
    data: pa.Buffer

    @classmethod
    def of(cls, kind: Kind, table: pa.Table, *, source: str = "", part: int = 0) -> Iterator[Blob]:
        """A table in as many blobs as its size takes; none if it has no rows."""
        if not table.num_rows:
            return
        table = used_texts(table)
        pieces = -(-table.nbytes // _MOST_BYTES) or 1
        rows = -(-table.num_rows // pieces)
        for first in range(0, table.num_rows, rows):
            piece = table.slice(first, rows)
            if pieces > 1:
                piece = used_texts(piece)
            sink = pa.BufferOutputStream()
            options = _COMPRESSED if kind is Kind.DELTAS else None
            with pa.ipc.new_stream(sink, piece.schema, options=options) as stream:
                stream.write_table(piece)
            yield cls(kind, source, part, sink.getvalue())

    @classmethod
    def of_report(cls, report: Any) -> Blob:
        """What a task has counted."""
        data = pickle.dumps(report)
        data += bytes(-len(data) % 8)  # the tables behind it in a batch stay aligned
        return cls(Kind.REPORT, "", 0, pa.py_buffer(data))

    @property
    def table(self) -> pa.Table:
        """The table in it."""
        return pa.ipc.open_stream(self.data).read_all()

    @property
    def report(self) -> Any:
        """The report in it."""
        return pickle.loads(self.data)


def columns_of(spark: SparkSession, schema: pa.Schema) -> StructType:
    """The columns of an Arrow schema, as Spark has them."""
    return spark.createDataFrame(schema.empty_table()).schema


def read_blobs(batches: Iterable[pa.RecordBatch]) -> Iterator[Blob]:
    """The blobs in batches of :data:`SCHEMA`."""
    for batch in batches:
        kinds, sources, parts, data = batch.columns
        for place, kind in enumerate(kinds.to_pylist()):
            source, part = sources[place].as_py(), parts[place].as_py()
            yield Blob(Kind(kind), source, part, data[place].as_buffer())  # not copied


def write_blobs(blobs: Iterable[Blob]) -> Iterator[pa.RecordBatch]:
    """Blobs as batches of :data:`SCHEMA`, of one row each."""
    for blob in blobs:
        values = [[blob.kind.value], [blob.source], [blob.part]]
        arrays = [pa.array(value, kind.type) for value, kind in zip(values, SCHEMA, strict=False)]
        bounds = pa.py_buffer(np.array([0, blob.data.size], np.int32))
        arrays.append(pa.Array.from_buffers(pa.binary(), 1, [None, bounds, blob.data]))
        yield pa.record_batch(arrays, schema=SCHEMA)


def used_texts(table: pa.Table) -> pa.Table:
    """The same rows, whose dictionaries have no text that is not used: those of slices have all."""
    for place, field in enumerate(table.schema):
        if not pa.types.is_dictionary(field.type):
            continue
        column = table.column(place).combine_chunks()
        size = len(column.dictionary)
        if size <= _FEW_TEXTS:
            continue
        indices = column.indices.fill_null(0).to_numpy()
        used = np.zeros(size, np.bool_)
        used[indices] = True
        if used.all():
            continue
        numbers = (np.cumsum(used) - 1).astype(np.int32)[indices]
        codes = pa.array(numbers, mask=column.is_null().to_numpy(zero_copy_only=False))
        texts = column.dictionary.filter(pa.array(used))
        table = table.set_column(place, field, pa.DictionaryArray.from_arrays(codes, texts))
    return table


@dataclass(frozen=True)
class Share:
    """Which parts of the traces are a task's."""

    parts: int
    tasks: int
    task: int

    @property
    def own(self) -> range:
        """Its parts."""
        return range(self.task, self.parts, self.tasks)


def this_task() -> int:
    """The number of the task of Spark that calls; 0 outside of one."""
    context = TaskContext.get()
    return 0 if context is None else context.partitionId()


def trace_parts(rows: pa.Table, parts: int) -> Parts:
    """The part of each row, by its trace; rows without one, which have no partner, anywhere."""
    traces = rows["trace_id"]
    places = part_of(hash64(traces), parts)
    if traces.null_count:
        lone = np.flatnonzero(traces.is_null().to_numpy())
        places[lone] = lone % parts
    return places


def by_part(table: pa.Table, parts: Parts) -> Iterator[tuple[int, pa.Table]]:
    """The rows of each part; ``parts`` has the part of each row."""
    if not table.num_rows:
        return
    order = np.argsort(parts, kind="stable")
    present, starts = np.unique(parts[order], return_index=True)
    rows = table if len(present) == 1 else table.take(pa.array(order))
    for part, start, end in zip(present, starts, [*starts[1:], len(parts)], strict=True):
        yield int(part), rows.slice(start, end - start)


def entity_parts(roles: Sequence[pa.Array], source: SourceType, parts: int) -> Parts:
    """The part of each row, by its entity; ``roles`` are the columns of its plan's roles.

    All rows of an entity are in one part, though they may have different layers, and names of
    which an id has the beginning only. The parts of a batch that is half committed must stay the
    same, so this must not change from one version to the next.
    """
    columns = (role for role, name in source.entity.roles.items() if not name.startswith("="))
    names = [
        _counting(column, role)
        for role, column in zip(columns, roles, strict=True)
        if not role.endswith("layer")
    ]
    return part_of(combine(*map(hash64, names)), parts)


def _counting(names: pa.Array, role: str) -> pa.Array:
    """What two names have in common if an entity's id does not tell them apart.

    ``role`` says which of the entity's names they are.
    """
    if pa.types.is_dictionary(names.type):
        if names.null_count:
            return _counting(names.dictionary_decode(), role)
        texts = _counting(names.dictionary, role)
        return pa.DictionaryArray.from_arrays(names.indices, texts)
    names = pc.fill_null(names, "")
    if role == "field":  # the id itself
        return names
    if (pc.max(pc.binary_length(names)).as_py() or 0) > _COUNTING:
        names = pc.utf8_slice_codeunits(names, 0, _COUNTING)
    if role.endswith("service"):
        blank = pc.equal(pc.utf8_trim_whitespace(names), "")
        names = pc.if_else(blank, BLANK_NAME, names)
    return names


def text_parts(entities: pa.ChunkedArray, parts: int) -> Parts:
    """The part of each row, by the id of its entity."""
    return part_of(hash64(entities), parts)
