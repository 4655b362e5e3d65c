"""Segments of deltas: the events of processes that aggregate them themselves.

A client with ``aggregate=`` writes states of entities and minutes in place of events. They are
merged here, in the driver: an hour of a busy process is a few thousand of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchmill.aggregate import (
    Aggregator,
    Deltas,
    DeltasError,
    SlowestStatements,
    TopNThresholds,
    from_arrow,
    statements_from_arrow,
    to_arrow,
)
from batchmill.sources import Grain
from batchmill.spark.input.segments import BadSegment, Segment, read_table
from batchmill.spool import delta_file

AHEAD = "time too far ahead"
_MINUTE_US = 60_000_000
_MERGED_AT = 64 * 2**20
"""So many bytes of deltas are merged at once: memory grows with the entities and minutes of a
batch, not with its segments."""


@dataclass
class MergedDeltas:
    """The deltas of some segments of one event type."""

    deltas: Deltas
    bad: list[BadSegment] = field(default_factory=list)
    """Segments that cannot be used."""
    ahead: pa.Table | None = None
    """Deltas of minutes that are too far ahead; None: there are none."""
    ahead_rows: int = 0
    """How many events those are made of."""


class DeltaReader:
    """Reads the segments of one event type that hold deltas."""

    def __init__(self, aggregator: Aggregator) -> None:
        self.aggregator = aggregator
        empty = delta_file(to_arrow(aggregator.empty(), aggregator.plan))
        self._types = {
            column.name: column.type for column in pq.read_schema(pa.BufferReader(empty))
        }

    def read(self, segments: Sequence[Segment], latest_us: int) -> MergedDeltas:
        """Merge segments; ``latest_us`` is the latest valid start, in microseconds since 1970."""
        merged = MergedDeltas(self.aggregator.empty())
        waiting: list[Deltas] = []
        ahead: list[pa.Table] = []
        size = 0
        for segment in segments:
            table = read_table(segment)
            if isinstance(table, BadSegment):
                merged.bad.append(table)
                continue
            try:
                deltas = self._deltas(table)
            except _UnusableError as error:
                merged.bad.append(
                    BadSegment(segment.path, segment.source, error.reason, str(error), segment.rows)
                )
                continue
            late = deltas.starts * _MINUTE_US > latest_us
            if late.any():
                merged.ahead_rows += int(deltas.rows[late].sum())
                ahead.append(table.filter(pa.array(late)))
                deltas = from_arrow(table.filter(pa.array(~late)), self.aggregator.plan)
            waiting.append(deltas)
            size += deltas.nbytes
            if size > _MERGED_AT:
                waiting = [self.aggregator.merge(waiting)]
                size = 0
        merged.deltas = self.aggregator.merge(waiting)
        merged.ahead = pa.concat_tables(ahead, promote_options="permissive") if ahead else None
        return merged

    def _deltas(self, table: pa.Table) -> Deltas:
        try:
            deltas = from_arrow(table, self.aggregator.plan)
        except DeltasError as error:
            raise _UnusableError("other metrics", str(error)) from error
        except (KeyError, ValueError, TypeError, pa.ArrowException) as error:
            raise _UnusableError("wrong type", f"not deltas: {error!r}") from error
        for name, kind in self._types.items():
            if table.schema.field(name).type != kind:
                actual = table.schema.field(name).type
                raise _UnusableError("wrong type", f"column {name}: {actual}, not {kind}")
        if deltas.grain is not Grain.MINUTE:
            raise _UnusableError("wrong type", f"deltas of a {deltas.grain.value}, not of a minute")
        if np.any(deltas.starts < 0) or np.any(deltas.rows < 0):
            raise _UnusableError("wrong type", "a minute before 1970, or of fewer than no events")
        return deltas


@dataclass
class MergedStatements:
    """The slow statements of some segments."""

    statements: SlowestStatements
    count: int = 0
    """How many statements that ran they stand for."""
    bad: list[BadSegment] = field(default_factory=list)
    """Segments that cannot be used."""


def read_statements(
    segments: Sequence[Segment], n: int, limits: TopNThresholds, latest_us: int
) -> MergedStatements:
    """Merge segments of slow statements, for the ``n`` slowest by these thresholds.

    ``latest_us`` is the latest valid start, in microseconds since 1970.
    """
    merged = MergedStatements(SlowestStatements(n, limits))
    latest = Grain.MINUTE.bucket(datetime.fromtimestamp(latest_us / 1e6, UTC))
    for segment in segments:
        table = read_table(segment)
        if isinstance(table, BadSegment):
            merged.bad.append(table)
            continue
        reason, detail = "other metrics", ""
        try:
            statements = statements_from_arrow(table, n, limits)
            if any(place[2] > latest for place, _ in statements.runs):
                reason, detail = AHEAD, "the process's clock is wrong, or the pipeline's"
        except DeltasError as error:
            detail = str(error)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            reason, detail = "wrong type", f"not statements: {error!r}"
        if detail:
            merged.bad.append(
                BadSegment(segment.path, segment.source, reason, detail, segment.rows)
            )
            continue
        merged.statements.merge(statements)
        merged.count += segment.rows
    return merged


class _UnusableError(Exception):
    """A segment cannot be used; ``reason`` is for the counter."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
