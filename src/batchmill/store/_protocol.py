"""What every store does, whichever database is behind it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from types import TracebackType
from typing import Protocol, Self, TypeAlias

from batchmill.oal import Metric
from batchmill.sources import Grain
from batchmill.store._checkpoint import Exempt
from batchmill.store._types import Batch, Claim, CommitResult, CounterKey, Layout
from batchmill.store._views import (
    StateRow,
    StoredEntity,
    StoredMetric,
    StreamInfo,
    TopRecord,
    Value,
)

Moment: TypeAlias = int | datetime
"""A bucket of any grain, or a moment."""


class Store(Protocol):
    """Where metrics are kept. One writer a stream, any number of readers.

    Every write is one transaction. Reads see what was committed, and go on while a batch is being
    written. All methods may be called from any thread; writes take turns.
    """

    @property
    def id(self) -> str:
        """The store's own id, made with it."""
        ...

    @property
    def url(self) -> str:
        """Its address, without a password."""
        ...

    def register(
        self, metrics: Iterable[Metric], *, retire: bool = True, stream: str = ""
    ) -> Layout:
        """Give each metric its columns; call it before the first commit, not while one runs.

        The same definition keeps its columns and its history. A changed one, or one that comes
        back, is a new version with columns of its own. Metrics that ``stream`` computed, and no
        other stream does, are retired if they are not in the set, unless ``retire`` is False, which
        is for whoever writes for a while only. Raises :class:`MetricConflictError` where another
        stream computes a metric of that name with another definition.
        """
        ...

    def claim(
        self,
        stream: str,
        checkpoint_id: str,
        *,
        fresh: bool,
        committed: int | None,
        planned: int | Exempt | None = Exempt.NO_LOG,
    ) -> Claim:
        """Become the one writer of a stream.

        ``fresh``: the checkpoint was made just now. ``committed``: the last batch that the
        checkpoint has marked done, None for none. ``planned``: the newest batch whose input the
        checkpoint has laid down, None for none; whoever has no log of plans passes
        ``Exempt.NO_LOG``. Raises :class:`StoreInUseError` while another live process has it, and
        :class:`CheckpointMismatchError` where the two do not match.
        """
        ...

    def release(self, stream: str) -> None:
        """Let another process claim the stream; nothing happens if it is not claimed."""
        ...

    def commit(self, batch: Batch) -> CommitResult:
        """Merge a batch, in one transaction; a batch that is in already changes nothing."""
        ...

    def newest_minute(self) -> int | None:
        """The newest minute that ever came in."""
        ...

    def metrics(self, include_retired: bool = False) -> list[StoredMetric]:
        """The metrics by name; with their former versions if asked for."""
        ...

    def values(
        self,
        metric: str | StoredMetric,
        *,
        entity: str | None = None,
        grain: Grain = Grain.MINUTE,
        start: Moment | None = None,
        end: Moment | None = None,
        layer: str | None = None,
        limit: int | None = None,
    ) -> list[Value]:
        """Final values by bucket and entity id; with a ``limit``, the newest so many of them.

        ``entity`` is an id or a name. ``start`` and ``end`` are both included, and may be buckets
        of any grain: the end of a day is its last minute. A name means the newest version; pass a
        :class:`StoredMetric` for a former one.
        """
        ...

    def iter_values(
        self,
        metric: str | StoredMetric,
        *,
        entity: str | None = None,
        grain: Grain = Grain.MINUTE,
        start: Moment | None = None,
        end: Moment | None = None,
        layer: str | None = None,
    ) -> Iterator[Value]:
        """All values like :meth:`values`, but read in pages, so that memory does not grow.

        Each page is a read of its own: what is committed meanwhile may show in those to come.
        """
        ...

    def count_values(
        self,
        metric: str | StoredMetric,
        *,
        entity: str | None = None,
        grain: Grain = Grain.MINUTE,
        start: Moment | None = None,
        end: Moment | None = None,
        layer: str | None = None,
    ) -> int:
        """How many values there are, counted by the database."""
        ...

    def states(
        self,
        metric: str | StoredMetric,
        *,
        entity: str | None = None,
        grain: Grain = Grain.MINUTE,
        start: Moment | None = None,
        end: Moment | None = None,
        layer: str | None = None,
        limit: int | None = None,
    ) -> list[StateRow]:
        """The merged states, else like :meth:`values`."""
        ...

    def entities(
        self, kind: str | None = None, name_like: str | None = None, layer: str | None = None
    ) -> list[StoredEntity]:
        """Entities by kind and id; ``name_like`` is part of the name, in any case."""
        ...

    def top(
        self,
        stream: str,
        *,
        entity: str | None = None,
        grain: Grain = Grain.MINUTE,
        bucket: Moment | tuple[Moment | None, Moment | None] | None = None,
        n: int | None = None,
    ) -> list[TopRecord]:
        """The slowest calls by bucket, entity id and rank; ``bucket`` is one, or first and last."""
        ...

    def top_streams(self) -> list[str]:
        """The names of the TopN streams that have records."""
        ...

    def counters(self) -> dict[CounterKey, int]:
        """Everything that was counted, by (what, source, reason)."""
        ...

    def streams(self) -> list[StreamInfo]:
        """How far each stream has come."""
        ...

    def close(self) -> None:
        """Release what is claimed and let go of the database; may be called twice."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
