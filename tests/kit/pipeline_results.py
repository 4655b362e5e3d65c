"""What a store holds after a run, beside what the oracle expects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchmill.sources import Grain
from batchmill.store import Store, TopRecord, open_store
from tests.kit.pipelines import EVERY_FUNCTION, SMALL
from tests.kit.stores import all_states
from tests.oracle.catalog import Row
from tests.oracle.metrics import expected_metrics
from tests.oracle.script import read_script
from tests.oracle.spans import spans_to_events
from tests.oracle.topn import TopN, TopNKey, expected_topn, normalise

Stored = dict[tuple[str, str, int, str], Any]
"""Metric, grain, bucket and entity id to value."""
States = dict[tuple[Any, ...], tuple[Any, ...]]
Tops = dict[tuple[str, str, int, str], list[tuple[Any, ...]]]
Whole = dict[tuple[Any, ...], Any]
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NEVER_CAME = {"unresolved_parent": "parent never came", "unresolved_destination": "no destination"}
# How much comes late depends on which rows came before.
_OF_THE_SPLIT = frozenset({"late"})


def stored(store: Store | str) -> Stored:
    """Every value that a store holds."""
    if isinstance(store, str):
        with open_store(store) as opened:
            return stored(opened)
    return {
        (metric.name, grain.value, value.bucket, value.entity_id): value.value
        for metric in store.metrics()
        for grain in Grain
        for value in store.values(metric, grain=grain)
    }


def expected(events: Mapping[str, Sequence[Any]], oal: str = EVERY_FUNCTION) -> Stored:
    """Every value that the oracle expects."""
    return dict(expected_metrics(oal, {name: list(rows) for name, rows in events.items()}))  # type: ignore[arg-type]


def expected_of(rows: Sequence[Row], oal: str = SMALL) -> Stored:
    """What the oracle expects of rows of Endpoint."""
    return expected({"Endpoint": rows}, oal)


def differences(found: Mapping[Any, Any], wanted: Mapping[Any, Any], limit: int = 10) -> list[str]:
    """Where two results differ; empty if they do not."""
    lines = [
        f"{key}: {found.get(key, 'missing')!r}, expected {wanted.get(key, 'nothing')!r}"
        for key in sorted(found.keys() | wanted.keys(), key=repr)
        if found.get(key) != wanted.get(key)
    ]
    return [*lines[:limit], f"… {len(lines)} in all"] if lines else []


def contents(store: Store | str) -> tuple[States, Stored]:
    """All states and all values that a store holds."""
    if isinstance(store, str):
        with open_store(store) as opened:
            return contents(opened)
    return all_states(store), stored(store)


def counted(store: Store, what: str) -> dict[tuple[str, str], int]:
    """One kind of counter, by source and reason."""
    return {key[1:]: n for key, n in store.counters().items() if key[0] == what}


def top_of(store: Store) -> Tops:
    """Every TopN list of a store, in its order."""
    found: Tops = {}
    for stream in store.top_streams():
        for grain in Grain:
            for each in store.top(stream, grain=grain):
                key = (stream, grain.value, each.bucket, each.entity_id)
                found.setdefault(key, []).append(_record(each))
    return found


def _record(each: TopRecord) -> tuple[Any, ...]:
    return (each.statement, each.latency, each.trace_id, each.runs, each.total_ms)


def top_expected(tops: Mapping[TopNKey, TopN]) -> Tops:
    """The same of the oracle."""
    return {
        key: [
            (each.statement, each.latency, each.trace_id, *top.runs[normalise(each.statement)])
            for each in top.records
        ]
        for key, top in tops.items()
    }


def whole(url: str) -> Whole:
    """Every value, TopN record and counter of a store; keys say which."""
    with open_store(url, create=False) as store:
        return {
            **{("metric", *key): value for key, value in stored(store).items()},
            **_top(store),
            **{
                ("counter", *key): count
                for key, count in store.counters().items()
                if key[0] not in _OF_THE_SPLIT
            },
        }


def expected_whole(oal: str, events: Mapping[str, Sequence[Any]]) -> Whole:
    """What :func:`whole` must be once these rows, those of ``Span`` included, are all in."""
    spans = events.get("Span", ())
    given = spans_to_events(spans)
    wanted = {metric.source for metric in read_script(oal)}
    rows = {source: [*events.get(source, ()), *given.events.get(source, ())] for source in wanted}
    expected: Whole = {
        ("metric", *key): value for key, value in expected_metrics(oal, rows).items()
    }
    for key, top in expected_topn(spans).items():
        for rank, record in enumerate(top.records, 1):
            ran = top.runs[normalise(record.statement)]
            expected["top", *key, rank] = (
                record.latency,
                (record.time - _EPOCH) // timedelta(microseconds=1),
                record.trace_id,
                record.statement,
                ran.times,
                ran.total_ms,
            )
    counts = {("rows", source, ""): len(found) for source, found in rows.items()}
    counts["rows", "Span", ""] = len(spans)
    for counter, reason in _NEVER_CAME.items():
        counts["unresolved", "Span", reason] = given.counters[counter]
    return expected | {("counter", *key): count for key, count in counts.items() if count}


def _top(store: Store) -> Whole:
    return {
        ("top", stream, grain.value, each.bucket, each.entity_id, each.rank): (
            each.latency,
            each.time_us,
            each.trace_id,
            each.statement,
            each.runs,
            each.total_ms,
        )
        for stream in store.top_streams()
        for grain in Grain
        for each in store.top(stream, grain=grain)
    }


def quarantined(folder: Path) -> dict[str, str]:
    """The segments in a quarantine, each with its reason."""
    return {
        path.name.removesuffix(".reason"): path.read_text("utf-8").partition(":")[0]
        for path in folder.glob("*/*.reason")
    }


def quarantined_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows in a quarantine, each with its ``_reason``."""
    files: Iterable[Path] = sorted(folder.glob("*/rows-*/*.parquet"))
    moments = pa.timestamp("us", tz="UTC")
    rows = []
    for file in files:
        table = pq.read_table(file, coerce_int96_timestamp_unit="us")
        time = table["time"].cast(pa.timestamp("us")).cast(moments)
        rows += table.set_column(table.column_names.index("time"), "time", time).to_pylist()
    return rows
