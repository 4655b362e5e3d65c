"""Several reads of one moment: rows of many buckets at once, and the entities they are about.

Rows are returned as they are stored, bucket, entity and cells: decoding tallies and computing
values takes time and is left to the reader, who may merge rows before that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from batchmill.sources import Grain, builtin_catalog
from batchmill.store import alert_tables
from batchmill.store.alerts import AlertBook, AlertEpisode
from batchmill.store.buckets import BucketList, Buckets
from batchmill.store.reading.coverage import CoveredTime
from batchmill.store.results import (
    CellRow,
    CellRows,
    EntityName,
    EntityPage,
    StoredMetric,
    StreamInfo,
    TopRecord,
)
from batchmill.store.sql import entities as entities_sql
from batchmill.store.sql import topn
from batchmill.store.sql.registry import all_metrics
from batchmill.store.sql.session import (
    MAX_LISTED_BUCKETS,
    MAX_ROWS,
    Condition,
    Session,
    chunks,
    quote,
    table_name,
)
from batchmill.store.sql.stream import all_streams, read_newest_minute

FIRST_SOURCES = ("Service", "ServiceRelation", "DatabaseAccess", "CacheAccess")
"""The event types whose first row is the first data of all that come with batchmill."""
MAX_LOOKUPS = 500_000
"""Up to so many rows are looked up by key, rather than found by scanning their buckets."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """Some entities, the busiest first."""

    keys: list[int]
    total: int
    """How many there are altogether."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A store at one moment; valid during the call of ``Store.read``."""

    _session: Session = field(repr=False)

    def newest_minute(self) -> int | None:
        """The newest minute, as of :meth:`Store.newest_minute`."""
        return read_newest_minute(self._session)

    def oldest_minute(self, *sources: str) -> int | None:
        """The oldest minute that any of the sources has rows of; None if they have none."""
        tables = [quote(table_name(Grain.MINUTE, source)) for source in sources]
        query = " UNION ALL ".join(f"SELECT MIN(bucket) FROM {table}" for table in tables)
        rows = self._session.rows(query) if tables else []
        return min((int(bucket) for (bucket,) in rows if bucket is not None), default=None)

    def covered(
        self, metrics: Iterable[StoredMetric], source: str = FIRST_SOURCES[0]
    ) -> CoveredTime:
        """The time that a store with those metrics has data of, for events of ``source``.

        Types that come with batchmill begin together; one of a user begins with its own first row.
        """
        first = {source} if source not in builtin_catalog().sources else {source, *FIRST_SOURCES}
        sources = first.intersection(metric.source for metric in metrics)
        return CoveredTime.of_minutes(self.oldest_minute(*sorted(sources)), self.newest_minute())

    def streams(self) -> list[StreamInfo]:
        """The progress of each stream."""
        return all_streams(self._session)

    def metrics(self) -> list[StoredMetric]:
        """One readable version of each metric, by name: the active one, else the newest."""
        newest: dict[str, StoredMetric] = {}
        for metric in all_metrics(self._session):
            known = newest.get(metric.name)
            if metric.columns and (known is None or metric.active or not known.active):
                newest[metric.name] = metric
        return list(newest.values())

    def cells(
        self,
        metrics: Sequence[StoredMetric],
        buckets: Buckets | BucketList,
        *,
        entities: Collection[int] | None = None,
        layer: str | None = None,
        most: int = MAX_ROWS - 1,
    ) -> CellRows:
        """The rows of metrics of one source in some buckets; of some entities, or of all.

        Few entities are looked up in each bucket by the primary key; for many, the buckets are
        scanned.
        """
        places: dict[str, slice] = {}
        columns: list[str] = []
        for metric in metrics:
            places[metric.name] = slice(2 + len(columns), 2 + len(columns) + len(metric.columns))
            columns += metric.columns
        if not metrics or (entities is not None and not entities):
            return CellRows([], places)
        table = quote(table_name(buckets.grain, metrics[0].source))
        query = (
            f"SELECT t.bucket, t.entity{''.join(f', t.{name}' for name in columns)} FROM {table}"
        )
        of_layer = Condition() if layer is None else entities_sql.in_layer("t.entity", layer)
        rows: list[CellRow] = []
        for condition in _conditions(buckets, entities):
            where = condition & of_layer
            limit = min(most + 1 - len(rows), MAX_ROWS)
            rows += self._session.rows(
                f"{query} AS t WHERE {where.sql} LIMIT ?", [*where.params, limit]
            )
            if len(rows) > most:
                return CellRows(rows[:most], places, complete=False)
        return CellRows(rows, places)

    def entities_in(self, source: str, buckets: Buckets, most: int = MAX_ROWS) -> list[int]:
        """The keys of all entities that a source has rows of."""
        table = quote(table_name(buckets.grain, source))
        rows = self._session.rows(
            f"SELECT DISTINCT t.entity FROM {table} AS t WHERE t.bucket BETWEEN ? AND ? "
            "ORDER BY t.entity LIMIT ?",
            [buckets.first, buckets.last, most],
        )
        return [key for (key,) in rows]

    def count(self, kind: str) -> int:
        """How many entities of a kind there are."""
        ((count,),) = self._session.rows("SELECT count(*) FROM entity WHERE kind = ?", [kind])
        return int(count)

    def busiest(
        self,
        metric: StoredMetric,
        buckets: Buckets,
        *,
        kind: str | None = None,
        id_begins: str | None = None,
        id_ends: str | None = None,
        layer: str | None = None,
        most: int = MAX_ROWS,
    ) -> Ranking:
        """The entities with the greatest sums of a metric's first cell in some buckets.

        The database adds up and sorts: of a hundred thousand entities, only some keys are returned.
        """
        condition = Condition("t.bucket BETWEEN ? AND ?", (buckets.first, buckets.last))
        if id_begins is not None or id_ends is not None:
            of_them = entities_sql.of_kind(kind, None) & _by_id(id_begins, id_ends)
            condition &= Condition(
                f"t.entity IN (SELECT key FROM entity WHERE {of_them.sql})", of_them.params
            )
        if layer is not None:
            condition &= entities_sql.in_layer("t.entity", layer)
        cell = f"t.{metric.columns[0]}"
        condition &= Condition(f"{cell} > 0")
        rows_of = (
            f"FROM {quote(table_name(buckets.grain, metric.source))} AS t WHERE {condition.sql}"
        )
        rows = self._session.rows(
            f"SELECT t.entity {rows_of} "
            f"GROUP BY t.entity ORDER BY sum({cell}) DESC, t.entity LIMIT ?",
            [*condition.params, most],
        )
        total = len(rows)
        if total == most:  # a second query takes less time than count(*) OVER () in the first
            ((total,),) = self._session.rows(
                f"SELECT count(DISTINCT t.entity) {rows_of}", condition.params
            )
        return Ranking([key for (key,) in rows], total)

    def entity_names(self, keys: Iterable[int]) -> dict[int, EntityName]:
        """The entities of keys; keys without an entity are left out."""
        return entities_sql.read_names(self._session, keys)

    def layers(self, keys: Iterable[int]) -> dict[int, frozenset[str]]:
        """The layers of entities, by key; those without any are left out."""
        return entities_sql.read_layers(self._session, keys)

    def find(
        self,
        kind: str | None = None,
        *,
        ids: Collection[str] | None = None,
        id_or_name: str | None = None,
        id_begins: str | None = None,
        id_ends: str | None = None,
        layer: str | None = None,
        most: int = MAX_ROWS,
    ) -> list[EntityName]:
        """Entities to which all of these apply, by kind and id; ``most`` of them."""
        condition = entities_sql.of_kind(kind, layer) & _by_id(id_begins, id_ends)
        if id_or_name is not None:
            condition &= entities_sql.id_or_name(id_or_name)
        return entities_sql.find_names(self._session, condition, ids, most)

    def keys_like(self, kind: str | None, name: str, layer: str | None = None) -> list[int]:
        """The keys of entities by part of their name, ignoring case."""
        return entities_sql.keys_like(self._session, entities_sql.of_kind(kind, layer), name)

    def entities(
        self, kind: str | None, name: str | None, layer: str | None, *, limit: int, offset: int
    ) -> EntityPage:
        """A page of the entities, by kind and id; ``name`` is part of the name, in any case."""
        condition = entities_sql.of_kind(kind, layer)
        return entities_sql.read_entities(
            self._session, condition, name, limit=limit, offset=offset
        )

    def slowest(
        self, stream: str, buckets: Buckets, *, entity: int | None = None, n: int
    ) -> list[TopRecord]:
        """The slowest calls of all those buckets together, ranked from 1."""
        return topn.read_slowest(self._session, stream, buckets, entity, n)

    def statement_totals(
        self, stream: str, buckets: Buckets, entity: int
    ) -> dict[str, tuple[int, int]]:
        """By normalised statement, how often it ran in those buckets, and how long altogether."""
        return topn.statement_totals(self._session, stream, buckets, entity)

    def top_streams(self) -> list[str]:
        """The names of the TopN streams that have records."""
        return topn.top_streams(self._session)

    def alerts(self) -> AlertBook:
        """The alert rules with their positions, and the state of every alert."""
        return alert_tables.read_book(self._session)

    def alert_episodes(
        self, start_s: int, end_s: int, *, entity_ids: Sequence[str] | None = None, limit: int
    ) -> list[AlertEpisode]:
        """The alerts that fired in a time, newest first; of some entities, or of all."""
        return alert_tables.read_episodes(
            self._session, start_s, end_s, entity_ids=entity_ids, limit=limit
        )


