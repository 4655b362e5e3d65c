"""Reads events as columns: instances of a class with ``@source``, or rows of any event type.

Only the fields that a metric reads are taken from an event.
"""

from __future__ import annotations

import dataclasses
import marshal
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchmill.aggregate import SourcePlan
from batchmill.client import row_for
from batchmill.sources import TIME_COLUMN, Field, SourceType, plain_value
from batchmill.spool import adapter

_TIME = pa.timestamp("us", tz="UTC")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MINUTE, _MICROSECOND = timedelta(minutes=1), timedelta(microseconds=1)
_TIMEDELTA = tuple(map(operator.attrgetter, ("days", "seconds", "microseconds")))
_PLAIN: Mapping[str, frozenset[type]] = {
    "string": frozenset((str, type(None))),
    "layer": frozenset((str, type(None))),
    "int": frozenset((int, type(None))),
    "long": frozenset((int, type(None))),
    "double": frozenset((float, int, type(None))),
    "bool": frozenset((bool, type(None))),
}
"""The classes whose values Arrow takes as they are, by the kind of the field."""
_LIST_HEADER = 5
_WHOLE = np.dtype([("letter", "u1"), ("value", "<i4")])
_ENTRIES: Mapping[str, tuple[bytes, np.dtype[Any], type]] = {
    "int": (b"i", _WHOLE, np.int64),
    "long": (b"i", _WHOLE, np.int64),
    "double": (b"g", np.dtype([("letter", "u1"), ("value", "<f8")]), np.float64),
}
"""How :mod:`marshal` writes an entry of a list, by the kind of the field: letter and layout."""
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
        if self.row_class not in set(map(type, events)):
            columns = (list(map(get, events)) for get in self._attributes)
            return self._from_values(columns, latest_us)
        rows = [event for event in events if isinstance(event, EventRow)]
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
    kind = field.type.kind
    numbers = _bools(values) if kind == "bool" else _numbers(kind, values)
    if numbers is not None:
        return pa.array(numbers, field.type.arrow_type())
    plain = _PLAIN.get(kind)
    if plain is None or not plain.issuperset(map(type, values)):
        values = list(map(plain_value, values))
        if adapt is not None:
            values = [None if value is None else adapt(value) for value in values]
    return pa.array(values, field.type.arrow_type())


def _numbers(kind: str, values: Sequence[Any]) -> npt.NDArray[Any] | None:
    """Numbers as an array; None if not all are of the usual class and below 32 bits.

    ``marshal`` writes a letter for the class of an entry, then its value. So its bytes have both,
    in a third of the time that it takes to look at the class of each value and convert it.
    """
    if kind not in _ENTRIES:
        return None
    letter, layout, dtype = _ENTRIES[kind]
    entries = _marshalled(values, layout)
    if entries is None or (entries["letter"] != letter[0]).any():
        return None
    return entries["value"].astype(dtype)


def _bools(values: Sequence[Any]) -> npt.NDArray[Any] | None:
    """Bools as an array, in the same way; None if there are others among them."""
    letters = _marshalled(values, np.dtype("u1"))
    if letters is None:
        return None
    true = letters == ord("T")
    return true if (true | (letters == ord("F"))).all() else None


def _marshalled(values: Any, layout: np.dtype[Any]) -> npt.NDArray[Any] | None:
    """What ``marshal`` writes of a list; None if its entries are not of this size."""
    try:
        written = marshal.dumps(values, 2)
    except ValueError:  # an object that it does not know
        return None
    if len(written) != _LIST_HEADER + len(values) * layout.itemsize:
        return None
    return np.frombuffer(written, layout, offset=_LIST_HEADER)


def _times(times: Sequence[Any], latest_us: int) -> pa.Array:
    try:
        zones = set(map(operator.attrgetter("tzinfo"), times))
    except AttributeError:
        return _other_times(times, latest_us)
    if None in zones:
        raise MisfitError("time: no time zone")
    if len(zones) == 1 and type(zones.pop()) is timezone:
        first, last = min(times), max(times)
        last_us = (last - _EPOCH) // _MICROSECOND
        if (first - _EPOCH) // _MINUTE == (last - _EPOCH) // _MINUTE and last_us <= latest_us:
            # As nearly always. Only the minute counts, and converting each moment takes long.
            return pa.array(np.full(len(times), last_us)).cast(_TIME)
    # Many times as fast as Arrow, which asks every moment's zone for its offset.
    since = [moment - _EPOCH for moment in times]
    days, seconds, micros = (
        np.fromiter(map(get, since), np.int64, len(since)) for get in _TIMEDELTA
    )
    return pa.array((days * 86_400 + seconds) * 1_000_000 + micros).cast(_TIME)


def _other_times(times: Sequence[Any], latest_us: int) -> pa.Array:
    """Microseconds since 1970; or moments among which are some that are None: now."""
    kinds = set(map(type, times))
    if kinds <= {int}:
        return pa.array(times, _TIME)
    if type(None) in kinds:
        now = datetime.now(UTC)
        return _times([now if moment is None else moment for moment in times], latest_us)
    raise MisfitError("time: not a datetime")
