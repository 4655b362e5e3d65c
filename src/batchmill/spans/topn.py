"""Finds the slowest statements of each database and cache, and counts how often each text ran.

Records are kept per stream, entity and minute. Keeping the N slowest of a part of the spans is
exact: what is not among them cannot be among the N slowest of all. So a batch is taken in parts,
and what they give is merged.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchmill.aggregate import (
    CACHE_READ,
    CACHE_WRITE,
    DATABASE,
    SERVICE_DATABASE,
    SlowThresholds,
    TopNThresholds,
    normalise,
)
from batchmill.errors import check_int
from batchmill.sources import minute_bucket, service_id

RECORD_SCHEMA = pa.schema(
    [
        ("stream", pa.string()),
        ("entity", pa.string()),
        ("minute", pa.int64()),
        ("latency", pa.int32()),
        ("time_us", pa.int64()),
        ("trace_id", pa.string()),
        ("span_id", pa.string()),
        ("statement", pa.string()),
        ("normalised", pa.string()),
    ]
)
"""A slow statement: where it belongs, how long it took in ms, when it started, and its text."""

STATEMENT_SCHEMA = pa.schema(
    [
        ("stream", pa.string()),
        ("entity", pa.string()),
        ("minute", pa.int64()),
        ("normalised", pa.string()),
        ("runs", pa.int64()),
        ("total_ms", pa.int64()),
    ]
)
"""How often a normalised statement ran, slow or not, and its total time."""

_PLACE = ["stream", "entity", "minute"]
_MICROS_PER_MINUTE = 60_000_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_STREAMS = {None: DATABASE, "Read": CACHE_READ}

_T = TypeVar("_T", bound=Hashable)
_Longs: TypeAlias = npt.NDArray[np.int64]
_Mask: TypeAlias = npt.NDArray[np.bool_]


def topn_records(
    compact: pa.Table, n: int = 50, thresholds: TopNThresholds | None = None
) -> pa.Table:
    """The ``n`` slowest statements of each stream, entity and minute that are above the threshold.

    Equal latencies: the earlier start wins, then the smaller trace id, then the smaller span id.
    Columns: :data:`RECORD_SCHEMA`.
    """
    check_int("n", n, 1)
    calls = _calls(compact)
    calls = calls.filter(pa.array(_is_slow(calls, thresholds or TopNThresholds())))
    executions = _Executions.of(calls)
    kept = _slowest(calls.take(pa.array(executions.rows)), executions.places, n)
    records = calls.take(pa.array(executions.rows[kept]))
    texts = {name: _plain(records[name]) for name in ("trace_id", "span_id", "statement")}
    normalised = [normalise(text) for text in texts["statement"].to_pylist()]
    return pa.table(
        {
            **executions.columns(kept),
            "latency": records["latency"],
            "time_us": records["time"].cast(pa.int64()),
            **texts,
            "normalised": pa.array(normalised, pa.string()),
        },
        schema=RECORD_SCHEMA,
    )


def merge_topn(tables: Sequence[pa.Table], n: int) -> pa.Table:
    """The ``n`` slowest statements of each stream, entity and minute, of several parts' records."""
    check_int("n", n, 1)
    merged = pa.concat_tables([RECORD_SCHEMA.empty_table(), *tables])
    places = _numbers(*(_distinct(merged[name], lambda value: value)[0] for name in _PLACE))
    timed = merged.append_column("time", merged["time_us"])
    return merged.take(pa.array(_slowest(timed, places, n)))


def statement_stats(compact: pa.Table) -> pa.Table:
    """How often each normalised statement ran, slow or not, and its total time.

    Columns: :data:`STATEMENT_SCHEMA`.
    """
    calls = _calls(compact)
    executions = _Executions.of(calls)
    texts, normalised = _distinct(calls["statement"], lambda text: normalise(text or ""))
    runs = pa.table(
        {
            "place": executions.places,
            "text": texts[executions.rows],
            "row": np.arange(len(executions.rows)),
            "latency": calls["latency"].to_numpy().astype(np.int64)[executions.rows],
        }
    )
    counted = runs.group_by(["place", "text"], use_threads=False).aggregate(
        [("row", "min"), ([], "count_all"), ("latency", "sum")]
    )
    return pa.table(
        {
            **executions.columns(counted["row_min"].to_numpy()),
            "normalised": pa.array(normalised, pa.string()).take(counted["text"]),
            "runs": counted["count_all"],
            "total_ms": counted["latency_sum"],
        },
        schema=STATEMENT_SCHEMA,
    )


def merge_statements(tables: Sequence[pa.Table]) -> pa.Table:
    """How often each normalised statement ran in all parts together, and its total time."""
    merged = pa.concat_tables([STATEMENT_SCHEMA.empty_table(), *tables])
    summed = merged.group_by([*_PLACE, "normalised"], use_threads=False).aggregate(
        [("runs", "sum"), ("total_ms", "sum")]
    )
    names = [*_PLACE, "normalised", "runs_sum", "total_ms_sum"]
    return summed.select(names).rename_columns(STATEMENT_SCHEMA.names)


