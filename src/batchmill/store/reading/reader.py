"""The calls that read a store, each on a snapshot of what is committed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeVar, Unpack

from batchmill.errors import ConfigError
from batchmill.extras import require_extra
from batchmill.lifecycle import Closing
from batchmill.oal import Value as Final
from batchmill.sources import Grain
from batchmill.store import alert_tables
from batchmill.store.alerts import AlertBook, AlertEpisode, Notification
from batchmill.store.batch import CounterKey
from batchmill.store.buckets import Moment, to_grain
from batchmill.store.clock import ClockState, minute_of
from batchmill.store.reading import frames
from batchmill.store.results import (
    BucketValues,
    ExportPosition,
    OutboxDepth,
    OutboxFile,
    StateRow,
    StoredEntity,
    StoredMetric,
    StreamInfo,
    TopRecord,
    Value,
)
from batchmill.store.retry import Retrier, RetryPolicy
from batchmill.store.sql import entities as entities_sql
from batchmill.store.sql import outbox as outbox_sql
from batchmill.store.sql import registry, retention, topn
from batchmill.store.sql import stream as stream_sql
from batchmill.store.sql import values as values_sql
from batchmill.store.sql.session import Session
from batchmill.store.sql.snapshot import Snapshot
from batchmill.store.sql.values import Page, Position, Selection, SelectionFields, narrowed

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

T = TypeVar("T")
MetricRef: TypeAlias = str | StoredMetric
"""A metric's name, which means its newest version, or one of its versions."""
ALL = Selection()


