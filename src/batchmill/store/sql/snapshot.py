"""Reading several things of one moment: rows of many buckets at once, and whom they are about.

For whoever shows a store. Rows come as they are kept, bucket, entity and cells: what takes time,
decoding tallies and finishing values, is left to the reader, who may merge rows before that.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from batchmill.store.sql.entities import clean, fitted
from batchmill.store.sql.merging import quoted, table_name
from batchmill.store.sql.reading import (
    ENTITY,
    MOST_ROWS,
    entities_of,
    named_like,
    read_layers,
)
from batchmill.store.sql.register import all_metrics
from batchmill.store.sql.session import Row, Session
from batchmill.store.sql.snapshot_sql import (
    Buckets,
    Wanted,
    WideRows,
    any_of,
    conditions,
    of_kind,
    slow_calls,
)
from batchmill.store.sql.streams import all_streams
from batchmill.store.sql.topn import RANKING
from batchmill.store.views import StoredEntity, StoredMetric, StreamInfo, TopRecord


@dataclass(frozen=True, slots=True)
class CellRows:
    """Rows of several metrics of one source, in no order."""

    rows: list[Row]
    """Bucket, the entity's key, then the cells of each metric."""
    places: Mapping[str, slice]
    """By metric, where its cells stand in a row."""
    complete: bool = True
    """False: there are more rows than were wanted."""


