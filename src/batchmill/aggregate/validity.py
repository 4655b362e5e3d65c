"""Which rows of an event type are invalid, and why.

The same rules for the pipeline, which reads rows from files, and for processes that aggregate their
events themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchmill.aggregate.columns import Mask
from batchmill.aggregate.plan import LARGEST_DOUBLE
from batchmill.sources import TIME_COLUMN, Field, SourceType

TIMESTAMP = pa.timestamp("us", tz="UTC")
"""The type of a moment."""
_INT_LIMIT = 2**31
_LONG_MAX = 2**63 - 1
_MICROS = {"s": 1_000_000, "ms": 1_000}

Check: TypeAlias = tuple[str, Mask]
"""A reason, and the rows that are invalid for it."""


@dataclass(frozen=True)
class Reasons:
    """Why rows are invalid: the first reason that applies to each."""

    texts: tuple[str, ...]
    """The reasons that there are."""
    codes: npt.NDArray[np.int16]
    """For each row, the place of its reason in ``texts``; -1: it is valid."""

    @classmethod
    def of(cls, checks: Iterable[Check], rows: int) -> Reasons:
        """The reasons of that many rows; earlier checks come first."""
        texts: list[str] = []
        codes = np.full(rows, -1, np.int16)
        for reason, mask in checks:
            applies = mask & (codes < 0) if texts else mask
            if applies.any():
                codes[applies] = len(texts)
                texts.append(reason)
        return cls(tuple(texts), codes)

    def __bool__(self) -> bool:
        """Whether a row is invalid."""
        return bool(self.texts)

    @cached_property
    def valid(self) -> Mask:
        """Which rows are valid."""
        return self.codes < 0

    @property
    def counts(self) -> Counter[str]:
        """How many rows are invalid for which reason."""
        counts = np.bincount(self.codes[~self.valid], minlength=len(self.texts))
        return Counter(dict(zip(self.texts, counts.tolist(), strict=True)))

    @property
    def invalid(self) -> pa.Array:
        """The reasons of the invalid rows, as texts."""
        return pa.array(self.texts, pa.string()).take(pa.array(self.codes[~self.valid]))


def is_readable(field: Field, kind: pa.DataType) -> bool:
    """Whether a column of a type can be read as a field."""
    return _is_wider(field, kind) or field.type.can_read(kind)


def _is_wider(field: Field, kind: pa.DataType) -> bool:
    """Whether a column of this type may have numbers beyond 32 bits: some writers use no other."""
    return field.type.kind == "int" and bool(pa.types.is_int64(kind) or pa.types.is_uint32(kind))


def is_needed(field: Field, source: SourceType) -> bool:
    """Whether a row without this field is invalid."""
    return field.required or field.name == source.entity.roles.get("field")


def row_checks(
    source: SourceType,
    fields: Iterable[Field],
    columns: Mapping[str, pa.Array],
    times: Mapping[str, pa.Array],
    latest_us: int | None,
) -> Iterator[Check]:
    """What can be wrong with rows, in the order of precedence.

    ``columns`` are those of ``fields`` that are there, of readable types and no dictionaries but of
    texts; ``times`` are the moments that every row must have, all of type :data:`TIMESTAMP`.
    ``latest_us`` is the latest valid start, in microseconds since 1970; None: there is none.
    """
    for name, time in times.items():
        if time.null_count:
            yield f"no {name}", _mask(pc.is_null(time))
    micros = times[TIME_COLUMN].view(pa.int64())
    if len(micros) > micros.null_count:
        # Quicker than to compare all: the earliest and the latest.
        limits = pc.min_max(micros).as_py()
        if limits["min"] < 0:
            yield "time before 1970", _mask(pc.less(micros, 0))
        if latest_us is not None and limits["max"] > latest_us:
            yield "time too far ahead", _mask(pc.greater(micros, latest_us))
    for field in fields:
        column = columns.get(field.column)
        if column is None:
            if is_needed(field, source):
                yield f"no {field.name}", np.ones(len(micros), np.bool_)
            continue
        if _is_wider(field, column.type):
            far = pc.or_(pc.less(column, -_INT_LIMIT), pc.greater_equal(column, _INT_LIMIT))
            yield f"{field.name}: too large for an int", _mask(far)
        elif field.type.kind == "double":
            yield f"{field.name}: not a finite number", not_finite(column)
        if column.null_count and is_needed(field, source):
            yield f"no {field.name}", _mask(pc.is_null(column))


def not_finite(doubles: pa.Array) -> Mask:
    """Which numbers cannot be summed exactly."""
    return _mask(pc.invert(pc.less(pc.abs(doubles), LARGEST_DOUBLE)))


def timestamps(array: pa.Array) -> pa.Array:
    """Moments as :data:`TIMESTAMP`, from any unit; without a zone, they are in UTC.

    Parts of a microsecond are cut off toward 1970; a moment out of range becomes the last in range.
    """
    if pa.types.is_null(array.type):
        return pa.nulls(len(array), TIMESTAMP)
    unit, numbers = array.type.unit, array.view(pa.int64())
    if unit == "ns":
        numbers = pc.divide(numbers, 1000)
    elif unit != "us":
        most = _LONG_MAX // _MICROS[unit]
        numbers = pc.max_element_wise(numbers, -most, skip_nulls=False)
        numbers = pc.min_element_wise(numbers, most, skip_nulls=False)
        numbers = pc.multiply(numbers, _MICROS[unit])
    return numbers.view(TIMESTAMP)


def _mask(array: pa.Array) -> Mask:
    if array.null_count:
        array = pc.fill_null(array, False)
    return np.asarray(array.to_numpy(zero_copy_only=False))
