"""The three steps of a batch, as functions on blobs; they run on the executors.

- :class:`ReadStep` reads segments, checks their rows, aggregates events (L1), and reduces spans to
  plain columns.
- :class:`SpanStep` gets all spans of some traces: it drops those that were delivered before, turns
  the others into rows of event types, finds who called whom, and aggregates (L1).
- :class:`MergeStep` gets all deltas of some entities, and merges them (L2).

What a step returns depends on its input only, not on the order in which blobs arrive: a task that
runs again returns the same.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark import TaskContext

from batchmill.aggregate import (
    STATEMENT_SOURCE,
    AggregationSettings,
    Aggregator,
    Deltas,
    SlowestStatements,
    TopNThresholds,
    from_arrow,
    is_deltas,
    is_statements,
    rows_by_minute,
    statements_to_arrow,
    to_arrow,
)
from batchmill.sources import Catalog
from batchmill.spans import (
    broker_rows,
    combine,
    compact,
    direct_rows,
    drop_duplicates,
    hash64,
    ids_of,
    link,
    merge_ids,
    merge_statements,
    merge_topn,
    part_of,
    relation_rows,
    statement_stats,
    topn_records,
)
from batchmill.spark.batch.blobs import Blob, Kind, read_blobs, write_blobs
from batchmill.spark.batch.statefiles import (
    Parts,
    Share,
    StateFile,
    StateKind,
    StatePiece,
    by_part,
    concat,
    read_state,
    trace_parts,
    write_hidden,
    write_state,
)
from batchmill.spark.input.deltas import (
    AHEAD,
    DeltaReader,
    ReadDeltas,
    ReadStatements,
    UnusableError,
    events_in,
    read_statements,
)
from batchmill.spark.input.quarantine import explain_unwritable
from batchmill.spark.input.rows import (
    REASON,
    SPAN,
    CheckedRows,
    ColumnTypeError,
    check_rows,
    check_spans,
    open_segment,
    read_rows,
    read_spans,
)
from batchmill.spark.input.segments import BadSegment, read_segment, source_of

DUPLICATE = "same trace and span id"
"""The reason of the counter ``duplicates``; one for all, so that it does not depend on batches."""
_ROWS_AT_ONCE, _BYTES_AT_ONCE = 100_000, 128 * 2**20
"""How much a task checks and aggregates at a time: its memory grows with that."""


@dataclass
class TaskReport:
    """What tasks count; the driver adds the reports up."""

    segments: int = 0
    """Segments that could be read."""
    spans: int = 0
    """Spans that went from the first step to the second."""
    events: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Rows of events by event type and minute (``yyyyMMddHHmm``)."""
    derived: Counter[tuple[str, int]] = field(default_factory=Counter)
    """The same of rows that spans gave."""
    counters: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """The store's counters, as far as tasks know them."""
    bad: list[BadSegment] = field(default_factory=list)
    kept: list[StatePiece] = field(default_factory=list)
    """The state that this batch keeps."""
    invalid: list[tuple[str, str]] = field(default_factory=list)
    """Files of invalid rows, with the event type of each."""

    def add(self, other: TaskReport) -> None:
        """Add what another task has counted."""
        self.segments += other.segments
        self.spans += other.spans
        for name in ("events", "derived", "counters"):
            getattr(self, name).update(getattr(other, name))
        self.bad += other.bad
        self.kept += other.kept
        self.invalid += other.invalid


