"""What is handed to the spool: spans as columns, or events of one type as rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SPAN_SOURCE = "Span"
"""The folder of the spool that spans go to."""

SPAN_COLUMNS = (
    "trace_id",
    "span_id",
    "parent_span_id",
    "name",
    "kind",
    "time",
    "end_time",
    "status",
    "service",
    "resource",
    "attributes",
)
"""A span's columns.

Text, but for ``time`` and ``end_time`` (whole microseconds since 1970, UTC) and for ``resource``
and ``attributes``: dicts of texts. (A dict of texts costs the garbage collector nothing.)
"""

_ROW_BYTES = 64
"""What a row weighs beside its texts, for the estimate."""


def _no_rows() -> dict[str, list[Any]]:
    return {name: [] for name in SPAN_COLUMNS}


@dataclass(slots=True)
class SpanBatch:
    """Spans, column by column: ``columns[name][i]`` is what span ``i`` has there.

    The lists are filled by the decoder and not touched after the batch is submitted. Rows may
    share one dict (spans of one resource do), and one text.

    >>> batch = SpanBatch()
    >>> batch.columns["trace_id"].append("0af7651916cd43dd8448eb211c80319c")
    >>> len(batch)
    1
    """

    columns: dict[str, list[Any]] = field(default_factory=_no_rows)
    approx_bytes: int = 0
    """What the batch takes in memory, roughly; for the bound on what waits. The size of the
    request's body will do; 0: 64 bytes a row and no more."""

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

    @classmethod
    def joined(cls, batches: Iterable[SpanBatch]) -> SpanBatch:
        """The rows of ``batches``, one after the other."""
        whole = cls()
        for batch in batches:
            for name, values in whole.columns.items():
                values += batch.columns[name]
            whole.approx_bytes += batch.approx_bytes
        return whole


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
        """Nothing to check: rows have the length they have."""


def _weigh(row: Mapping[str, Any]) -> int:
    return _ROW_BYTES * len(row) + sum(
        [len(value) for value in row.values() if isinstance(value, str)]
    )