class _Executions(NamedTuple):
    """One row for each call and each stream that it belongs to."""

    rows: _Longs
    """The row of the call."""
    places: _Longs
    """A number of its stream, entity and minute together."""
    codes: tuple[_Longs, _Longs, _Longs]
    """What its stream, entity and minute are in :attr:`values`."""
    values: tuple[list[str], list[str], list[int]]

    @classmethod
    def of(cls, calls: pa.Table) -> _Executions:
        streams, stream_names = _distinct(
            calls["cache_operation"], lambda operation: _STREAMS.get(operation, CACHE_WRITE)
        )
        stores, store_ids = _distinct(calls["store"], lambda name: service_id(name, False))
        services, service_ids = _distinct(calls["service"], lambda name: service_id(name, True))
        minutes, first = np.unique(
            calls["time"].cast(pa.int64()).to_numpy() // _MICROS_PER_MINUTE, return_inverse=True
        )
        # A call of a database counts for the service, too.
        again = np.flatnonzero(_is_database(calls))
        rows = np.concatenate((np.arange(len(calls)), again))
        codes = (
            np.concatenate((streams, np.full(len(again), len(stream_names)))),
            np.concatenate((stores, services[again] + len(store_ids))),
            first[rows],
        )
        buckets = [minute_bucket(_EPOCH + timedelta(minutes=int(minute))) for minute in minutes]
        values = ([*stream_names, SERVICE_DATABASE], [*store_ids, *service_ids], buckets)
        return cls(rows, _numbers(*codes), codes, values)

    def columns(self, rows: _Longs) -> dict[str, pa.Array]:
        """The stream, entity and minute of some of the rows."""
        return {
            name: pa.array(values, RECORD_SCHEMA.field(name).type).take(pa.array(codes[rows]))
            for name, codes, values in zip(_PLACE, self.codes, self.values, strict=True)
        }


def _calls(compact: pa.Table) -> pa.Table:
    """The spans that call a database, or read from or write to a cache."""
    columns = ["latency", "time", "trace_id", "span_id", "statement"]
    calls = compact.select([*columns, "service", "store", "system", "cache_operation"])
    calls = calls.filter(calls["store"].is_valid())
    codes, is_other = _distinct(calls["cache_operation"], lambda operation: operation == "Others")
    if True in is_other:
        calls = calls.filter(pa.array(codes != is_other.index(True)))
    return calls


def _is_database(calls: pa.Table) -> _Mask:
    return calls["cache_operation"].is_null().to_numpy()  # type: ignore[no-any-return]


def _is_slow(calls: pa.Table, thresholds: TopNThresholds) -> _Mask:
    """Which calls took longer than the threshold of their system."""
    limits = np.where(
        _is_database(calls),
        _limits(calls["system"], thresholds.database),
        _limits(calls["system"], thresholds.cache),
    )
    return calls["latency"].to_numpy() > limits  # type: ignore[no-any-return]


def _limits(systems: pa.ChunkedArray, thresholds: SlowThresholds) -> _Longs:
    codes, limits = _distinct(
        systems, lambda name: thresholds.default_ms if name is None else thresholds.of(name)
    )
    return np.array(limits, np.int64)[codes]


def _slowest(calls: pa.Table, places: _Longs, n: int) -> _Longs:
    """The rows of the ``n`` slowest calls of each place, slowest first."""
    negative = -calls["latency"].to_numpy().astype(np.int64)
    times = calls["time"].cast(pa.int64()).to_numpy()
    order = np.lexsort((times, negative, places))
    position, starts = _positions(places[order])
    # Those beyond n may still be as slow, and have started as early, as the last one of the n.
    last = order[np.minimum(starts + n - 1, len(order) - 1)]
    equal = (negative[order] == negative[last]) & (times[order] == times[last])
    order = order[(position < n) | equal]
    few = calls.take(pa.array(order))
    keys = {"place": places[order], "latency": negative[order], "time": times[order]}
    keys |= {name: _plain(few[name]) for name in ("trace_id", "span_id", "statement")}
    exact = pc.sort_indices(pa.table(keys), [(name, "ascending") for name in keys]).to_numpy()
    order = order[exact]
    return order[_positions(places[order])[0] < n]  # type: ignore[no-any-return]


def _positions(groups: _Longs) -> tuple[_Longs, _Longs]:
    """The position of each row in its group, and where the group starts; rows lie by group."""
    begins = np.flatnonzero(np.diff(groups, prepend=-1))
    starts = np.repeat(begins, np.diff(begins, append=len(groups)))
    return np.arange(len(groups)) - starts, starts


def _distinct(column: pa.ChunkedArray, derive: Callable[[Any], _T]) -> tuple[_Longs, list[_T]]:
    """What ``derive`` makes of each value: the number of each row's result, and the results.

    It is called once for each distinct value, null among them; each result has one number.
    """
    array = column.combine_chunks()
    if not pa.types.is_dictionary(array.type):
        array = array.dictionary_encode()
    size = len(array.dictionary)
    codes = array.indices.fill_null(size).to_numpy().astype(np.int64)
    # A dictionary may have values that no row has.
    used = np.flatnonzero(np.bincount(codes, minlength=size + 1))
    values = array.dictionary.take(pa.array(used[used < size])).to_pylist()
    numbers: dict[_T, int] = {}
    renumbered = np.zeros(size + 1, np.int64)
    renumbered[used] = [
        numbers.setdefault(derive(value), len(numbers)) for value in [*values, None][: len(used)]
    ]
    return renumbered[codes], list(numbers)


def _numbers(*columns: _Longs) -> _Longs:
    """One number for each combination of numbers, none of which is left out."""
    result = columns[0]
    for codes in columns[1:]:
        if len(codes):
            result = np.unique(result * (codes.max() + 1) + codes, return_inverse=True)[1]
    return result


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column of texts, in which null is an empty text."""
    return column.cast(pa.string()).fill_null("")