@dataclass(frozen=True)
class TaskPlan:
    """What the steps of every batch of a stream need."""

    catalog: Catalog
    aggregators: Mapping[str, Aggregator]
    """By event type: those that a metric reads."""
    attributes: Collection[str] | None
    """The keys of attributes that metrics look up; None: some metric reads all of them."""
    settings: AggregationSettings
    parts: int
    """Into how many shares traces and entities are divided."""

    @property
    def top_n(self) -> int:
        """How many of the slowest statements are kept."""
        return self.settings.top_n

    @functools.cached_property
    def thresholds(self) -> TopNThresholds:
        """Above how many milliseconds statements are slow."""
        return self.settings.thresholds()

    @functools.cached_property
    def readers(self) -> dict[str, DeltaReader]:
        """Readers of deltas that processes have made themselves, by event type."""
        return {source: DeltaReader(own) for source, own in self.aggregators.items()}

    @property
    def reads_maps(self) -> bool:
        """Whether metrics look up attributes that have no column of their own."""
        return self.attributes is None or bool(self.attributes)


class Shipped:
    """A plan on its way to the executors, which unpack it once for all their tasks."""

    def __init__(self, plan: TaskPlan) -> None:
        self._data = pickle.dumps(plan)

    @property
    def plan(self) -> TaskPlan:
        """The plan."""
        return _unpacked(self._data)


@functools.lru_cache(8)
def _unpacked(data: bytes) -> TaskPlan:
    pa.set_cpu_count(1)  # a task has one core
    # Of Arrow's allocators, this one takes the least time in the system.
    with contextlib.suppress(NotImplementedError):
        pa.set_memory_pool(pa.jemalloc_memory_pool())
    plan: TaskPlan = pickle.loads(data)
    return plan


@dataclass(frozen=True)
class Limits:
    """What depends on when a batch is made."""

    latest_us: int
    """The latest valid start, in microseconds since 1970."""
    late_before_us: int | None
    """Spans that start before this are late; None: none is."""
    quarantine: str
    """Where tasks write invalid rows: a folder in the quarantine."""


@dataclass(frozen=True)
class ReadStep:
    """Reads the segments of a batch: a row of its input has the number of a slice of them."""

    shipped: Shipped
    limits: Limits
    slices: Sequence[Sequence[str]]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Spans, deltas, and what the tasks have counted."""
        for batch in batches:
            for number in batch.column(0).to_pylist():
                reader = _Reader(self.shipped.plan, self.limits)
                yield from write_blobs(reader.read(self.slices[number]))


@dataclass(frozen=True)
class ReadFrameStep:
    """Checks and aggregates rows of one event type that lie in no segment."""

    shipped: Shipped
    limits: Limits
    source: str

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The same blobs as those of segments."""
        reader = _Reader(self.shipped.plan, self.limits)
        tables = (pa.Table.from_batches([batch]) for batch in batches)
        yield from write_blobs(reader.check(self.source, tables))


@dataclass(frozen=True)
class Unused:
    """A segment of an event type that no metric reads."""

    rows: int


Content: TypeAlias = CheckedRows | ReadDeltas | ReadStatements | Unused
"""What a good segment holds."""


