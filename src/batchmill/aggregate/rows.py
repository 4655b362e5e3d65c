"""Evaluates the paths, conditions and keys of the metric language on rows that are Arrow columns.

A path gives an Arrow array, null where any step of it is null. A test gives a mask that is true
where it holds. Everything is evaluated at most once for a batch of rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchmill.aggregate.columns import (
    Longs,
    Mask,
    Numbers,
    as_texts,
    cast,
    log_buckets,
    truncated,
)
from batchmill.aggregate.plan import (
    DEFAULT_APDEX_MS,
    MOST_MS,
    Key,
    Part,
    SourcePlan,
    Test,
    Where,
    top_column,
)
from batchmill.aggregate.validity import (
    TIMESTAMP,
    Reasons,
    is_readable,
    not_finite,
    row_checks,
    timestamps,
)
from batchmill.errors import ConfigError
from batchmill.oal import ApdexCount, Condition, MapKey, Path
from batchmill.sources import TIME_COLUMN

_WHOLE_NUMBER = re.compile(r"([+-]?)0*([0-9]{1,19})")
_LIMITS = {"int": 2**31, "long": 2**63}
_LIMB = float(1 << 30)
_MINUTE_US = 60_000_000
_COMPARE: Mapping[str, Callable[..., Any]] = {
    "==": pc.equal,
    "!=": pc.not_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
    "<": pc.less,
    "<=": pc.less_equal,
}


@dataclass(frozen=True)
class RowCheck:
    """The valid rows of a batch, and why the others are invalid."""

    rows: Rows
    reasons: Reasons


def check(table: pa.Table, plan: SourcePlan, latest_us: int | None) -> RowCheck:
    """Sort out rows that no metric can count: without a time, a required number, or an entity's id.

    ``latest_us`` is the latest valid start, in microseconds since 1970; None: there is none. Raises
    :class:`ConfigError` for a column that cannot be read as the event type's.
    """
    given = {column.name for column in table.schema if not pa.types.is_null(column.type)}
    columns = {
        field.column: _one_array(table[field.column])
        for field in plan.fields
        if field.column in given
    }
    for field in plan.fields:
        column = columns.get(field.column)
        if column is not None and not is_readable(field, column.type):
            raise _wrong_type(field.column, column.type, str(field.type), plan)
    time = _time(_one_array(table[TIME_COLUMN]) if TIME_COLUMN in given else None, plan, table)
    micros = _filled(time.view(pa.int64()))
    reasons = Reasons.of(
        chain(
            row_checks(plan.source, plan.fields, columns, {TIME_COLUMN: time}, latest_us),
            _nested_checks(Rows(columns, micros, plan), plan),
        ),
        table.num_rows,
    )
    if reasons:
        kept = pa.array(reasons.valid)
        columns = {name: column.filter(kept) for name, column in columns.items()}
        micros = micros[reasons.valid]
    _fill_micros(columns, plan)
    return RowCheck(Rows(columns, micros // _MINUTE_US, plan), reasons)


def _fill_micros(columns: dict[str, pa.Array], plan: SourcePlan) -> None:
    """Durations in microseconds from those in milliseconds, where rows have only these."""
    for field in plan.fields:
        given = columns.get(field.column)
        if field.micros_of and (given is None or given.null_count):
            ms = cast(columns[plan.source.fields[field.micros_of].column], pa.int64())
            ms = pc.min_element_wise(pc.max_element_wise(ms, -MOST_MS), MOST_MS)
            micros = pc.multiply(ms, 1000)
            columns[field.column] = (
                micros if given is None else pc.coalesce(cast(given, pa.int64()), micros)
            )


def _nested_checks(rows: Rows, plan: SourcePlan) -> Iterator[tuple[str, Mask]]:
    for path in plan.nested_doubles:
        yield f"{path}: not a finite number", not_finite(rows.path(path))


class Rows:
    """Valid rows of one event type, for which anything can be evaluated."""

    def __init__(self, columns: Mapping[str, pa.Array], minutes: Longs, plan: SourcePlan) -> None:
        self.minutes = minutes
        """The minute of each row by its own start, counted from 1970."""
        self._columns = columns
        self._apdex_ms = plan.apdex_ms
        self._paths: dict[Path, pa.Array] = {}
        self._tests: dict[Test, Mask] = {}
        self._wheres: dict[Where, Mask | None] = {}

    def __len__(self) -> int:
        return len(self.minutes)

    def role(self, name: str) -> pa.Array:
        """A column that identifies entities, maybe as a dictionary; all null if there is none."""
        if name not in self._columns:
            return pa.nulls(len(self), pa.string())
        return self._columns[name]

    def path(self, path: Path) -> pa.Array:
        """The value at a path."""
        if path not in self._paths:
            self._paths[path] = self._evaluate(path)
        return self._paths[path]

    def where(self, tests: Where) -> Mask | None:
        """Which rows meet all tests; None: all rows."""
        if tests not in self._wheres:
            met: Mask | None = None
            for test in tests:
                met = both(met, self._test(test))
            self._wheres[tests] = None if met is not None and met.all() else met
        return self._wheres[tests]

    def number(self, path: Path, part: Part) -> tuple[Numbers, Mask | None]:
        """Part of a number of each row, and where there is one; None: everywhere."""
        array = self.path(path)
        valid = is_valid(array)
        values = _filled(array)
        if part == "value":
            # Of 0.0 and -0.0, which are equal, either might be the maximum.
            return (values + 0.0 if path.type.kind == "double" else values), valid
        if path.type.kind != "double":
            whole = values.astype(np.int64, copy=False)
            return (whole >> 32 if part == "upper" else whole & 0xFFFFFFFF), valid
        whole = np.trunc(values)
        if part in ("upper", "lower"):
            bits = whole.astype(np.int64)
            return (bits >> 32 if part == "upper" else bits & 0xFFFFFFFF), valid
        # Rounded toward zero, so that each remainder is exact, also of a negative number.
        for _ in range(int(part[-1])):
            values = (values - whole) * _LIMB
            whole = np.trunc(values)
        return whole.astype(np.int64), valid

    def bucket(self, key: Key) -> tuple[Longs, Mask | None]:
        """The bucket of each row's number, and where there is one."""
        assert key.width is not None
        values, valid = self.number(key.value, "value")
        values = values.astype(np.int64, copy=False)
        if key.log:
            return log_buckets(values), valid
        return (values if key.width == 1 else truncated(values, key.width)), valid

    def label(self, path: Path) -> pa.DictionaryArray:
        """The label of each row, as a dictionary that has each text once."""
        column = self._plain_texts(path)
        if column is not None and len(column.dictionary.unique()) == len(column.dictionary):
            return as_texts(column)
        return cast(self.path(path), pa.string()).dictionary_encode()

    def _test(self, test: Test) -> Mask:
        if test not in self._tests:
            if isinstance(test, ApdexCount):
                self._tests[test] = self._apdex(test)
            else:
                self._tests[test] = self._condition(test)
        return self._tests[test]

    def _plain_texts(self, path: Path) -> pa.DictionaryArray | None:
        """The column of a path if it is a dictionary, and no text of it is null."""
        column = self._columns.get(top_column(path))
        if len(path.parts) > 1 or path.cast is not None or column is None:
            return None
        is_encoded = pa.types.is_dictionary(column.type) and not column.dictionary.null_count
        return column if is_encoded else None

    def _condition(self, condition: Condition) -> Mask:
        path = condition.path
        column = self._plain_texts(path)
        if column is not None and not column.indices.null_count:
            texts = cast(column.dictionary, path.type.arrow_type())
            met: Mask = _mask(_condition(condition, texts))[column.indices.to_numpy()]
            return met
        return _mask(_condition(condition, self.path(path)))

    def _apdex(self, state: ApdexCount) -> Mask:
        value = self.path(state.value)
        status = _mask(self.path(state.status))
        limits: Any = DEFAULT_APDEX_MS
        if self._apdex_ms:
            names = self.path(state.name).dictionary_encode(null_encoding="encode")
            known = names.dictionary.to_pylist()
            by_name = [self._apdex_ms.get(name, DEFAULT_APDEX_MS) for name in known]
            limits = np.asarray(by_name, np.int64)[names.indices.to_numpy()]
        ms = _filled(value)
        within = ms <= limits if state.which == "satisfied" else (ms > limits) & (ms <= 4 * limits)
        met = both(within & status, is_valid(value))
        assert met is not None
        return met

    def _evaluate(self, path: Path) -> pa.Array:
        array = self._columns.get(top_column(path))
        for part in path.parts[1:]:
            if array is None:
                break
            if isinstance(part, MapKey):
                array = pc.map_lookup(array, pa.scalar(part.key, array.type.key_type), "first")
            else:
                member = array.type.get_field_index(part)
                array = None if member < 0 else pc.struct_field(array, [member])
        kind = pa.string() if path.cast else path.type.arrow_type()
        array = pa.nulls(len(self), kind) if array is None else cast(array, kind)
        return array if path.cast is None else read_whole(array, path.cast)


