"""Exporters in tests: commits with an outbox, exporters that run, and what must arrive."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from batchmill.export import Exporter, ExporterSettings, Target, open_sender
from batchmill.outbox import Outbox, OutboxSettings
from batchmill.sources import bucket_end
from batchmill.store import Batch, CommitResult, Store
from tests.kit.otlp import Point
from tests.kit.stores import MINUTE, Backend, Measurement, Writer
from tests.kit.threads import PATIENCE_S, spawn

QUICK = ExporterSettings(initial_ms=5, max_ms=20, poll_s=0.02, timeout_s=60, drain_s=3)
NAME = "test"
Key = tuple[str, int, str, str | None]
"""A metric, the end of a minute in nanoseconds, an entity's id and a label."""


@dataclass
class Mill:
    """Commits measurements to a store, and their changes to an outbox."""

    store: Store
    checkpoint: Path
    bound: OutboxSettings = field(default_factory=OutboxSettings)
    stream: str = "live"

    def __post_init__(self) -> None:
        self.outbox = Outbox.open(self.checkpoint, self.bound)
        self.writer = Writer(self.store, self.stream)

    def batch(self, *rows: Measurement, **more: Any) -> Batch:
        """A batch, whose changes lie in the outbox; the commit is the caller's."""
        batch = self.writer.batch(rows, **more)
        batch.outgoing = self.outbox.write(batch, self.writer.layout)
        return batch

    def commit(self, *rows: Measurement, **more: Any) -> CommitResult:
        """Commit a batch as the pipeline does."""
        result = self.store.commit(self.batch(*rows, **more))
        assert result.applied
        self.outbox.remove(result.outbox_dropped)
        self.writer.number += 1
        return result

    def files(self) -> list[str]:
        """What lies in the outbox."""
        return sorted(
            f"{path.parent.name}/{path.name}" for path in self.outbox.folder.glob("*/*.arrow")
        )

    def named(self) -> list[str]:
        """What the store says lies there."""
        return sorted(file.path for file in self.store.outbox(self.outbox.place))

    def exporter(
        self,
        target: str,
        settings: ExporterSettings = QUICK,
        name: str = NAME,
        store: Store | None = None,
    ) -> Exporter:
        return exporter_of(store or self.store, self.outbox, target, settings, name)

    def counted(self, what: str) -> dict[str, int]:
        """The store's counters of the exporter, by reason."""
        return {
            reason: n
            for (kind, source, reason), n in self.store.counters().items()
            if (kind, source) == (what, NAME)
        }


def exporter_of(
    store: Store, outbox: Outbox, target: str, settings: ExporterSettings = QUICK, name: str = NAME
) -> Exporter:
    """An exporter of an outbox."""
    sender = open_sender(Target.parse(target), settings)
    return Exporter(store=store, outbox=outbox, sender=sender, name=name, settings=settings)


def mill(folder: Path, **more: Any) -> Mill:
    """A mill with an SQLite store, which is closed by the caller."""
    return Mill(Backend(f"sqlite:///{folder}/store.db").open(), folder / "checkpoint", **more)


@contextlib.contextmanager
def running(exporter: Exporter) -> Iterator[threading.Thread]:
    """An exporter at work, in a thread; stopped in the end."""
    work = spawn(exporter.run)
    try:
        yield work.thread
    finally:
        exporter.stop()
        work.result(PATIENCE_S)


def measurements(number: int, count: int = 5, entities: Sequence[str] = ("one", "two")) -> Any:
    """Rows of the batch of that number: some of the same minutes as those of others."""
    return [
        Measurement(
            latency=10 * number + index,
            name=("GET", "POST")[index % 2],
            minute=MINUTE + (number + index) % 3,
            entity=entities[index % len(entities)],
        )
        for index in range(count)
    ]


def stored(store: Store) -> dict[Key, int | float]:
    """The totals that a peer should have in the end: the store's minutes."""
    totals: dict[Key, int | float] = {}
    for metric in store.metrics():
        for value in store.values(metric):
            end_ns = int(bucket_end(value.bucket).timestamp()) * 10**9
            numbers: Mapping[Any, Any] = (
                value.value if isinstance(value.value, dict) else {None: value.value}
            )
            for label, number in numbers.items():
                name = f"batchmill.{metric.name}"
                plain = None if label is None else re.sub(r"^\{[np]=(.*)\}$", r"\1", label)
                totals[name, end_ns, value.entity_id, plain] = number
    return totals


def last_totals(points: Sequence[Point]) -> dict[Key, int | float]:
    """The last total that a peer has of each value."""
    return {
        (point.metric, point.end_ns, point.entity, point.label): point.value
        for point in points
        if not point.metric.endswith(".increment")
    }


def check_all_arrived(one: Mill, points: Sequence[Point]) -> None:
    """Everything arrived at least once: totals, increments and the counters of drops say so."""
    wanted = stored(one.store)
    assert last_totals(points) == wanted
    for name in ("calls", "statuses"):
        total = {key: n for key, n in wanted.items() if key[0] == f"batchmill.{name}"}
        assert total
        assert added_up(points, name) == total
    assert one.counted("export values dropped") == one.counted("export dropped") == {}
    assert one.named() == one.files() == []


def added_up(points: Sequence[Point], metric: str) -> dict[Key, int | float]:
    """The increments of a metric, each commit's once, added up; under the name of its total."""
    totals: dict[Key, int | float] = {}
    # Whatever comes again is the same to the last bit.
    for fromkey in dict.fromkeys(points):
        if fromkey.metric == f"batchmill.{metric}.increment":
            assert fromkey.commit
            key = (f"batchmill.{metric}", fromkey.end_ns, fromkey.entity, fromkey.label)
            totals[key] = totals.get(key, 0) + fromkey.value
    return totals


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Mill]:
    """A mill on SQLite."""
    made = mill(tmp_path)
    with made.store:
        yield made


def listed_changes(store: Store, checkpoint: Path, metric: str) -> dict[tuple[int, str], Any]:
    """What the listed files of an outbox add to a metric of one column, by minute and entity."""
    outbox = Outbox.of(checkpoint)
    sums: dict[tuple[int, str], Any] = {}
    for file in store.outbox(outbox.place, limit=1_000_000):
        for changes in outbox.read(file.path):
            for own in changes.metrics:
                if own.name != metric:
                    continue
                (column,) = own.columns
                rows = zip(changes.buckets, changes.entities, changes.cells[column], strict=True)
                for bucket, entity, n in rows:
                    # Nothing was added where the cell is empty.
                    if n is not None:
                        sums[bucket, entity.id] = sums.get((bucket, entity.id), 0) + n
    return sums