class _Reader:
    """Turns rows into blobs; events are aggregated, spans reduced to plain columns."""

    def __init__(self, plan: TaskPlan, limits: Limits) -> None:
        self._plan = plan
        self._limits = limits
        self._report = TaskReport()
        self._rows: dict[str, list[pa.Table]] = defaultdict(list)
        self._invalid: dict[str, list[pa.Table]] = defaultdict(list)
        self._slowest = SlowestStatements(plan.top_n, plan.thresholds)

    def read(self, paths: Iterable[str]) -> Iterator[Blob]:
        """The blobs of segments, and a report.

        Raises :class:`PipelineError` if a segment cannot be read now, though it may be good.
        """
        for path in paths:
            content = read_segment(path, functools.partial(self._content, path))
            if isinstance(content, BadSegment):
                self._report.bad.append(content)
                continue
            self._report.segments += 1
            yield from self._take(source_of(path), content)
        yield from self._rest()
        yield Blob.of_report(self._report)

    def check(self, source: str, tables: Iterable[pa.Table]) -> Iterator[Blob]:
        """The blobs of rows that lie in no segment, and a report."""
        for table in tables:
            yield from self._add(source, self._check(source, table))
        yield from self._rest()
        yield Blob.of_report(self._report)

    def _check(self, source: str, table: pa.Table) -> CheckedRows:
        if source == SPAN.name:
            return check_spans(table, self._limits.latest_us)
        plan = self._plan.aggregators[source].plan
        return check_rows(plan.source, plan.columns, table, self._limits.latest_us)

    def _content(self, path: str, opened: pa.NativeFile) -> Content | BadSegment:
        """What is in a file. It may be read again after a fault, so nothing is counted here."""
        source, plan, latest_us = source_of(path), self._plan, self._limits.latest_us
        file = open_segment(opened, plan.catalog.sources.get(source, SPAN))
        schema, rows = file.schema_arrow, file.metadata.num_rows
        try:
            if is_deltas(schema):
                table = pq.ParquetFile(opened).read(use_threads=False)  # no text as a dictionary
                if source == STATEMENT_SOURCE and is_statements(schema):
                    return read_statements(table, plan.top_n, plan.thresholds, latest_us)
                return self._deltas(path, table)
            if source == SPAN.name:
                return read_spans(file, latest_us, maps=plan.reads_maps)
            if source in plan.aggregators:
                own = plan.aggregators[source].plan
                return read_rows(file, own.source, own.columns, latest_us)
        except ColumnTypeError as error:
            return BadSegment(path, source, "wrong type", str(error), rows)
        except UnusableError as error:
            return BadSegment(path, source, error.reason, str(error), error.rows)
        return Unused(rows) if source in plan.catalog.sources else _unknown(path, rows)

    def _deltas(self, path: str, table: pa.Table) -> ReadDeltas | BadSegment:
        source, plan = source_of(path), self._plan
        if source not in plan.catalog.sources:
            return _unknown(path, events_in(table))
        # Without any metric of the source, the reader says which ones are missing here.
        reader = plan.readers.get(source) or DeltaReader(
            Aggregator(plan.catalog.source(source), ())
        )
        return reader.read(table, self._limits.latest_us)

    def _take(self, source: str, content: Content) -> Iterator[Blob]:
        """Count and pass on what is in a segment."""
        match content:
            case CheckedRows():
                yield from self._add(source, content)
            case ReadDeltas():
                yield from self._add_deltas(source, content)
            case ReadStatements():
                self._slowest.merge(content.statements)
                self._report.counters["rows", STATEMENT_SOURCE, ""] += content.count
            case Unused(rows):
                self._report.counters["unused", source, "no metric reads it"] += rows

    def _add(self, source: str, checked: CheckedRows) -> Iterator[Blob]:
        """Collect valid rows until there are enough; the blobs that this gives."""
        if checked.invalid is not None:
            self._set_aside(source, checked.invalid)
        rows = self._rows[source]
        rows.append(checked.rows)
        if _are_many(rows):
            yield from self._flush(source)

    def _set_aside(self, source: str, invalid: pa.Table) -> None:
        """Collect invalid rows for the quarantine, and count them by reason."""
        for reason, count in Counter(invalid[REASON].to_pylist()).items():
            self._report.counters["quarantined", source, reason] += count
        tables = self._invalid[source]
        tables.append(invalid)
        if _are_many(tables):
            self._write_invalid(source)

    def _write_invalid(self, source: str) -> None:
        tables = self._invalid.pop(source)
        invalid = pa.concat_tables(tables, promote_options="permissive")
        folder = Path(self._limits.quarantine)
        with explain_unwritable(folder.parent, f"rows of {source}"):
            file = write_hidden(invalid, folder / source, pq.write_table)
        self._report.invalid.append((source, str(file)))

    def _rest(self) -> Iterator[Blob]:
        for source in list(self._rows):
            yield from self._flush(source)
        for source in list(self._invalid):
            self._write_invalid(source)
        if self._slowest.runs or self._slowest.records:
            yield from Blob.of(Kind.SLOWEST, statements_to_arrow(self._slowest))

    def _flush(self, source: str) -> Iterator[Blob]:
        tables = [table for table in self._rows.pop(source) if table.num_rows]
        if not tables:
            return
        rows = concat(tables)
        if source == SPAN.name:
            spans = compact(rows, keys=self._plan.attributes)
            self._report.spans += spans.num_rows
            yield from _split(Kind.SPANS, spans, trace_parts(spans, self._plan.parts))
            return
        made = self._plan.aggregators[source].make(rows)
        if made.reasons:  # what can be seen by the metrics only, such as a number inside a struct
            invalid = rows.filter(pa.array(~made.reasons.valid))
            self._set_aside(source, invalid.append_column(REASON, made.reasons.invalid))
        deltas = made.deltas
        for minute, count in rows_by_minute(deltas).items():
            self._report.events[source, minute] += count
        yield from _delta_blobs(deltas, self._plan.aggregators[source], self._plan.parts)

    def _add_deltas(self, source: str, read: ReadDeltas) -> Iterator[Blob]:
        if read.ahead is not None:
            self._report.counters["quarantined", source, AHEAD] += read.ahead_rows
            yield from Blob.of(Kind.AHEAD, read.ahead, source=source)
        if source in self._plan.aggregators:
            for minute, count in rows_by_minute(read.deltas).items():
                self._report.events[source, minute] += count
            yield from _delta_blobs(read.deltas, self._plan.aggregators[source], self._plan.parts)


