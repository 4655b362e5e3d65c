"""The last step of a batch: merges the deltas of some entities (L2), and may commit them.

Into a store that one process writes at a time, the driver commits a batch: :class:`MergeStep` sends
it what was merged. Into a store that takes parts of a batch, :class:`CommitStep` brings them from
the executors, and the driver gets nothing but reports.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from batchmill.aggregate import (
    Deltas,
    EntityBook,
    EntityBudget,
    EntityLimiter,
    Overflow,
    SlowestStatements,
    contribution,
    entity_number,
    from_arrow,
    statements_from_arrow,
    statements_to_arrow,
    to_arrow,
)
from batchmill.errors import MissingExtraError
from batchmill.outbox import Outbox
from batchmill.spans import merge_statements, merge_topn
from batchmill.spark.batch.plan import PickledPlan, TaskPlan
from batchmill.spark.batch.report import TaskReport
from batchmill.spark.failures import explain_full_disk
from batchmill.spark.shuffle import Blob, Kind, Share, read_blobs, this_task, write_blobs
from batchmill.store import (
    OVERFLOW_LABELS,
    TOO_MANY_LABELS,
    Batch,
    OpenParts,
    PartShare,
    StatementRow,
    Store,
    StoreError,
    TaskAddress,
    TopNRow,
    open_for_task,
)

_MERGED = frozenset({Kind.DELTAS, Kind.TOPN, Kind.STATEMENTS, Kind.SLOWEST})


class BlobMerger:
    """Merges the blobs of some entities to deltas."""

    def __init__(self, plan: TaskPlan) -> None:
        self._plan = plan
        self._deltas: dict[str, list[Deltas]] = defaultdict(list)
        self._topn: list[pa.Table] = []
        self._statements: list[pa.Table] = []
        self._slowest = SlowestStatements(plan.top_n, plan.thresholds)
        self.newest = 0
        """The newest minute of statements that processes have counted; 0: of none."""

    def add(self, blob: Blob) -> bool:
        """Take a blob; False: it is of a kind that is not merged."""
        plan = self._plan
        match blob.kind:
            case Kind.DELTAS:
                aggregator = plan.aggregators[blob.source]
                self._deltas[blob.source].append(from_arrow(blob.table, aggregator.plan))
            case Kind.TOPN:
                self._topn.append(blob.table)
            case Kind.STATEMENTS:
                self._statements.append(blob.table)
            case Kind.SLOWEST:
                table = blob.table
                self._slowest.merge(statements_from_arrow(table, plan.top_n, plan.thresholds))
                self._note(table)
            case _:
                return False
        return True

    def skip(self, blob: Blob) -> bool:
        """Take no more of a blob than what :attr:`newest` says; the same result."""
        if blob.kind is Kind.SLOWEST:
            self._note(blob.table)
        return blob.kind in _MERGED

    def _note(self, slowest: pa.Table) -> None:
        self.newest = max(self.newest, pc.max(slowest["minute"]).as_py())

    def blobs(self) -> Iterator[Blob]:
        """The merged content as blobs, for the next step to merge further."""
        plan = self._plan
        for source, several in self._deltas.items():
            aggregator = plan.aggregators[source]
            table = to_arrow(aggregator.merge(several), aggregator.plan)
            yield from Blob.of(Kind.DELTAS, table, source=source)
        if self._topn:
            yield from Blob.of(Kind.TOPN, merge_topn(self._topn, plan.top_n))
        if self._statements:
            yield from Blob.of(Kind.STATEMENTS, merge_statements(self._statements))
        yield from Blob.of(Kind.SLOWEST, statements_to_arrow(self._slowest))

    def fill(self, batch: Batch, limiter: EntityLimiter | None = None) -> Counter[str]:
        """Put it into a batch, as a store takes it; how many rows of each event type it is of.

        The limiter says which entities are too many.
        """
        plan, book = self._plan, EntityBook(limiter)
        counts: Counter[str] = Counter()
        for source, several in self._deltas.items():
            aggregator = plan.aggregators[source]
            # All in one: exporters tell the changes of a commit apart by minute and entity.
            merged = aggregator.merge(several)
            made = contribution(merged, aggregator, plan.layout, book)
            counts[source] += made.rows
            batch.deltas += made.deltas
            if made.moved_labels:
                batch.counters[OVERFLOW_LABELS, source, TOO_MANY_LABELS] = made.moved_labels
        # The columns of both tables are named after the fields.
        topn = merge_topn(self._topn, plan.top_n).to_pylist() if self._topn else []
        runs = merge_statements(self._statements).to_pylist() if self._statements else []
        places = ((row["stream"], row["entity"]) for row in chain(topn, runs))
        book.limit_services(chain(places, self._slowest.places()))
        batch.topn += [TopNRow(**row | _numbered(row, book)) for row in topn]
        batch.statements += [StatementRow(**row | _numbered(row, book)) for row in runs]
        batch.topn += self._slowest.topn_rows(book)
        batch.statements += self._slowest.statement_rows(book)
        batch.entities = book.rows()
        return counts


@dataclass(frozen=True)
class MergeStep:
    """Merges the blobs of some entities; the driver commits them."""

    shipped: PickledPlan

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """One table of deltas for each event type; what is not merged goes through."""
        merged, report = BlobMerger(self.shipped.plan), TaskReport()
        for blob in read_blobs(batches):
            if blob.kind is Kind.REPORT:
                report.add(blob.report)
            elif not merged.add(blob):
                yield from write_blobs([blob])
        yield from write_blobs(merged.blobs())
        yield from write_blobs([Blob.of_report(report)])


@dataclass(frozen=True)
class PartCommit:
    """What the tasks of a batch need to commit its parts."""

    store: TaskAddress
    stream: str
    epoch: int
    number: int
    opened: OpenParts
    outbox: Outbox | None
    """Where changes are written for exporters."""
    budget: EntityBudget | None = None
    """How many new entities the batch may bring; None: all."""

    def limiter(self, store: Store, parts: int, own: Sequence[int]) -> EntityLimiter | None:
        """The limit of some of the batch's parts; without any, of parts that are committed."""
        if self.budget is None:
            return None
        # By the hash of the entity, entities are spread evenly, and so is what is left.
        budget = replace(self.budget, parts=parts, own=tuple(own))
        return EntityLimiter(budget, store.unknown_entities)


