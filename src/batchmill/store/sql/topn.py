"""The N slowest calls of each entity and bucket, and how often each statement ran."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from batchmill.sources import Grain
from batchmill.store.sql.entities import clean
from batchmill.store.sql.session import Row, Session, Statement
from batchmill.store.ttl import day_of, roll
from batchmill.store.types import StatementRow, TopNRow

COLUMNS = (
    *("stream", "grain", "bucket", "entity"),
    *("latency", "time_us", "trace_id", "span_id", "statement", "digest"),
)
RANKING = "latency DESC, time_us, trace_id, span_id, digest, statement"
"""Slowest first; of equals the earlier, then the smaller ids. The last two only make it total."""
EXPIRED_TOPN = "expired records"
EXPIRED_STATEMENTS = "expired statements"


def digest(normalised: str) -> str:
    """What stands for a normalised statement in a key."""
    return hashlib.md5(
        normalised.encode("utf-8", "surrogatepass"), usedforsecurity=False
    ).hexdigest()


def keep_slowest(
    rows: Iterable[TopNRow], keys: Sequence[int], top_n: int, cutoff: int
) -> tuple[list[Row], dict[str, int]]:
    """Rows of the table for all three grains, the N slowest of each place; those too old, counted.

    The batch alone is cut here, so that an hour's records are not all written to be removed.
    """
    places: dict[tuple[str, str, int, int], list[Row]] = {}
    expired: dict[str, int] = {}
    for row in rows:
        if day_of(Grain.MINUTE, row.minute) < cutoff:
            expired[row.stream] = expired.get(row.stream, 0) + 1
            continue
        rest = (
            *(row.latency, row.time_us, clean(row.trace_id), clean(row.span_id)),
            *(clean(row.statement), digest(row.normalised)),
        )
        for grain in Grain:
            place = (row.stream, grain.value, roll(grain, row.minute), keys[row.entity])
            places.setdefault(place, []).append(rest)
    kept = []
    for place in sorted(places):
        found = sorted(places[place], key=_rank)[:top_n]
        kept += [(*place, *rest) for rest in found]
    return kept, expired


def store_topn(session: Session, kept: Sequence[Row], top_n: int) -> None:
    """Insert records, and remove what is no longer among the slowest of its place."""
    if not kept:
        return
    dialect = session.dialect
    kinds = {"bucket", "entity", "latency", "time_us"}
    types = tuple(dialect.whole if name in kinds else dialect.text for name in COLUMNS)
    session.upsert(Statement("topn", COLUMNS, types, (), ""), list(zip(*kept, strict=True)))
    beyond = (
        f"SELECT {dialect.row_id} FROM topn WHERE stream = ? AND grain = ? AND bucket = ? "
        f"AND entity = ? ORDER BY {RANKING} LIMIT {dialect.all_rows} OFFSET ?"
    )
    places = dict.fromkeys(each[:4] for each in kept)
    session.run_many(
        f"DELETE FROM topn WHERE {dialect.row_among(beyond)}",
        [(*place, top_n) for place in places],
    )


def store_statements(
    session: Session, rows: Iterable[StatementRow], keys: Sequence[int], cutoff: int
) -> dict[str, int]:
    """Add up runs and time of statements in all three grains; how many were too old."""
    totals: dict[tuple[str, str, int, int, str], list[int]] = {}
    texts: dict[str, str] = {}
    expired: dict[str, int] = {}
    for row in rows:
        if day_of(Grain.MINUTE, row.minute) < cutoff:
            expired[row.stream] = expired.get(row.stream, 0) + 1
            continue
        mark = digest(row.normalised)
        texts[mark] = clean(row.normalised)
        for grain in Grain:
            bucket = roll(grain, row.minute)
            total = totals.setdefault(
                (row.stream, grain.value, bucket, keys[row.entity], mark), [0, 0]
            )
            total[0] += row.runs
            total[1] += row.total_ms
    if totals:
        order = sorted(totals)
        dialect = session.dialect
        text, whole = dialect.text, dialect.whole
        statement = Statement(
            "statement",
            (*COLUMNS[:4], "digest", "normalised", "runs", "total_ms"),
            (text, text, whole, whole, text, text, whole, whole),
            (*COLUMNS[:4], "digest"),
            "ON CONFLICT (stream, grain, bucket, entity, digest) DO UPDATE SET "
            "runs = kept.runs + excluded.runs, total_ms = kept.total_ms + excluded.total_ms",
        )
        keyed = list(zip(*order, strict=True))
        session.upsert(
            statement,
            (
                *keyed,
                [texts[place[4]] for place in order],
                [totals[place][0] for place in order],
                [totals[place][1] for place in order],
            ),
        )
    return expired


def _rank(rest: Row) -> tuple[object, ...]:
    latency, time_us, trace_id, span_id, statement, mark = rest
    # As both databases compare text here: byte by byte.
    return (-latency, time_us, trace_id.encode(), span_id.encode(), mark, statement.encode())
