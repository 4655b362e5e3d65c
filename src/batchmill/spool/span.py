"""What a span is made of: the one definition of its columns, and batches of spans and of events.

Parquet segments, Kafka's messages, the receiver's rows and Spark's schemas are all derived from
:data:`SPAN_SCHEMA`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from batchmill.sources import SPAN_SOURCE as SPAN_SOURCE

if TYPE_CHECKING:
    import pyarrow as pa

ColumnKind: TypeAlias = Literal["time", "id", "text", "map"]
"""``time``: whole microseconds since 1970, UTC; ``id``: lower-case hex digits; ``map``: a dict from
text to text. Values of ``time`` and ``id`` columns hardly ever repeat."""


@dataclass(frozen=True, slots=True)
class SpanColumn:
    """One column of a span."""

    number: int
    """Its field number in Kafka's protobuf message. Never change one: topics hold old messages."""
    name: str
    kind: ColumnKind
    meaning: str
    required: bool = False
    """Whether a row without it cannot be used; the pipeline puts such rows into quarantine."""


SPAN_SCHEMA: tuple[SpanColumn, ...] = (
    SpanColumn(1, "time", "time", "when it started", required=True),
    SpanColumn(2, "end_time", "time", "when it ended", required=True),
    SpanColumn(3, "trace_id", "id", "32 hex digits", required=True),
    SpanColumn(4, "span_id", "id", "16 hex digits", required=True),
    SpanColumn(5, "parent_span_id", "id", "16 hex digits; null for the root of a trace"),
    SpanColumn(6, "name", "text", "what was done, such as GET /orders"),
    SpanColumn(7, "kind", "text", "SERVER, CONSUMER, CLIENT, PRODUCER or INTERNAL"),
    SpanColumn(8, "status", "text", "OK, ERROR or UNSET"),
    SpanColumn(9, "service", "text", "service.name of the resource"),
    SpanColumn(10, "resource", "map", "attributes of the process that sent it"),
    SpanColumn(11, "attributes", "map", "attributes of the span itself"),
)
"""A span's columns, in the order of segments and messages."""

SPAN_COLUMNS = tuple(column.name for column in SPAN_SCHEMA)
"""Their names."""

ATTRIBUTE_COLUMNS: Mapping[str, str] = {
    key: key.replace(".", "_")
    for key in (
        *("peer.service", "service.peer.name"),
        *("server.address", "server.port"),
        *("net.peer.name", "net.peer.port", "net.peer.ip"),
        *("net.sock.peer.name", "net.sock.peer.addr", "net.sock.peer.port"),
        *("network.peer.address", "network.peer.port"),
        *("http.request.method", "http.method", "http.route", "url.full", "http.url"),
        *("http.response.status_code", "http.status_code"),
        *("rpc.system.name", "rpc.system", "rpc.response.status_code", "rpc.grpc.status_code"),
        *("db.system.name", "db.system", "db.namespace", "db.name"),
        *("db.operation.name", "db.operation", "db.query.text", "db.statement"),
        *("messaging.system", "messaging.destination.name", "messaging.destination"),
        *("messaging.operation.type", "messaging.operation.name", "messaging.operation"),
        *("gen_ai.provider.name", "gen_ai.system", "gen_ai.operation.name"),
        *("gen_ai.request.model", "gen_ai.response.model"),
        *("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens"),
        *("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens"),
    )
}
"""Attributes of a span that give it its meaning, and the column of a segment that each has. The
others of its attributes are in the column ``attributes``."""

STATUS_MESSAGE = "otel.status_description"
"""The attribute that the receiver makes of a span's status message."""
EVENTS = "batchmill.events"
"""The attribute that the receiver makes of a span's events: as JSON, a list of objects with
``time`` in microseconds since 1970, ``name`` and ``attributes``."""
KEPT_COLUMNS: Mapping[str, str] = {STATUS_MESSAGE: "status_message", EVENTS: "events"}
"""Their columns of a segment. Metrics do not read them: they are for people who look at a trace."""

SEGMENT_COLUMNS: Mapping[str, str] = {**ATTRIBUTE_COLUMNS, **KEPT_COLUMNS}
"""All attributes of a span that have a column of a segment."""

RESOURCE_COLUMNS: Mapping[str, str] = {
    "service.instance.id": "service_instance_id",
    "host.name": "host_name",
}
"""Attributes of a resource that have a column of a segment, too; ``resource`` has all of them."""

FOREIGN = "_value"
"""An extra column of segments made from a topic: the bytes of a message that holds no spans."""

_ROW_BYTES = 64
"""What a row weighs beside its texts, for the estimate."""


def _no_rows() -> dict[str, list[Any]]:
    return {name: [] for name in SPAN_COLUMNS}


@dataclass(slots=True)
class SpanBatch:
    """Spans, column by column: ``columns[name][i]`` is the value of span ``i``.

    The decoder fills the lists; after the batch is submitted nobody changes them. Rows may share
    one dict (spans of one resource do), and one text.

    >>> batch = SpanBatch()
    >>> batch.columns["trace_id"].append("0af7651916cd43dd8448eb211c80319c")
    >>> len(batch)
    1
    """

    columns: dict[str, list[Any]] = field(default_factory=_no_rows)
    approx_bytes: int = 0
    """Roughly how much memory the batch takes, for the bound on what waits. The size of the
    request's body will do; with 0 each row counts for 64 bytes."""

    def __len__(self) -> int:
        return len(self.columns["trace_id"])

    @property
    def weight(self) -> int:
        """The bytes it counts for."""
        return max(self.approx_bytes, _ROW_BYTES * len(self))

    def check(self) -> None:
        """Raise ValueError unless every column is there, and as long as the others."""
        lengths = {name: len(self.columns.get(name, ())) for name in SPAN_COLUMNS}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the columns of a SpanBatch must be of one length, not {lengths}")

    def unpacked(self) -> SpanBatch:
        """The batch itself; see :class:`PackedSpans`."""
        return self

    @classmethod
    def joined(cls, batches: Iterable[SpanBatch]) -> SpanBatch:
        """The rows of ``batches``, one after the other."""
        whole = cls()
        for batch in batches:
            for name, values in whole.columns.items():
                values += batch.columns[name]
            whole.approx_bytes += batch.approx_bytes
        return whole


class PackedSpans(ABC):
    """Spans in a denser form than lists; those of many requests become one table in one step."""

    weight: int
    """The bytes it counts for."""
    table_bytes: int
    """What it takes in the table of a segment."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def unpacked(self) -> SpanBatch:
        """The same spans as lists."""

    @classmethod
    @abstractmethod
    def join(cls, parts: Sequence[Any]) -> pa.Table:
        """The rows of ``parts``, which are all of this class, as the table of a segment."""

    def check(self) -> None:
        """Do nothing: whoever packed them has checked them."""
        return


class EventBatch:
    """Events of one type, as rows: column to value, with ``time`` in microseconds since 1970."""

    __slots__ = ("rows", "weight")

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.rows = rows
        self.weight = sum(map(_weigh, rows))
        """The bytes it counts for."""

    def __len__(self) -> int:
        return len(self.rows)

    def check(self) -> None:
        """Nothing to check: a row has no fixed length."""


def _weigh(row: Mapping[str, Any]) -> int:
    return _ROW_BYTES * len(row) + sum(
        [len(value) for value in row.values() if isinstance(value, str)]
    )
