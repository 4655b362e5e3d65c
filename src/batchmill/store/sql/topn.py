"""TopN: the N slowest calls of each entity and bucket, and how often each statement ran."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from batchmill.sources import Grain
from batchmill.store.batch import StatementRow, TopNRow
from batchmill.store.buckets import Buckets, bucket_of, day_of
from batchmill.store.results import TopRecord
from batchmill.store.sql.entities import replace_nul
from batchmill.store.sql.session import (
    MAX_LISTED_BUCKETS,
    MAX_ROWS,
    Condition,
    Row,
    Session,
    Upsert,
    sum_expressions,
)

COLUMNS = (
    *("stream", "grain", "bucket", "entity"),
    *("latency", "time_us", "trace_id", "span_id", "statement", "digest"),
)
RANKING = ("latency DESC", "time_us", "trace_id", "span_id", "digest", "statement")
"""Slowest first; of equals the earlier, then the smaller ids. The last two make the order total."""
EXPIRED_TOPN = "expired records"
EXPIRED_STATEMENTS = "expired statements"

_RANKED = ", ".join(f"t.{column}" for column in RANKING)
_JOINED = (
    "JOIN entity AS e ON e.key = t.entity "
    "LEFT JOIN statement AS s ON s.stream = t.stream AND s.grain = t.grain "
    "AND s.bucket = t.bucket AND s.entity = t.entity AND s.digest = t.digest"
)
_RECORD = (
    "t.latency, t.time_us, t.trace_id, t.span_id, t.statement, "
    "coalesce(s.normalised, ''), coalesce(s.runs, 0), coalesce(s.total_ms, 0)"
)


def digest(normalised: str) -> str:
    """Stands for a normalised statement in a key."""
    return hashlib.md5(
        normalised.encode("utf-8", "surrogatepass"), usedforsecurity=False
    ).hexdigest()


@dataclass(frozen=True, slots=True)
class Slowest:
    """The slow calls of a batch that may be among the slowest."""

    records: list[Row]
    """Rows of the table, for all three grains."""
    expired: Counter[str]
    """How many were too old, by TopN stream."""


def select_slowest(
    rows: Iterable[TopNRow], keys: Sequence[int], top_n: int, cutoff: int
) -> Slowest:
    """The N slowest of each stream, bucket and entity.

    Of the batch alone, so that an hour's records are not all written just to be removed.
    """
    places: dict[Row, list[Row]] = {}
    expired: Counter[str] = Counter()
    for row in rows:
        if day_of(Grain.MINUTE, row.minute) < cutoff:
            expired[row.stream] += 1
            continue
        record = (
            *(row.latency, row.time_us, replace_nul(row.trace_id), replace_nul(row.span_id)),
            *(replace_nul(row.statement), digest(row.normalised)),
        )
        for grain in Grain:
            place = (row.stream, grain.value, bucket_of(grain, row.minute), keys[row.entity])
            places.setdefault(place, []).append(record)
    records = [
        (*place, *record)
        for place in sorted(places)
        for record in sorted(places[place], key=_rank)[:top_n]
    ]
    return Slowest(records, expired)


def store_topn(session: Session, records: Sequence[Row], top_n: int) -> None:
    """Insert records, and remove those that are no longer among the slowest."""
    if not records:
        return
    # Who removes what is not among the slowest must see what all others have inserted.
    session.lock_slots(record[3] for record in records)
    dialect = session.dialect
    whole = {"bucket", "entity", "latency", "time_us"}
    types = tuple(dialect.whole if name in whole else dialect.text for name in COLUMNS)
    session.upsert(Upsert("topn", COLUMNS, types, (), ""), list(zip(*records, strict=True)))
    beyond = (
        f"SELECT {dialect.row_id} FROM topn WHERE stream = ? AND grain = ? AND bucket = ? "
        f"AND entity = ? ORDER BY {', '.join(RANKING)} LIMIT {dialect.all_rows} OFFSET ?"
    )
    places = dict.fromkeys(record[:4] for record in records)
    session.run_many(
        f"DELETE FROM topn WHERE {dialect.row_id_in(beyond)}",
        [(*place, top_n) for place in places],
    )


def store_statements(
    session: Session, rows: Iterable[StatementRow], keys: Sequence[int], cutoff: int
) -> Counter[str]:
    """Add up runs and time of statements in all three grains; how many were too old, by stream."""
    totals: dict[tuple[str, str, int, int, str], list[int]] = {}
    texts: dict[str, str] = {}
    expired: Counter[str] = Counter()
    for row in rows:
        if day_of(Grain.MINUTE, row.minute) < cutoff:
            expired[row.stream] += 1
            continue
        mark = digest(row.normalised)
        texts[mark] = replace_nul(row.normalised)
        for grain in Grain:
            bucket = bucket_of(grain, row.minute)
            total = totals.setdefault(
                (row.stream, grain.value, bucket, keys[row.entity], mark), [0, 0]
            )
            total[0] += row.runs
            total[1] += row.total_ms
    if totals:
        order = sorted(totals)
        text, whole = session.dialect.text, session.dialect.whole
        upsert = Upsert.merging(
            "statement",
            {"stream": text, "grain": text, "bucket": whole, "entity": whole, "digest": text},
            {"normalised": text, "runs": whole, "total_ms": whole},
            sum_expressions("runs", "total_ms"),
        )
        session.upsert(
            upsert,
            (
                *zip(*order, strict=True),
                [texts[place[4]] for place in order],
                [totals[place][0] for place in order],
                [totals[place][1] for place in order],
            ),
        )
    return expired


def read_top(
    session: Session, stream: str, grain: Grain, condition: Condition, n: int | None
) -> list[TopRecord]:
    """The slowest calls of each bucket and entity, by bucket, entity id and rank."""
    where = Condition("t.stream = ? AND t.grain = ?", (stream, grain.value)) & condition
    rows = session.rows(
        f"SELECT t.bucket, e.id, e.name, t.place, {_RECORD} "
        f"FROM (SELECT t.*, row_number() OVER (PARTITION BY t.bucket, t.entity ORDER BY {_RANKED}) "
        f"AS place FROM topn AS t WHERE {where.sql}) AS t {_JOINED} "
        "WHERE t.place <= ? ORDER BY t.bucket, e.id, e.key, t.place",
        [*where.params, MAX_ROWS if n is None else min(n, MAX_ROWS)],
    )
    return [TopRecord(stream, grain, *row) for row in rows]


def read_slowest(
    session: Session, stream: str, buckets: Buckets, entity: int | None, n: int
) -> list[TopRecord]:
    """The slowest calls of all those buckets together, ranked from 1."""
    where = _in_buckets(stream, buckets, entity)
    rows = session.rows(
        f"SELECT t.bucket, e.id, e.name, {_RECORD} FROM "
        f"(SELECT * FROM topn AS t WHERE {where.sql} ORDER BY {_RANKED} LIMIT ?) AS t "
        f"{_JOINED} ORDER BY {_RANKED}, t.bucket, e.id",
        [*where.params, n],
    )
    return [
        TopRecord(stream, buckets.grain, bucket, id_, name, rank, *record)
        for rank, (bucket, id_, name, *record) in enumerate(rows, 1)
    ]


def statement_totals(
    session: Session, stream: str, buckets: Buckets, entity: int
) -> dict[str, tuple[int, int]]:
    """By normalised statement, how often it ran in those buckets, and how long altogether."""
    where = _in_buckets(stream, buckets, entity)
    rows = session.rows(
        f"SELECT t.normalised, sum(t.runs), sum(t.total_ms) FROM statement AS t "
        f"WHERE {where.sql} GROUP BY t.normalised",
        where.params,
    )
    return {text: (int(runs), int(total_ms)) for text, runs, total_ms in rows}


def top_streams(session: Session) -> list[str]:
    """The names of the TopN streams that have records."""
    return [name for (name,) in session.rows("SELECT DISTINCT stream FROM topn ORDER BY stream")]


def _in_buckets(stream: str, buckets: Buckets, entity: int | None) -> Condition:
    where = Condition("t.stream = ? AND t.grain = ?", (stream, buckets.grain.value))
    if entity is not None and len(buckets) <= MAX_LISTED_BUCKETS:
        where &= Condition.one_of("t.bucket", list(buckets))
    else:
        where &= Condition("t.bucket BETWEEN ? AND ?", (buckets.first, buckets.last))
    return where if entity is None else where & Condition("t.entity = ?", (entity,))


def _rank(record: Row) -> Row:
    latency, time_us, trace_id, span_id, statement, mark = record
    # As both databases compare text here: byte by byte.
    return (-latency, time_us, trace_id.encode(), span_id.encode(), mark, statement.encode())