def _condition(condition: Condition, array: pa.Array) -> pa.Array:
    """Where a condition holds; null counts as false."""
    literal = condition.literal
    if literal is None:
        return pc.is_null(array) if condition.op == "==" else pc.is_valid(array)
    if condition.op == "in":
        assert isinstance(literal, tuple)
        values = [_comparable(value, array.type) for value in literal if _fits(value, array.type)]
        return pc.is_in(array, pa.array(values, array.type), skip_nulls=True)
    if condition.op == "like":
        return _like(array, str(literal))
    if condition.op in ("contain", "not contain"):
        contains = _contains(array, literal)
        if condition.op == "contain":
            return contains
        return pc.and_(pc.is_valid(array), pc.invert(contains))
    assert not isinstance(literal, tuple)
    if isinstance(literal, int) and not _fits(literal, array.type):
        # No value reaches it: greater than all of them, or less.
        holds = condition.op in (("!=", "<", "<=") if literal > 0 else ("!=", ">", ">="))
        return pc.is_valid(array) if holds else _nowhere(array)
    return _COMPARE[condition.op](array, pa.scalar(_comparable(literal, array.type), array.type))


def _fits(value: object, kind: pa.DataType) -> bool:
    """Whether a literal is within the range of a type."""
    if not pa.types.is_integer(kind):
        return True
    return isinstance(value, int) and -(1 << kind.bit_width - 1) <= value < 1 << kind.bit_width - 1


