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


def labelled(value: Number) -> Mapping[str | None, int | float]:
    """A value by label; the label of a value without labels is None."""
    return dict(value.items()) if isinstance(value, dict) else {None: value}


@dataclass(frozen=True, slots=True)
class _ChangedMetric:
    """A metric of some changes, as the store knows it."""

    metric: StoredMetric
    columns: list[list[object]]
    """What was added: a list for each cell of a state, with an item for each row."""


class ValueReader:
    """Turns files of the outbox into values; one thread at a time."""

    def __init__(self, store: Store, outbox: Outbox) -> None:
        self._store = store
        self._outbox = outbox
        self._metrics: dict[tuple[str, int], StoredMetric] = {}
        """By name and version, as the store knew them when a file last had another."""

    def read(self, file: OutboxFile, left_out: Counter[str]) -> Iterator[list[ExportedValue]]:
        """The values of a file, some at a time; those left out are counted in ``left_out``."""
        commit = f"{self._outbox.place}/{file.seq}"
        for changes in self._outbox.read(file.path):
            values = self._values(changes, commit, left_out)
            while piece := list(islice(values, _PIECE)):
                yield piece

    def _values(
        self, changes: Changes, commit: str, left_out: Counter[str]
    ) -> Iterator[ExportedValue]:
        metrics = self._changed_metrics(changes, left_out)
        wanted: dict[int, set[str]] = {}
        for bucket, entity in zip(changes.buckets, changes.entities, strict=True):
            wanted.setdefault(bucket, set()).add(entity.id)
        totals_by_key = self._store.totals([changed.metric for changed in metrics], wanted)
        for row, (bucket, entity) in enumerate(zip(changes.buckets, changes.entities, strict=True)):
            totals = totals_by_key.get((bucket, entity.id))
            if totals is None:
                left_out[EXPIRED] += len(metrics)
                continue
            for changed, total in zip(metrics, totals, strict=True):
                metric = changed.metric
                states = metric.plan.states([column[row] for column in changed.columns])
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

    def _changed_metrics(self, changes: Changes, left_out: Counter[str]) -> list[_ChangedMetric]:
        if any((entry.name, entry.version) not in self._metrics for entry in changes.metrics):
            stored = self._store.metrics(include_retired=True)
            self._metrics = {(metric.name, metric.version): metric for metric in stored}
        changed = []
        for entry in changes.metrics:
            metric = self._metrics.get((entry.name, entry.version))
            if metric is None or metric.columns != entry.columns:
                left_out[UNKNOWN] += len(changes.buckets)
                continue
            columns = [changes.cells[name] for name in entry.columns]
            changed.append(_ChangedMetric(metric, columns))
        return changed
