"""What every store does, whichever database is behind it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Protocol, Self, TypeAlias, TypeVar

from batchmill.oal import Metric
from batchmill.oal import Value as Final
from batchmill.sources import Grain
from batchmill.store.sql.checkpoint import Exempt
from batchmill.store.sql.snapshot import Snapshot
from batchmill.store.types import Batch, Claim, CommitResult, CounterKey, Layout
from batchmill.store.views import (
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

T = TypeVar("T")

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

    def read(self, work: Callable[[Snapshot], T]) -> T:
        """What ``work`` makes of a snapshot: everything that it reads is of one moment.

        It is called again where the database fails in between, and must not keep the snapshot.
        """
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

    def bucket_values(
        self, bucket: int, *, grain: Grain = Grain.MINUTE, most: int | None = None
    ) -> BucketValues:
        """Every metric of every entity in one bucket, all of one moment; one query a source.

        With ``most``, so many entities of each source at most: the busiest.
        """
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

    def outbox(self, place: str, *, after: int = 0, limit: int = 1000) -> list[OutboxFile]:
        """The files of an outbox behind a position, oldest first."""
        ...

    def outbox_depth(self, place: str, *, after: int = 0) -> OutboxDepth:
        """How much of an outbox waits behind a position."""
        ...

    def exporters(self, place: str | None = None) -> list[ExportPosition]:
        """How far each exporter has come; of one outbox, or of all."""
        ...

    def join_outbox(self, exporter: str, place: str) -> int:
        """Have an outbox's files wait for an exporter from now on; its position, 0 at first."""
        ...

    def pass_outbox(
        self,
        exporter: str,
        place: str,
        sent: Sequence[tuple[int, int]],
        counters: Mapping[CounterKey, int] | None = None,
    ) -> list[str]:
        """Note that an exporter is through with files, given as (seq, rows), all up to the last.

        Adds ``counters`` in the same transaction, and answers which files nobody waits for any
        more: they are named no longer, and to be removed by the caller. A file that had to go
        while it was being sent is not dropped after all, and not counted as such; one that had gone
        before is given with no rows, and stays counted.
        """
        ...

    def leave_outbox(self, exporter: str, place: str) -> list[str]:
        """Forget an exporter; what it has not sent is counted, files to be removed are answered."""
        ...

    def totals(
        self, metrics: Sequence[StoredMetric], wanted: Mapping[int, Collection[str]]
    ) -> dict[tuple[int, str], list[Final]]:
        """Values of several metrics of one source, read at one moment.

        ``wanted`` are entity ids by minute. The answer has a list, as long as ``metrics``, for each
        (minute, entity id) that has a row; None in it where a metric has no value, or is not kept
        any more. Rows are looked up by their keys, many at a time.
        """
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