@dataclass(frozen=True)
class CommitStep:
    """Merges the blobs of some parts, and commits each part once.

    A part that was committed by an earlier run of the batch, or by an earlier attempt of this task,
    is left out by the store. Its changes are written for exporters all the same: those of a run
    that failed were never listed. Without exporters, nothing of it is kept in memory.
    """

    shipped: PickledPlan
    commit: PartCommit
    tasks: int
    """How many tasks share the parts."""

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The task's report, and the blobs that are not for the store."""
        return self.run(this_task(), batches)

    def run(self, task: int, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Merge the blobs of the task with this number."""
        plan, commit = self.shipped.plan, self.commit
        before = commit.opened.recorded
        fresh, recorded, report = BlobMerger(plan), BlobMerger(plan), TaskReport()
        again = recorded.skip if commit.outbox is None else recorded.add
        for blob in read_blobs(batches):
            if blob.kind is Kind.REPORT:
                report.add(blob.report)
            elif not (again if blob.part in before else fresh.add)(blob):
                yield from write_blobs([blob])
        own = Share(plan.parts, self.tasks, task).own
        try:
            self._commit([part for part in own if part not in before], fresh, recorded, report)
        except (StoreError, MissingExtraError, MemoryError) as error:
            # For the driver. The tasks of other parts go on: the next run has fewer left. The store
            # has tried again enough.
            report.failures.append(error)
        report.newest = max(report.newest, fresh.newest, recorded.newest)
        yield from write_blobs([Blob.of_report(report)])

    def _commit(
        self, parts: Sequence[int], fresh: BlobMerger, recorded: BlobMerger, report: TaskReport
    ) -> None:
        """Commit ``parts``, and write the changes for exporters, also of parts that came before."""
        plan, commit = self.shipped.plan, self.commit
        store = open_for_task(commit.store)
        limiter = commit.limiter(store, plan.parts, parts)
        batch = Batch(commit.stream, commit.epoch, commit.number)
        rows = fresh.fill(batch, limiter)
        overflow = Overflow() if limiter is None else limiter.overflow
        # With the parts: what a run finds recorded, it does not count again.
        batch.counters |= overflow.counters()
        report.overflow.add(overflow)
        if commit.outbox is not None:
            # What the store does not have of them went under overflow.
            limiter = commit.limiter(store, plan.parts, ())
            again = Batch(commit.stream, commit.epoch, commit.number)
            recorded.fill(again, limiter)
            with explain_full_disk(commit.outbox.folder):
                for some in (batch, again):
                    report.outgoing += commit.outbox.write(some, plan.layout)
        if parts:
            moved = bool(overflow.rows)
            share = PartShare(tuple(parts), commit.opened, rows, plan.layout, moved)
            store.commit_parts(batch, share)


def _numbered(row: dict[str, Any], book: EntityBook) -> dict[str, Any]:
    return {"entity": entity_number(row["stream"], row["entity"], book)}