def _comparable(value: object, kind: pa.DataType) -> object:
    """A literal as a value of a type; a number is rounded to a double as databases do."""
    return float(value) if pa.types.is_floating(kind) and isinstance(value, int) else value


def _like(array: pa.Array, pattern: str) -> pa.Array:
    head, tail = pattern.startswith("%"), pattern.endswith("%")
    if pattern in ("%", "%%"):
        return pc.is_valid(array)
    text = pattern[1 if head else 0 : -1 if tail else None]
    if head and tail:
        return pc.match_substring(array, text)
    if head:
        return pc.ends_with(array, text)
    return pc.starts_with(array, text) if tail else _nowhere(array)


def _nowhere(array: pa.Array) -> pa.Array:
    return pa.array(np.zeros(len(array), np.bool_))


def _contains(array: pa.Array, literal: object) -> pa.Array:
    """Which lists have an item."""
    lengths = _filled(pc.list_value_length(array))
    hits = _mask(pc.equal(pc.list_flatten(array), pa.scalar(literal)))
    contains = np.zeros(len(array), np.bool_)
    contains[np.repeat(np.arange(len(array)), lengths)[hits]] = True
    return pa.array(contains)


def read_whole(array: pa.Array, cast: str) -> pa.Array:
    """Texts as whole numbers; null for a text that is not one, or is too large."""
    limit = _LIMITS[cast]
    encoded = array.dictionary_encode()

    def read(text: str) -> int | None:
        digits = _WHOLE_NUMBER.fullmatch(text)
        number = int(digits[1] + digits[2]) if digits else limit
        return number if -limit <= number < limit else None

    numbers = pa.array([read(text) for text in encoded.dictionary.to_pylist()], pa.int64())
    return numbers.take(encoded.indices)


def _time(time: pa.Array | None, plan: SourcePlan, table: pa.Table) -> pa.Array:
    """Starts, null where there is none."""
    if time is None:
        return pa.nulls(table.num_rows, TIMESTAMP)
    if pa.types.is_int64(time.type):
        return time.view(TIMESTAMP)
    if not pa.types.is_timestamp(time.type):
        raise _wrong_type(TIME_COLUMN, time.type, "a timestamp", plan)
    return timestamps(time)


def _wrong_type(column: str, actual: pa.DataType, wanted: str, plan: SourcePlan) -> ConfigError:
    wish = f"a table with the columns of {plan.source.name}; {column} is {wanted}"
    return ConfigError("rows", f"column {column}: {actual}", wish)


def _one_array(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """A column in one piece; no dictionary but of texts."""
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    is_encoded = pa.types.is_dictionary(column.type) and not is_text(column.type.value_type)
    return column.dictionary_decode() if is_encoded else column


def is_text(kind: pa.DataType) -> bool:
    """Whether values of a type are texts."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def is_valid(array: pa.Array) -> Mask | None:
    """Where there is a value; None: everywhere."""
    return _mask(pc.is_valid(array)) if array.null_count else None


def both(one: Mask | None, other: Mask | None) -> Mask | None:
    """Where both masks are true; None is true everywhere."""
    if one is None or other is None:
        return one if other is None else other
    return one & other


def _filled(array: pa.Array) -> Numbers:
    """Numbers, with 0 where there is none."""
    if array.null_count:
        array = pc.fill_null(array, 0)
    return np.asarray(array.to_numpy(zero_copy_only=False))


def _mask(array: pa.Array | pa.ChunkedArray) -> Mask:
    array = _one_array(array)
    if array.null_count:
        array = pc.fill_null(array, False)
    return np.asarray(array.to_numpy(zero_copy_only=False))
