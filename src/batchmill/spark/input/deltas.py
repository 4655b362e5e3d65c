"""Segments of deltas: the events of processes that aggregate them themselves.

A client with ``aggregate=`` writes states of entities and minutes in place of events. A task that
reads such a segment passes them on, as it does with those that it makes of events.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchmill.aggregate import (
    ROW_COUNT,
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
from batchmill.spool import delta_file

AHEAD = "time too far ahead"
_MINUTE_US = 60_000_000


class UnusableError(Exception):
    """A segment cannot be used; ``reason`` is for the counter, ``rows`` are its events."""

    def __init__(self, reason: str, detail: str, table: pa.Table) -> None:
        super().__init__(detail)
        self.reason = reason
        self.rows = events_in(table)


def events_in(table: pa.Table) -> int:
    """How many events went into the deltas or statements of a segment."""
    if ROW_COUNT not in table.column_names:
        return int(table.num_rows)
    try:
        return int(pc.sum(table[ROW_COUNT]).as_py() or 0)
    except pa.ArrowException:
        return int(table.num_rows)


@dataclass(frozen=True)
class ReadDeltas:
    """The deltas of a segment."""

    deltas: Deltas
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

    def read(self, table: pa.Table, latest_us: int) -> ReadDeltas:
        """Read a segment; ``latest_us`` is the latest valid start, in microseconds since 1970."""
        deltas = self._deltas(table)
        late = deltas.starts * _MINUTE_US > latest_us
        if not late.any():
            return ReadDeltas(deltas)
        valid = from_arrow(table.filter(pa.array(~late)), self.aggregator.plan)
        return ReadDeltas(valid, table.filter(pa.array(late)), int(deltas.rows[late].sum()))

    def _deltas(self, table: pa.Table) -> Deltas:
        try:
            deltas = from_arrow(table, self.aggregator.plan)
        except DeltasError as error:
            raise UnusableError("other metrics", str(error), table) from error
        except (KeyError, ValueError, TypeError, pa.ArrowException) as error:
            raise UnusableError("wrong type", f"not deltas: {error!r}", table) from error
        for name, kind in self._types.items():
            if table.schema.field(name).type != kind:
                actual = table.schema.field(name).type
                raise UnusableError("wrong type", f"column {name}: {actual}, not {kind}", table)
        if deltas.grain is not Grain.MINUTE:
            detail = f"deltas by {deltas.grain.value}, not by minute"
            raise UnusableError("wrong type", detail, table)
        if np.any(deltas.starts < 0) or np.any(deltas.rows < 0):
            detail = "a minute before 1970, or of fewer than no events"
            raise UnusableError("wrong type", detail, table)
        return deltas


@dataclass(frozen=True)
class ReadStatements:
    """The slow statements of a segment."""

    statements: SlowestStatements
    count: int
    """How many statements that ran they stand for."""


def read_statements(
    table: pa.Table, n: int, limits: TopNThresholds, latest_us: int
) -> ReadStatements:
    """Read a segment of slow statements, for the ``n`` slowest by these thresholds.

    ``latest_us`` is the latest valid start, in microseconds since 1970.
    """
    latest = Grain.MINUTE.bucket(datetime.fromtimestamp(latest_us / 1e6, UTC))
    try:
        statements = statements_from_arrow(table, n, limits)
        ahead = any(place[2] > latest for place, _ in statements.runs)
    except DeltasError as error:
        raise UnusableError("other metrics", str(error), table) from error
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise UnusableError("wrong type", f"not statements: {error!r}", table) from error
    if ahead:
        detail = "the process's clock is wrong, or the pipeline's"
        raise UnusableError(AHEAD, detail, table)
    return ReadStatements(statements, events_in(table))
