"""What is exported: the values of the metrics that a commit changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias

from batchmill.sources import Grain
from batchmill.store import OutboxFile, Store, StoredMetric

if TYPE_CHECKING:
    from batchmill.outbox import Changes, Outbox

Number: TypeAlias = int | float | dict[str, int]
"""A value; a dict has one for each label."""

_PIECE = 1_000
"""How many values are made at a time: a queue that is full holds up the making of more."""
EXPIRED = "not in the store any more"
UNKNOWN = "of a metric that is not kept any more"


@dataclass(frozen=True, slots=True)
class ExportedValue:
    """A metric's value for one minute and entity, after a commit that changed it."""

    metric: str
    function: str
    entity_kind: str
    entity_id: str
    entity_name: str
    layers: frozenset[str]
    """Those that the commit saw it in."""
    bucket: int
    """The minute, ``yyyyMMddHHmm``."""
    increment: Number
    """The value of what this commit added, taken alone."""
    total: Number
    """The store's value, this commit and maybe later ones included."""
    commit: str = ""
    """Which commit it was. A value that is sent again is of the same one: by this a peer tells two
    equal increments from one that came twice."""


class ValueReader:
    """Turns files of the outbox into values; one thread at a time."""

    def __init__(self, store: Store, outbox: Outbox) -> None:
        self._store = store
        self._outbox = outbox
        self._metrics: dict[tuple[str, int], StoredMetric] = {}

    def read(self, file: OutboxFile, left_out: Counter[str]) -> Iterator[list[ExportedValue]]:
        """The values of a file, some at a time; what has none by now goes to ``left_out``."""
        commit = f"{self._outbox.place}/{file.seq}"
        for changes in self._outbox.read(file.path):
            values = self._values(changes, commit, left_out)
            while some := list(islice(values, _PIECE)):
                yield some

    def _values(
        self, changes: Changes, commit: str, left_out: Counter[str]
    ) -> Iterator[ExportedValue]:
        metrics, cells = self._known(changes, left_out)
        wanted: dict[int, set[str]] = {}
        for bucket, entity in zip(changes.buckets, changes.entities, strict=True):
            wanted.setdefault(bucket, set()).add(entity.id)
        totals = self._store.totals(metrics, wanted)
        for row, (bucket, entity) in enumerate(zip(changes.buckets, changes.entities, strict=True)):
            found = totals.get((bucket, entity.id))
            if found is None:
                left_out[EXPIRED] += len(metrics)
                continue
            for metric, columns, total in zip(metrics, cells, found, strict=True):
                states = metric.plan.states([column[row] for column in columns])
                increment = metric.plan.value(states, Grain.MINUTE.minutes)
                if increment is None:  # nothing of it passed the metric's filters
                    continue
                if total is None:
                    left_out[EXPIRED] += 1
                    continue
                yield ExportedValue(
                    *(metric.name, metric.function, entity.kind, entity.id, entity.name),
                    *(entity.layers, bucket, increment, total, commit),
                )

    def _known(
        self, changes: Changes, left_out: Counter[str]
    ) -> tuple[list[StoredMetric], list[list[list[object]]]]:
        """The metrics of some changes, as the store knows them, and the cells of each."""
        if any((each.name, each.version) not in self._metrics for each in changes.metrics):
            self._metrics = by_version(self._store)
        metrics, cells = [], []
        for each in changes.metrics:
            metric = self._metrics.get((each.name, each.version))
            if metric is None or metric.columns != each.columns:
                left_out[UNKNOWN] += len(changes.buckets)
                continue
            metrics.append(metric)
            cells.append([changes.cells[name] for name in each.columns])
        return metrics, cells


def by_version(store: Store) -> dict[tuple[str, int], StoredMetric]:
    """Every metric that can be read, by name and version."""
    return {(each.name, each.version): each for each in store.metrics(include_retired=True)}


def labelled(value: Number) -> Mapping[str | None, int | float]:
    """A value by label; the label of a value without labels is None."""
    return dict(value.items()) if isinstance(value, dict) else {None: value}
