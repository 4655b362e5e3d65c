"""Finds the slowest statements of each database and cache, and counts how often each text ran.

Records are kept per stream, entity and minute. Keeping the N slowest of a part of the spans is
exact: what is not among them cannot be among the N slowest of all. So a batch is taken in parts,
and what they give is merged.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple, TypeVar

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
from batchmill.spans.texts import Longs, Mask, Texts

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
_MOST_NUMBERS = 1 << 62
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_STREAMS = {None: DATABASE, "Read": CACHE_READ}

_T = TypeVar("_T", bound=Hashable)


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
    minutes = np.unique(merged["minute"].to_numpy(), return_inverse=True)[1]
    places = _numbers(Texts.of(merged["stream"]).codes, Texts.of(merged["entity"]).codes, minutes)
    timed = merged.append_column("time", merged["time_us"])
    return merged.take(pa.array(_slowest(timed, places, n)))


def statement_stats(compact: pa.Table) -> pa.Table:
    """How often each normalised statement ran, slow or not, and its total time.

    Columns: :data:`STATEMENT_SCHEMA`.
    """
    calls = _calls(compact)
    executions = _Executions.of(calls)
    texts, normalised = _derived(calls["statement"], lambda text: normalise(text or ""))
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

    rows: Longs
    """The row of the call."""
    places: Longs
    """A number of its stream, entity and minute together."""
    codes: tuple[Longs, Longs, Longs]
    """What its stream, entity and minute are in :attr:`values`."""
    values: tuple[list[str], list[str], list[int]]

    @classmethod
    def of(cls, calls: pa.Table) -> _Executions:
        streams, stream_names = _derived(
            calls["cache_operation"], lambda operation: _STREAMS.get(operation, CACHE_WRITE)
        )
        stores, store_ids = _derived(calls["store"], lambda name: service_id(name, False))
        services, service_ids = _derived(calls["service"], lambda name: service_id(name, True))
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

    def columns(self, rows: Longs) -> dict[str, pa.Array]:
        """The stream, entity and minute of some of the rows."""
        return {
            name: pa.array(values, RECORD_SCHEMA.field(name).type).take(pa.array(codes[rows]))
            for name, codes, values in zip(_PLACE, self.codes, self.values, strict=True)
        }


def _calls(compact: pa.Table) -> pa.Table:
    """The spans that call a database, or read from or write to a cache."""
    columns = ["latency", "time", "trace_id", "span_id", "statement"]
    calls = compact.select([*columns, "service", "store", "system", "cache_operation"])
    other = Texts.of(calls["cache_operation"]).one_of("Others")
    return calls.filter(pa.array(Texts.of(calls["store"]).present & ~other))


def _is_database(calls: pa.Table) -> Mask:
    return ~Texts.of(calls["cache_operation"]).present


def _is_slow(calls: pa.Table, thresholds: TopNThresholds) -> Mask:
    """Which calls took longer than the threshold of their system."""
    limits = np.where(
        _is_database(calls),
        _limits(calls["system"], thresholds.database),
        _limits(calls["system"], thresholds.cache),
    )
    return calls["latency"].to_numpy() > limits  # type: ignore[no-any-return]


def _limits(systems: pa.ChunkedArray, thresholds: SlowThresholds) -> Longs:
    codes, limits = _derived(
        systems, lambda name: thresholds.default_ms if name is None else thresholds.of(name)
    )
    return np.array(limits, np.int64)[codes]


def _slowest(calls: pa.Table, places: Longs, n: int) -> Longs:
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


def _positions(groups: Longs) -> tuple[Longs, Longs]:
    """The position of each row in its group, and where the group starts; rows lie by group."""
    begins = np.flatnonzero(np.diff(groups, prepend=-1))
    starts = np.repeat(begins, np.diff(begins, append=len(groups)))
    return np.arange(len(groups)) - starts, starts


def _derived(column: pa.ChunkedArray, derive: Callable[[Any], _T]) -> tuple[Longs, list[_T]]:
    """What ``derive`` makes of each text: the number of each row's result, and the results.

    It is called once for each distinct text, and for null; each result has one number.
    """
    texts = Texts.of(column).used()
    numbers: dict[_T, int] = {}
    codes = [
        numbers.setdefault(derive(text), len(numbers))
        for text in (*texts.values.to_pylist(), *([] if texts.is_complete else [None]))
    ]
    # The last one is at place -1.
    return np.array(codes, np.int64)[texts.codes], list(numbers)


def _numbers(*columns: npt.NDArray[Any]) -> Longs:
    """One number for each combination of numbers, which are not negative."""
    result, size = columns[0].astype(np.int64), int(columns[0].max(initial=0)) + 1
    for codes in columns[1:]:
        more = int(codes.max(initial=0)) + 1
        if size * more > _MOST_NUMBERS:
            distinct, result = np.unique(result, return_inverse=True)
            size = len(distinct)
        result = result * more + codes
        size *= more
    return result


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column of texts, in which null is an empty text."""
    return column.cast(pa.string()).fill_null("")