def _by_id(begins: str | None, ends: str | None) -> Condition:
    """The condition for ids that begin or end with a text."""
    condition = Condition()
    if begins is not None:
        # As a range, so that the index is used; text is compared byte by byte.
        end = begins[:-1] + chr(ord(begins[-1]) + 1)
        condition &= Condition("id >= ? AND id < ?", (begins, end))
    if ends is not None:
        # Not by LIKE, which ignores case in SQLite.
        condition &= Condition("substr(id, length(id) - ? + 1) = ?", (len(ends), ends))
    return condition


def _conditions(
    buckets: Buckets | BucketList, entities: Collection[int] | None
) -> Iterator[Condition]:
    """The conditions of one query after the other."""
    if entities is not None and len(buckets) * len(entities) <= MAX_LOOKUPS:
        for some_buckets in chunks(buckets, MAX_LISTED_BUCKETS):
            within = Condition.one_of("t.bucket", some_buckets)
            for some_keys in chunks(entities):
                yield within & Condition.one_of("t.entity", some_keys)
        return
    # Too many for parameters, and numbers anyway.
    of_them = Condition()
    if entities is not None:
        of_them = Condition(f"t.entity IN ({', '.join(str(int(key)) for key in entities)})")
    if buckets.bounds is not None:
        yield Condition("t.bucket BETWEEN ? AND ?", buckets.bounds) & of_them
        return
    for some_buckets in chunks(buckets, MAX_LISTED_BUCKETS):
        yield Condition.one_of("t.bucket", some_buckets) & of_them