def _are_many(tables: Sequence[pa.Table]) -> bool:
    rows = sum(int(table.num_rows) for table in tables)
    return rows >= _ROWS_AT_ONCE or sum(int(table.nbytes) for table in tables) >= _BYTES_AT_ONCE


def _unknown(path: str, rows: int) -> BadSegment:
    source = source_of(path)
    detail = f"there is no event type named {source!r}"
    return BadSegment(path, source, "unknown source", detail, rows)


@dataclass(frozen=True)
class SpanStep:
    """Processes the spans of some traces, with what earlier batches have kept of them."""

    shipped: Shipped
    limits: Limits
    tick: int
    """The batch, as pending spans are marked with it."""
    expire_before: int | None
    """Pending spans that are marked with this or less wait no longer."""
    dedup: bool
    tasks: int
    """How many tasks share the traces."""
    files: Sequence[StateFile]
    """The state of earlier batches."""
    folder: str
    """Where this batch writes its state."""

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Deltas, TopN, and what was counted; blobs without spans go through."""
        context = TaskContext.get()
        return self.run(0 if context is None else context.partitionId(), batches)

    def run(self, task: int, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The same, as that task."""
        spans = []
        for blob in read_blobs(batches):
            if blob.kind is Kind.SPANS:
                spans.append(blob.table)
            else:
                yield from write_blobs([blob])
        yield from write_blobs(self._process(task, spans))

    def _process(self, task: int, tables: Sequence[pa.Table]) -> Iterator[Blob]:
        plan, report = self.shipped.plan, TaskReport()
        share = Share(plan.parts, self.tasks, task)
        state = [(file, read_state(file, share)) for file in self.files]
        spans = self._unique(tables, _tables(state, StateKind.IDS), report)
        pending = _tables(state, StateKind.PENDING)
        # Not copied into one piece: most of them have no partner in this batch.
        earlier = pa.concat_tables(pending) if pending else None
        links = link(spans, earlier, self.tick, self.expire_before)
        wanted = plan.aggregators.keys()
        sources = [
            direct_rows(spans, wanted),
            relation_rows(links.relations, wanted),
            broker_rows(links.accessed, wanted),
        ]
        for rows in sources:
            for source, table in rows.items():
                deltas = plan.aggregators[source].make(table).deltas
                for minute, count in rows_by_minute(deltas).items():
                    report.derived[source, minute] += count
                yield from _delta_blobs(deltas, plan.aggregators[source], plan.parts)
        for reason, count in links.unresolved.items():
            report.counters["unresolved", SPAN.name, reason] += count
        records = topn_records(spans, plan.top_n, plan.thresholds)
        for kind, table in ((Kind.TOPN, records), (Kind.STATEMENTS, statement_stats(spans))):
            yield from _split(kind, table, part_of(hash64(table["entity"]), plan.parts))
        summary = by_part(links.summary, trace_parts(links.summary, plan.parts))
        self._keep(StateKind.PENDING, summary, state, report)
        if self.dedup:
            ids = spans.select(["trace_id", "span_id"])
            parts = by_part(ids, trace_parts(ids, plan.parts))
            fresh = ((part, ids_of(rows)) for part, rows in parts)
            self._keep(StateKind.IDS, fresh, state, report)
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
        report: TaskReport,
    ) -> None:
        """Write what later batches need, and the earlier state that is merged with it."""
        tables: dict[int, list[pa.Table]] = defaultdict(list)
        earlier = (pair for file, own in state if file.kind is kind and file.merged for pair in own)
        for part, table in chain(fresh, earlier):
            tables[part].append(table)
        merge = merge_ids if kind is StateKind.IDS else concat
        parts = {part: merge(several) for part, several in sorted(tables.items())}
        if parts:
            folder = Path(self.folder)
            with explain_unwritable(folder.parent, "what later batches need"):
                report.kept.append(write_state(kind, parts, folder))


