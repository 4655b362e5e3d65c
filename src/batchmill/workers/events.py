"""Reads events as columns: instances of a class with ``@source``, or rows of any event type.

Only the fields that a metric reads are taken from an event.
"""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import numpy as np
import pyarrow as pa

from batchmill.aggregate import SourcePlan
from batchmill.client import row_for
from batchmill.sources import TIME_COLUMN, Field, SourceType, plain_value
from batchmill.spool import adapter

_TIME = pa.timestamp("us", tz="UTC")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MINUTE, _MICROSECOND = timedelta(minutes=1), timedelta(microseconds=1)
_PLAIN: Mapping[str, frozenset[type]] = {
    "string": frozenset((str, type(None))),
    "layer": frozenset((str, type(None))),
    "int": frozenset((int, type(None))),
    "long": frozenset((int, type(None))),
    "double": frozenset((float, int, type(None))),
    "bool": frozenset((bool, type(None))),
}
"""The classes whose values Arrow takes as they are, by the kind of the field."""
_MISFITS = (pa.ArrowException, ValueError, TypeError, OverflowError, AttributeError)
"""What reading a value of the wrong type raises."""


class MisfitError(Exception):
    """Some of the events cannot be read; its text is the reason, without their values."""


class EventRow:
    """An event as a row: columns to values, with its start in microseconds.

    A queue calls handlers by class, so every event type has a subclass of its own.
    """

    __slots__ = ("row",)

    def __init__(self, row: dict[str, Any]) -> None:
        self.row = row


@dataclass
class ReadEvents:
    """Events as a table, and how many could not be read, by reason."""

    table: pa.Table
    invalid: Counter[str] = field(default_factory=Counter)


class EventReader:
    """Reads the events of one type as the columns that its metrics need."""

    def __init__(self, plan: SourcePlan) -> None:
        self.source: SourceType = plan.source
        self.row_class: type[EventRow] = type(
            f"{plan.source.name}Row", (EventRow,), {"__slots__": ()}
        )
        self._fields = plan.fields
        self._schema = pa.schema(
            [
                (TIME_COLUMN, _TIME),
                *((field.column, field.type.arrow_type()) for field in self._fields),
            ]
        )
        self._empty = self._schema.empty_table()
        self._adapters = [adapter(field.type) for field in self._fields]
        names = [TIME_COLUMN, *(field.name for field in self._fields)]
        # One attribute of all events at a time: that makes no tuple for each event.
        self._attributes = [operator.attrgetter(name) for name in names]
        self._columns = [TIME_COLUMN, *(field.column for field in self._fields)]

    def takes(self, cls: type) -> bool:
        """Whether instances of a class can be read as they are: they have a ``time``."""
        return any(field.name == TIME_COLUMN for field in dataclasses.fields(cls))

    def row(self, event: object, source: str | None) -> EventRow:
        """An event as a row of its type, checked; one without a time happened now."""
        return self.row_class(row_for(event, source)[1])

    def read(self, events: Sequence[object], latest_us: int) -> ReadEvents:
        """Read events; those that do not fit are left out and counted.

        Where all are of one minute, and none is after ``latest_us``, they get the same moment.
        """
        invalid: Counter[str] = Counter()
        tables = list(self._tables(events, latest_us, invalid))
        table = tables[0] if len(tables) == 1 else pa.concat_tables([self._empty, *tables])
        return ReadEvents(table, invalid)

    def _tables(
        self, events: Sequence[object], latest_us: int, invalid: Counter[str]
    ) -> Iterator[pa.Table]:
        """Read events in as few parts as possible: halves, where one of them does not fit."""
        try:
            yield self._table(events, latest_us)
        except MisfitError as misfit:
            if len(events) == 1:
                invalid[str(misfit)] += 1
                return
            half = len(events) // 2
            yield from self._tables(events[:half], latest_us, invalid)
            yield from self._tables(events[half:], latest_us, invalid)

    def _table(self, events: Sequence[object], latest_us: int) -> pa.Table:
        rows = [event for event in events if isinstance(event, EventRow)]
        if not rows:
            columns = (list(map(get, events)) for get in self._attributes)
            return self._from_values(columns, latest_us)
        values = ([event.row.get(name) for event in rows] for name in self._columns)
        table = self._from_values(values, latest_us)
        if len(rows) == len(events):
            return table
        others = [event for event in events if not isinstance(event, EventRow)]
        return pa.concat_tables([table, self._table(others, latest_us)])

    def _from_values(self, columns: Iterable[Sequence[Any]], latest_us: int) -> pa.Table:
        try:
            times, *values = columns
            arrays = [_times(times, latest_us)]
        except _MISFITS as error:
            raise MisfitError("time: not a moment") from error
        for field_, adapt, column in zip(self._fields, self._adapters, values, strict=True):
            try:
                arrays.append(_array(field_, adapt, column))
            except _MISFITS as error:
                raise MisfitError(f"{field_.name}: a value of the wrong type") from error
        return pa.table(arrays, schema=self._schema)


def _array(field: Field, adapt: Callable[[Any], Any] | None, values: Sequence[Any]) -> pa.Array:
    plain = _PLAIN.get(field.type.kind)
    if plain is None or not plain.issuperset(map(type, values)):
        values = list(map(plain_value, values))
        if adapt is not None:
            values = [None if value is None else adapt(value) for value in values]
    return pa.array(values, field.type.arrow_type())


def _times(times: Sequence[Any], latest_us: int) -> pa.Array:
    kinds = set(map(type, times))
    if kinds <= {int}:
        return pa.array(times, _TIME)
    if type(None) in kinds:
        now = datetime.now(UTC)
        return _times([now if moment is None else moment for moment in times], latest_us)
    if not all(issubclass(kind, datetime) for kind in kinds):
        raise MisfitError("time: not a datetime")
    zones = set(map(operator.attrgetter("tzinfo"), times))
    if None in zones:
        raise MisfitError("time: no time zone")
    if len(zones) == 1 and type(zones.pop()) is timezone:
        first, last = min(times), max(times)
        last_us = (last - _EPOCH) // _MICROSECOND
        if (first - _EPOCH) // _MINUTE == (last - _EPOCH) // _MINUTE and last_us <= latest_us:
            # As nearly always. Only the minute counts, and converting each moment takes long.
            return pa.array(np.full(len(times), last_us)).cast(_TIME)
    return pa.array(times, _TIME)
