"""All that a store holds of one run, beside all that the oracle expects of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from batchmill.sources import Grain
from batchmill.store import Store, open_store
from tests.kit.pipelines import stored
from tests.oracle.metrics import expected_metrics
from tests.oracle.script import read_script
from tests.oracle.spans import spans_to_events
from tests.oracle.topn import expected_topn, normalise

Whole = dict[tuple[Any, ...], Any]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NEVER_CAME = {"unresolved_parent": "parent never came", "unresolved_destination": "no destination"}
# How much comes late depends on which rows came before.
_OF_THE_SPLIT = frozenset({"late"})


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


def difference(found: Whole, wanted: Whole, limit: int = 10) -> str:
    """Where the two differ; empty if they do not."""
    lines = [
        f"{key}: {found.get(key, 'missing')!r}, expected {wanted.get(key, 'nothing')!r}"
        for key in sorted(found.keys() | wanted.keys(), key=repr)
        if found.get(key) != wanted.get(key)
    ]
    return "\n".join([*lines[:limit], f"… {len(lines)} in all"]) if lines else ""


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