@dataclass(frozen=True)
class MergeStep:
    """Merges the deltas of some entities (L2)."""

    shipped: Shipped

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """One table of deltas for each event type; everything else goes through."""
        plan = self.shipped.plan
        deltas: dict[str, list[Deltas]] = defaultdict(list)
        merged: dict[Kind, list[pa.Table]] = defaultdict(list)
        report = TaskReport()
        for blob in read_blobs(batches):
            if blob.kind is Kind.DELTAS:
                aggregator = plan.aggregators[blob.source]
                deltas[blob.source].append(from_arrow(blob.table, aggregator.plan))
            elif blob.kind in (Kind.TOPN, Kind.STATEMENTS):
                merged[blob.kind].append(blob.table)
            elif blob.kind is Kind.REPORT:
                report.add(blob.report)
            else:
                yield from write_blobs([blob])
        for source, several in deltas.items():
            aggregator = plan.aggregators[source]
            table = to_arrow(aggregator.merge(several), aggregator.plan)
            yield from write_blobs(Blob.of(Kind.DELTAS, table, source=source))
        if tables := merged.get(Kind.TOPN):
            yield from write_blobs(Blob.of(Kind.TOPN, merge_topn(tables, plan.top_n)))
        if tables := merged.get(Kind.STATEMENTS):
            yield from write_blobs(Blob.of(Kind.STATEMENTS, merge_statements(tables)))
        yield from write_blobs([Blob.of_report(report)])


_State: TypeAlias = Sequence[tuple[StateFile, Sequence[tuple[int, pa.Table]]]]


def _tables(state: _State, kind: StateKind) -> list[pa.Table]:
    return [table for file, own in state if file.kind is kind for _, table in own]


def _split(kind: Kind, table: pa.Table, parts: Parts, *, source: str = "") -> Iterator[Blob]:
    """The blobs of a table's rows, by part."""
    for part, rows in by_part(table, parts):
        yield from Blob.of(kind, rows, source=source, part=part)


def _delta_blobs(deltas: Deltas, aggregator: Aggregator, parts: int) -> Iterator[Blob]:
    if not len(deltas):
        return
    places = part_of(combine(*map(hash64, deltas.roles)), parts)
    table = to_arrow(deltas, aggregator.plan)
    yield from _split(Kind.DELTAS, table, places, source=aggregator.plan.source.name)


def _no_spans() -> pa.Table:
    return check_spans(pa.table({}), 0).rows
