"""The second step of a batch: turns all spans of some traces into rows, and aggregates them (L1).

It drops spans that were delivered before, turns the others into rows of event types, and finds who
called whom, with what earlier batches have kept of the same traces. The third step, which gets all
deltas of some entities, is in :mod:`batchmill.spark.batch.merge`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from batchmill.aggregate import rows_by_minute
from batchmill.spans import (
    KnownHosts,
    broker_rows,
    compact,
    direct_rows,
    drop_duplicates,
    ids_of,
    link,
    merge_ids,
    relation_rows,
    statement_stats,
    topn_records,
)
from batchmill.spark.batch.plan import Limits, PickledPlan, delta_blobs, row_blobs, split_blobs
from batchmill.spark.batch.report import TaskReport
from batchmill.spark.files.quarantine import explain_unwritable
from batchmill.spark.files.statefiles import (
    StateFile,
    StateKind,
    StatePiece,
    concat,
    read_state,
    state_blobs,
    state_of,
    write_state,
)
from batchmill.spark.input.rows import SPAN, check_spans
from batchmill.spark.shuffle import (
    Blob,
    Kind,
    Share,
    by_part,
    read_blobs,
    text_parts,
    this_task,
    trace_parts,
    write_blobs,
)

DUPLICATE = "same trace and span id"
"""The reason of the counter ``duplicates``; one for all, so that it does not depend on batches."""


@dataclass(frozen=True)
class SpanStep:
    """Processes the spans of some traces, with what earlier batches have kept of them."""

    shipped: PickledPlan
    limits: Limits
    tick: int
    """The batch, as pending spans are marked with it."""
    expire_before: int | None
    """Pending spans that are marked with this or less wait no longer."""
    dedup: bool
    tasks: int
    """How many tasks share the traces."""
    files: Sequence[StateFile]
    """The state of earlier batches, as far as it is in local files; the rest comes as blobs."""
    folder: str | None
    """Where tasks write the state of this batch. None: they return it."""
    rows_only: bool = False
    """Whether to return rows of event types, in place of deltas, and to write nothing."""
    hosts: KnownHosts | None = None
    """What earlier batches have learned about hosts; None: not known."""

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Deltas, TopN, and what was counted; blobs without spans go through."""
        return self.run(this_task(), batches)

    def run(self, task: int, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Turn the blobs of the task with this number into those of the next step."""
        spans, kept = [], []
        for blob in read_blobs(batches):
            if blob.kind is Kind.SPANS:
                spans.append(blob.table)
            elif blob.kind in (Kind.PENDING, Kind.IDS):
                kept.append(blob)
            else:
                yield from write_blobs([blob])
        kept.sort(key=lambda blob: blob.data.to_pybytes())  # they arrive in any order
        state = [(state_of(blob), [(blob.part, blob.table)]) for blob in kept]
        yield from write_blobs(self._process(task, spans, state))

    def _process(self, task: int, tables: Sequence[pa.Table], given: _State) -> Iterator[Blob]:
        plan, report = self.shipped.plan, TaskReport()
        share = Share(plan.parts, self.tasks, task)
        state = [*given, *((file, read_state(file, share)) for file in self.files)]
        spans = self._unique(tables, _tables(state, StateKind.IDS), report)
        pending = _tables(state, StateKind.PENDING)
        # Not copied into one piece: most of them have no partner in this batch.
        earlier = pa.concat_tables(pending) if pending else None
        links = link(spans, earlier, self.tick, self.expire_before, self.hosts)
        report.answered |= links.answered
        report.given_up |= links.given_up
        wanted = plan.aggregators.keys()
        sources = [
            direct_rows(spans, wanted),
            relation_rows(links.relations, wanted),
            broker_rows(links.accessed, wanted),
        ]
        for rows in sources:
            for source, table in rows.items():
                made = plan.aggregators[source].make(table)
                if self.rows_only:
                    yield from row_blobs(source, table, made)
                    continue
                deltas = made.deltas
                for minute, count in rows_by_minute(deltas).items():
                    report.derived[source, minute] += count
                yield from delta_blobs(deltas, plan, source, self.limits)
        if self.rows_only:
            return
        for reason, count in links.unresolved.items():
            report.counters["unresolved", SPAN.name, reason] += count
        records = topn_records(spans, plan.top_n, plan.thresholds)
        for kind, table in ((Kind.TOPN, records), (Kind.STATEMENTS, statement_stats(spans))):
            parts = text_parts(table["entity"], plan.parts)
            yield from split_blobs(kind, table, parts, self.limits)
        summary = by_part(links.summary, trace_parts(links.summary, plan.parts))
        yield from self._keep(StateKind.PENDING, summary, state, share, report)
        if self.dedup:
            ids = spans.select(["trace_id", "span_id"])
            fresh = (
                (part, ids_of(rows)) for part, rows in by_part(ids, trace_parts(ids, plan.parts))
            )
            yield from self._keep(StateKind.IDS, fresh, state, share, report)
        yield Blob.of_report(report)

    def _unique(
        self, tables: Sequence[pa.Table], known: Sequence[pa.Table], report: TaskReport
    ) -> pa.Table:
        """The spans that count."""
        spans = concat(tables) if tables else compact(_no_spans(), keys=())
        if self.dedup:
            spans, dropped = drop_duplicates(spans, known)
            report.counters["duplicates", SPAN.name, DUPLICATE] += dropped
        report.counters["rows", SPAN.name, ""] += spans.num_rows
        if self.limits.late_before_us is not None and spans.num_rows:
            starts = pc.cast(spans["time"], pa.int64())
            late = pc.sum(pc.less(starts, self.limits.late_before_us)).as_py() or 0
            report.counters["late", SPAN.name, ""] += late
        return spans

    def _keep(
        self,
        kind: StateKind,
        fresh: Iterable[tuple[int, pa.Table]],
        state: _State,
        share: Share,
        report: TaskReport,
    ) -> Iterator[Blob]:
        """Write or return what later batches need, and the state that is merged with it."""
        tables: dict[int, list[pa.Table]] = defaultdict(list)
        earlier = (pair for file, own in state if file.kind is kind and file.merged for pair in own)
        for part, table in chain(fresh, earlier):
            tables[part].append(table)
        merge = merge_ids if kind is StateKind.IDS else concat
        parts = {part: merge(several) for part, several in sorted(tables.items())}
        if self.folder is None:
            rows = sum(table.num_rows for table in parts.values())
            report.kept.append(StatePiece(kind, "", rows))
            for part, table in parts.items():
                yield from state_blobs(kind, table, part)
        elif parts:
            folder = Path(self.folder)
            with explain_unwritable(folder.parent, "what later batches need"):
                report.kept.append(write_state(kind, parts, folder, share.task, share.tasks))


_State: TypeAlias = Sequence[tuple[StateFile, Sequence[tuple[int, pa.Table]]]]


def _tables(state: _State, kind: StateKind) -> list[pa.Table]:
    return [table for file, own in state if file.kind is kind for _, table in own]


def _no_spans() -> pa.Table:
    return check_spans(pa.table({}), 0).rows