@dataclass(frozen=True, slots=True)
class Named:
    """Whom a key stands for."""

    key: int
    kind: str
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A store at one moment; good for as long as the call of ``Store.read`` takes."""

    _session: Session = field(repr=False)

    def newest_minute(self) -> int | None:
        """The newest minute that ever came in."""
        ((value,),) = self._session.rows("SELECT value FROM meta WHERE key = 'newest_minute'")
        return int(value) if value else None

    def streams(self) -> list[StreamInfo]:
        """How far each stream has come."""
        return all_streams(self._session)

    def metrics(self) -> list[StoredMetric]:
        """The newest readable version of each metric, the active one first of all, by name."""
        found: dict[str, StoredMetric] = {}
        for each in all_metrics(self._session):
            known = found.get(each.name)
            if each.columns and (known is None or each.active or not known.active):
                found[each.name] = each
        return list(found.values())

    def cells(
        self,
        metrics: Sequence[StoredMetric],
        buckets: Wanted,
        *,
        entities: Collection[int] | None = None,
        layer: str | None = None,
        most: int = MOST_ROWS - 1,
    ) -> CellRows:
        """The rows of metrics of one source, of one grain; of some entities, or of all.

        ``buckets`` are all from one to another, or a list of them. Few entities are looked up in
        each bucket by the primary key; many are found by going through the buckets.
        """
        places: dict[str, slice] = {}
        columns: list[str] = []
        for each in metrics:
            places[each.name] = slice(2 + len(columns), 2 + len(columns) + len(each.columns))
            columns += each.columns
        if not metrics or (entities is not None and not entities):
            return CellRows([], places)
        grain = buckets.grain if isinstance(buckets, Buckets) else buckets[0]
        query = WideRows(self._session, grain, metrics[0].source, columns, layer)
        rows: list[Row] = []
        for condition, params in conditions(buckets, entities):
            rows += query.rows(condition, params, most + 1 - len(rows))
            if len(rows) > most:
                return CellRows(rows[:most], places, complete=False)
        return CellRows(rows, places)

    def entities_in(self, source: str, buckets: Buckets, most: int = MOST_ROWS) -> list[int]:
        """The keys of all entities that a source has rows of."""
        table = quoted(table_name(buckets.grain, source))
        rows = self._session.rows(
            f"SELECT DISTINCT t.entity FROM {table} AS t WHERE t.bucket BETWEEN ? AND ? "
            "ORDER BY t.entity LIMIT ?",
            [buckets.first, buckets.last, most],
        )
        return [key for (key,) in rows]

    def named(self, keys: Iterable[int]) -> dict[int, Named]:
        """Whom keys stand for; those that stand for nobody are left out."""
        return {
            key: Named(key, kind, id_, name)
            for key, kind, id_, name, _ in entities_of(self._session, list(keys))
        }

    def layers(self, keys: Iterable[int]) -> dict[int, frozenset[str]]:
        """The layers of entities, by key; those without any are left out."""
        return read_layers(self._session, keys)

    def find(
        self,
        kind: str | None = None,
        *,
        ids: Collection[str] | None = None,
        id_or_name: str | None = None,
        id_begins: str | None = None,
        id_ends: str | None = None,
        layer: str | None = None,
        most: int = MOST_ROWS,
    ) -> list[Named]:
        """Entities by kind and id, by any of these; ``most`` of them at most."""
        where, params = of_kind(kind, layer)
        wanted = [where]
        if id_or_name is not None:
            wanted.append("(id = ? OR name = ?)")
            params += [fitted(id_or_name), fitted(clean(id_or_name))]
        if id_begins is not None:
            # As a range, so that the index serves it; text is compared byte by byte.
            wanted.append("id >= ? AND id < ?")
            params += [id_begins, id_begins[:-1] + chr(ord(id_begins[-1]) + 1)]
        if id_ends is not None:
            # Not by LIKE, to which SQLite's capitals are no others than small letters.
            wanted.append("substr(id, length(id) - ? + 1) = ?")
            params += [len(id_ends), id_ends]
        found: list[Named] = []
        for more, given in any_of("id", ids):
            rows = self._session.rows(
                f"SELECT key, kind, id, name FROM entity WHERE {' AND '.join(wanted)}{more} "
                "ORDER BY kind, id LIMIT ?",
                [*params, *given, most],
            )
            found += [Named(*row) for row in rows]
        return found[:most]

    def keys_like(self, kind: str | None, name: str, layer: str | None = None) -> list[int]:
        """The keys of entities by part of their name, in any case."""
        where, params = of_kind(kind, layer)
        return named_like(self._session, where, params, name)

    def entities(
        self, kind: str | None, name: str | None, layer: str | None, *, limit: int, offset: int
    ) -> tuple[list[StoredEntity], int]:
        """A page of the entities, by kind and id, and how many there are; ``name`` is a part."""
        where, params = of_kind(kind, layer)
        if name:
            found = sorted(
                entities_of(self._session, named_like(self._session, where, params, name)),
                key=lambda row: (row[1].encode(), row[2].encode()),  # as the databases would
            )
            total, rows = len(found), found[offset : offset + limit]
        else:
            ((total,),) = self._session.rows(f"SELECT count(*) FROM entity WHERE {where}", params)
            rows = self._session.rows(
                f"SELECT {ENTITY} FROM entity WHERE {where} ORDER BY kind, id LIMIT ? OFFSET ?",
                [*params, limit, offset],
            )
        layers = read_layers(self._session, (row[0] for row in rows))
        return [
            StoredEntity(kind_, id_, name_, layers.get(key, frozenset()), json.loads(roles))
            for key, kind_, id_, name_, roles in rows
        ], int(total)

    def slowest(
        self, stream: str, buckets: Buckets, *, entity: int | None = None, n: int
    ) -> list[TopRecord]:
        """The slowest calls of all those buckets together, ranked from 1."""
        where, params = slow_calls(stream, buckets, entity)
        rows = self._session.rows(
            "SELECT t.bucket, e.id, e.name, t.latency, t.time_us, t.trace_id, t.span_id, "
            "t.statement, coalesce(s.normalised, ''), coalesce(s.runs, 0), "
            "coalesce(s.total_ms, 0) "
            f"FROM (SELECT * FROM topn AS t WHERE {where} ORDER BY {RANKING} LIMIT ?) AS t "
            "JOIN entity AS e ON e.key = t.entity "
            "LEFT JOIN statement AS s ON s.stream = t.stream AND s.grain = t.grain "
            "AND s.bucket = t.bucket AND s.entity = t.entity AND s.digest = t.digest "
            f"ORDER BY {', '.join(f't.{each}' for each in RANKING.split(', '))}, t.bucket, e.id",
            [*params, n],
        )
        return [
            TopRecord(stream, buckets.grain, bucket, id_, name, rank, *rest)
            for rank, (bucket, id_, name, *rest) in enumerate(rows, 1)
        ]

    def statement_totals(
        self, stream: str, buckets: Buckets, entity: int
    ) -> dict[str, tuple[int, int]]:
        """By normalised statement, how often it ran in those buckets, and how long altogether."""
        where, params = slow_calls(stream, buckets, entity)
        rows = self._session.rows(
            f"SELECT t.normalised, sum(t.runs), sum(t.total_ms) FROM statement AS t WHERE {where} "
            "GROUP BY t.normalised",
            params,
        )
        return {text: (int(runs), int(total_ms)) for text, runs, total_ms in rows}

    def top_streams(self) -> list[str]:
        """The names of the TopN streams that have records."""
        rows = self._session.rows("SELECT DISTINCT stream FROM topn ORDER BY stream")
        return [stream for (stream,) in rows]