class StoreReader(Closing):
    """What can be read from a store: values, entities, slow calls, counters, outboxes and alerts.

    Reads see what was committed, and go on while a batch is being written. All methods may be
    called from any thread.
    """

    url: str
    """Its address, without a password."""

    def __init__(self, url: str, policy: RetryPolicy) -> None:
        self.url = url
        self.retrier = Retrier(policy, url)

    @abstractmethod
    def _read_once(self, work: Callable[[Session], T]) -> T:
        """Run ``work`` on a snapshot of what is committed."""

    # Metrics, entities and streams.

    def read(self, work: Callable[[Snapshot], T]) -> T:
        """The result of ``work`` on a snapshot: everything that it reads is of one moment.

        It is called again if the database fails in between, and must not keep the snapshot.
        """
        return self._read(lambda session: work(Snapshot(session)))

    def newest_minute(self, *, until_s: float | None = None) -> int | None:
        """The newest minute; one from the future only while there is no other.

        From the future is what was more than a day ahead of the clock at the last commit. With
        ``until_s``, in seconds since 1970, a later one counts as the minute of that time.
        """
        newest = self._read(stream_sql.read_newest_minute)
        return newest if until_s is None or newest is None else min(newest, minute_of(until_s))

    def clock(self) -> ClockState:
        """What the store knows of the time: see :meth:`ClockState.doubts`."""
        return self._read(lambda session: retention.Retention.read(session).state)

    def metrics(self, include_retired: bool = False) -> list[StoredMetric]:
        """The active metrics by name; with ``include_retired``, all versions that can be read."""
        return [
            metric
            for metric in self._read(registry.all_metrics)
            if metric.active or (include_retired and metric.columns)
        ]

    def values(
        self, metric: MetricRef, selection: Selection = ALL, **fields: Unpack[SelectionFields]
    ) -> list[Value]:
        """The selected final values, by bucket and entity id.

        The fields of a :class:`Selection` may be given as keywords: ``grain``, ``entity``,
        ``start``, ``end``, ``layer``, ``limit``, ``covered``. A metric's name means its newest
        version; pass a :class:`StoredMetric` for a former one.
        """
        wanted = narrowed(selection, fields)
        return self._read(lambda session: values_sql.read_values(session, metric, wanted))

    def iter_values(
        self, metric: MetricRef, selection: Selection = ALL, **fields: Unpack[SelectionFields]
    ) -> Iterator[Value]:
        """The same values as :meth:`values`, read in pages, so that memory does not grow.

        Each page is a read of its own: what is committed meanwhile may show in later pages.
        """
        wanted = narrowed(selection, fields)
        if wanted.limit is not None:
            return iter(self.values(metric, wanted))
        stored = self._read(lambda session: registry.find_metric(session, metric))

        def read_page(after: Position | None) -> Page:
            return self._read(lambda session: values_sql.read_page(session, stored, wanted, after))

        return values_sql.by_pages(read_page)

    def to_arrow(
        self, *metrics: str, selection: Selection = ALL, **fields: Unpack[SelectionFields]
    ) -> pa.Table:
        """The selected values of these metrics, or of all that are computed, as an Arrow table.

        A row is one number, in the columns ``metric``, ``source``, ``entity_id``, ``entity_name``,
        ``layers``, ``grain``, ``time`` (the start of the minute, hour or day), ``label`` and
        ``value``; ``batchmill.spark.metrics`` has the same. A metric with labels, such as a
        percentile, has a row for each of them. ``limit`` is for each metric. Takes pyarrow.
        """
        return frames.read_arrow(self, metrics, narrowed(selection, fields))

    def to_pandas(
        self, *metrics: str, selection: Selection = ALL, **fields: Unpack[SelectionFields]
    ) -> pd.DataFrame:
        """The same as :meth:`to_arrow`, as a DataFrame of pandas."""
        require_extra("to_pandas()", "spark", "pandas", "pyarrow")
        frame: pd.DataFrame = self.to_arrow(*metrics, selection=selection, **fields).to_pandas()
        return frame

    def count_values(
        self, metric: MetricRef, selection: Selection = ALL, **fields: Unpack[SelectionFields]
    ) -> int:
        """How many values :meth:`values` would return, counted by the database."""
        wanted = narrowed(selection, fields)
        return self._read(lambda session: values_sql.count_values(session, metric, wanted))

    def states(
        self, metric: MetricRef, selection: Selection = ALL, **fields: Unpack[SelectionFields]
    ) -> list[StateRow]:
        """The merged states, selected like :meth:`values`."""
        wanted = narrowed(selection, fields)
        return self._read(lambda session: values_sql.read_states(session, metric, wanted))

    def bucket_values(
        self, bucket: int, *, grain: Grain | str = Grain.MINUTE, most: int | None = None
    ) -> BucketValues:
        """Every metric of every entity in one bucket, read at one moment; one query a source.

        With ``most``, only so many entities of each source: the busiest.
        """
        if most is not None and most < 0:
            raise ConfigError("most", most, "a whole number of at least 0, or None for all")
        wanted = to_grain(grain)
        return self._read(lambda session: values_sql.read_bucket(session, wanted, bucket, most))

    def totals(
        self, metrics: Sequence[StoredMetric], wanted: Mapping[int, Collection[str]]
    ) -> dict[tuple[int, str], list[Final]]:
        """Values of several metrics of one source, read at one moment.

        ``wanted`` are entity ids by minute. The result has a list, as long as ``metrics``, for each
        (minute, entity id) that has a row; None in it where a metric has no value, or is not kept
        any more. Rows are looked up by their keys, many at a time.
        """
        if not metrics or not wanted:
            return {}
        return self._read(lambda session: values_sql.read_totals(session, metrics, wanted))

    def entities(
        self, kind: str | None = None, name_like: str | None = None, layer: str | None = None
    ) -> list[StoredEntity]:
        """Entities by kind and id; ``name_like`` is part of the name, in any case."""
        condition = entities_sql.of_kind(kind, layer)
        page = self._read(lambda session: entities_sql.read_entities(session, condition, name_like))
        return page.entities

    def top(
        self,
        stream: str,
        *,
        entity: str | None = None,
        grain: Grain | str = Grain.MINUTE,
        bucket: Moment | tuple[Moment | None, Moment | None] | None = None,
        n: int | None = None,
    ) -> list[TopRecord]:
        """The slowest calls by bucket, entity id and rank; ``bucket`` is one, or first and last."""
        start, end = bucket if isinstance(bucket, tuple) else (bucket, bucket)
        wanted = to_grain(grain)
        condition = Selection(grain=wanted, entity=entity, start=start, end=end).condition()
        return self._read(lambda session: topn.read_top(session, stream, wanted, condition, n))

    def top_streams(self) -> list[str]:
        """The names of the TopN streams that have records."""
        return self._read(topn.top_streams)

    def counters(self) -> dict[CounterKey, int]:
        """Everything that was counted, by (what, source, reason)."""
        rows = self._read(
            lambda session: session.rows(
                "SELECT what, source, reason, n FROM counter ORDER BY what, source, reason"
            )
        )
        return {(what, source, reason): n for what, source, reason, n in rows}

    def streams(self) -> list[StreamInfo]:
        """The progress of each stream."""
        return self._read(stream_sql.all_streams)

    # The outbox.

    def outbox(self, place: str, *, after: int = 0, limit: int = 1000) -> list[OutboxFile]:
        """The files of an outbox behind a position, oldest first."""
        return self._read(lambda session: outbox_sql.files_after(session, place, after, limit))

    def outbox_depth(self, place: str, *, after: int = 0) -> OutboxDepth:
        """How much of an outbox waits behind a position."""
        return self._read(lambda session: outbox_sql.depth_after(session, place, after))

    def exporters(self, place: str | None = None) -> list[ExportPosition]:
        """The position of each exporter; of one outbox, or of all."""
        return self._read(lambda session: outbox_sql.exporter_positions(session, place))

    # Alerts.

    def alerts(self) -> AlertBook:
        """The alert rules with their positions, and the state of every alert."""
        return self._read(alert_tables.read_book)

    def alert_episodes(self, start_s: int, end_s: int, *, limit: int = 1000) -> list[AlertEpisode]:
        """The alerts that fired in a time, in seconds since 1970, newest first."""
        return self._read(
            lambda session: alert_tables.read_episodes(session, start_s, end_s, limit=limit)
        )

    def notifications(self, target: str, *, limit: int = 100) -> list[Notification]:
        """The notifications of alerts that wait for a target, oldest first."""
        return self._read(lambda session: alert_tables.read_notifications(session, target, limit))

    def notifications_waiting(self) -> dict[str, int]:
        """How many notifications wait, by target."""
        return self._read(alert_tables.waiting)

    def _read(self, work: Callable[[Session], T]) -> T:
        return self.retrier.run(lambda: self._read_once(work))
