"""What travels between the steps of a batch: Arrow tables, each as one value of a row.

Spark moves a few hundred such rows where it would move millions of spans, so its own work does not
grow with them.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import pyarrow as pa

SCHEMA = pa.schema(
    [
        ("kind", pa.string()),
        ("source", pa.string()),
        ("part", pa.int32()),
        ("data", pa.binary()),
    ]
)
COLUMNS = "kind string, source string, part int, data binary"
"""The same as Spark writes it."""
_MOST_BYTES = 16 * 2**20
"""A larger table becomes several blobs: Spark holds a few of them at a time."""
_FEW_TEXTS = 64
"""A dictionary of so few texts stays as it is."""
_COMPRESSED = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
"""For deltas, which shrink to a quarter: the JVM copies a blob several times."""


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
