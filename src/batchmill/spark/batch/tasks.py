"""The first two steps of a batch, as functions on blobs; they run on the executors.

- :class:`ReadStep` reads segments, checks their rows, aggregates events (L1), and reduces spans to
  plain columns.
- :class:`SpanStep` gets all spans of some traces: it drops those that were delivered before, turns
  the others into rows of event types, finds who called whom, and aggregates (L1).

The third, which gets all deltas of some entities, is in :mod:`batchmill.spark.batch.merge`.

What a step returns depends on its input only, not on the order in which blobs arrive: a task that
runs again returns the same.
"""

from __future__ import annotations

import contextlib
import functools
import gc
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
    Made,
    Overflow,
    SlowestStatements,
    TopNThresholds,
    is_deltas,
    is_statements,
    rows_by_minute,
    statements_to_arrow,
    to_arrow,
)
from batchmill.sources import (
    Catalog,
)
from batchmill.spans import (
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
from batchmill.spark.batch.blobs import Blob, Kind, read_blobs, write_blobs
from batchmill.spark.batch.parts import Parts, Share, by_part, entity_parts, text_parts, trace_parts
from batchmill.spark.files.statefiles import (
    StateFile,
    StateKind,
    StatePiece,
    concat,
    read_state,
    state_blobs,
    state_of,
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
    with_other_columns,
)
from batchmill.spark.input.segments import BadSegment, read_segment, source_of
from batchmill.store import Layout, Outgoing, StoreError

DUPLICATE = "same trace and span id"
"""The reason of the counter ``duplicates``; one for all, so that it does not depend on batches."""
_ROWS_AT_ONCE, _BYTES_AT_ONCE = 100_000, 128 * 2**20
"""How much a task checks and aggregates at a time: its memory grows with that."""
_DELTA_BYTES_AT_ONCE = 64 * 2**20
"""How many deltas a task collects: fewer and larger blobs cost less."""


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
    newest: int = 0
    """The newest minute of statements that processes have counted themselves; 0: of none."""
    bad: list[BadSegment] = field(default_factory=list)
    kept: list[StatePiece] = field(default_factory=list)
    """The state that this batch keeps."""
    invalid: list[tuple[str, str]] = field(default_factory=list)
    """Files of invalid rows, with the event type of each."""
    invalid_schemas: list[tuple[str, bytes]] = field(default_factory=list)
    """The schemas of invalid rows that are in blobs, with the event type of each."""
    outgoing: list[Outgoing] = field(default_factory=list)
    """Files of changes for exporters."""
    failures: list[StoreError] = field(default_factory=list)
    """Why parts could not be committed."""
    answering: set[str] = field(default_factory=set)
    """Hosts outside that somebody has answered for."""
    overflow: Overflow = field(default_factory=Overflow)
    """What the limit of new entities has done."""

    def add(self, other: TaskReport) -> None:
        """Add what another task has counted."""
        self.segments += other.segments
        self.spans += other.spans
        for name in ("events", "derived", "counters"):
            getattr(self, name).update(getattr(other, name))
        self.newest = max(self.newest, other.newest)
        self.answering |= other.answering
        for name in ("bad", "kept", "invalid", "invalid_schemas", "outgoing", "failures"):
            getattr(self, name).extend(getattr(other, name))
        self.overflow.add(other.overflow)


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
    layout: Layout = field(default_factory=lambda: Layout({}))
    """Where the store keeps the states of metrics."""
    normalise_names: bool = True
    """Whether names of spans that look like URLs have no ids."""

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
        """The plan; a task asks for it when it begins."""
        plan = _unpacked(self._data)
        # After every task, Spark's worker looks for garbage in all objects: modules and plans that
        # the tasks before have loaded cost it tens of milliseconds each time, and are no garbage.
        gc.freeze()
        return plan


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
    quarantine: str | None
    """Where tasks write invalid rows: a folder in the quarantine. None: they return them."""
    tasks: int | None = None
    """How many tasks share the parts after a shuffle: all parts of one go into one blob, because
    small blobs cost more than their rows. None: each part has its own."""


@dataclass(frozen=True)
class ReadStep:
    """Reads the segments of a batch: a row of its input has the number of a slice of them."""

    shipped: Shipped
    limits: Limits
    slices: Sequence[Sequence[str]]
    rows_only: bool = False
    """Whether to return the rows of events, in place of deltas, and to write nothing."""

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Spans, deltas, and what the tasks have counted."""
        for batch in batches:
            for number in batch.column(0).to_pylist():
                reader = _Reader(self.shipped.plan, self.limits, rows_only=self.rows_only)
                yield from write_blobs(reader.read((path, None) for path in self.slices[number]))


@dataclass(frozen=True)
class ReadContentStep:
    """Reads segments that Spark has opened: a row of its input has the path and the content."""

    shipped: Shipped
    limits: Limits
    rows_only: bool = False

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The same blobs as those of files."""
        reader = _Reader(self.shipped.plan, self.limits, rows_only=self.rows_only)
        segments = (
            (path.as_py(), content.as_buffer())
            for batch in batches
            for path, content in zip(batch["path"], batch["content"], strict=True)
        )
        yield from write_blobs(reader.read(segments))


@dataclass(frozen=True)
class ReadFrameStep:
    """Checks and aggregates rows of one event type that lie in no segment."""

    shipped: Shipped
    limits: Limits
    source: str
    rows_only: bool = False

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The same blobs as those of segments."""
        reader = _Reader(self.shipped.plan, self.limits, rows_only=self.rows_only)
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

    def __init__(self, plan: TaskPlan, limits: Limits, *, rows_only: bool = False) -> None:
        self._plan = plan
        self._limits = limits
        self._rows_only = rows_only
        self._report = TaskReport()
        self._rows: dict[str, list[pa.Table]] = defaultdict(list)
        self._deltas: dict[str, list[Deltas]] = defaultdict(list)
        self._delta_bytes: Counter[str] = Counter()
        self._invalid: dict[str, list[pa.Table]] = defaultdict(list)
        self._slowest = SlowestStatements(plan.top_n, plan.thresholds)

    def read(self, segments: Iterable[tuple[str, pa.Buffer | None]]) -> Iterator[Blob]:
        """The blobs of segments, and a report.

        A segment has its path and, if it is not a local file, its content. Raises
        :class:`PipelineError` if one cannot be read now, though it may be good.
        """
        for path, data in segments:
            content = read_segment(path, functools.partial(self._content, path), data)
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
        plan, latest_us = self._plan.aggregators[source].plan, self._limits.latest_us
        checked = check_rows(plan.source, plan.columns, table, latest_us)
        if not self._rows_only:
            return checked
        return CheckedRows(with_other_columns(checked, plan.source, table, latest_us), None)

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
                return self._read_deltas(path, table)
            if source == SPAN.name:
                return read_spans(file, latest_us, maps=plan.reads_maps)
            if source in plan.aggregators:
                own = plan.aggregators[source].plan
                if self._rows_only:
                    return self._check(source, file.read(use_threads=False))
                return read_rows(file, own.source, own.columns, latest_us)
        except ColumnTypeError as error:
            return BadSegment(path, source, "wrong type", str(error), rows)
        except UnusableError as error:
            return BadSegment(path, source, error.reason, str(error), error.rows)
        return Unused(rows) if source in plan.catalog.sources else _unknown(path, rows)

    def _read_deltas(self, path: str, table: pa.Table) -> ReadDeltas | BadSegment:
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
            case _ if self._rows_only:  # there are no rows in it
                pass
            case ReadDeltas():
                yield from self._add_deltas(source, content)
            case ReadStatements():
                self._slowest.merge(content.statements)
                self._report.counters["rows", STATEMENT_SOURCE, ""] += content.count
            case Unused(rows):
                self._report.counters["unused", source, "no metric reads it"] += rows

    def _add(self, source: str, checked: CheckedRows) -> Iterator[Blob]:
        """Collect valid rows until there are enough; the blobs that this gives."""
        if checked.invalid is not None and not self._rows_only:
            yield from self._set_aside(source, checked.invalid)
        rows = self._rows[source]
        rows.append(checked.rows)
        if _are_many(rows):
            yield from self._flush(source)

    def _set_aside(self, source: str, invalid: pa.Table) -> Iterator[Blob]:
        """Collect invalid rows for the quarantine, and count them by reason."""
        for reason, count in Counter(invalid[REASON].to_pylist()).items():
            self._report.counters["quarantined", source, reason] += count
        tables = self._invalid[source]
        tables.append(invalid)
        if _are_many(tables):
            yield from self._pass_invalid(source)

    def _pass_invalid(self, source: str) -> Iterator[Blob]:
        """Write the invalid rows to the quarantine, or return them for it."""
        tables = self._invalid.pop(source)
        invalid = pa.concat_tables(tables, promote_options="permissive")
        if self._limits.quarantine is None:
            self._report.invalid_schemas.append((source, invalid.schema.serialize().to_pybytes()))
            yield from Blob.of(Kind.INVALID, invalid, source=source)
            return
        folder = Path(self._limits.quarantine)
        with explain_unwritable(folder.parent, f"rows of {source}"):
            file = write_hidden(invalid, folder / source, pq.write_table)
        self._report.invalid.append((source, str(file)))

    def _rest(self) -> Iterator[Blob]:
        for source in list(self._rows):
            yield from self._flush(source)
        for source in list(self._deltas):
            yield from self._send_deltas(source)
        for source in list(self._invalid):
            yield from self._pass_invalid(source)
        if self._slowest.runs or self._slowest.records:
            table = statements_to_arrow(self._slowest)
            parts = text_parts(table["entity"], self._plan.parts)
            yield from _split(Kind.SLOWEST, table, parts, self._limits)

    def _flush(self, source: str) -> Iterator[Blob]:
        tables = [table for table in self._rows.pop(source) if table.num_rows]
        if not tables:
            return
        rows = concat(tables)
        if source == SPAN.name:
            plan = self._plan
            spans = compact(rows, keys=plan.attributes, normalise=plan.normalise_names)
            self._report.spans += spans.num_rows
            parts = trace_parts(spans, self._plan.parts)
            yield from _split(Kind.SPANS, spans, parts, self._limits)
            return
        made = self._plan.aggregators[source].make(rows)
        if self._rows_only:
            yield from _row_blobs(source, rows, made)
            return
        if made.reasons:  # what can be seen by the metrics only, such as a number inside a struct
            invalid = rows.filter(pa.array(~made.reasons.valid))
            invalid = invalid.append_column(REASON, made.reasons.invalid)
            yield from self._set_aside(source, invalid)
        yield from self._collect(source, made.deltas)

    def _collect(self, source: str, deltas: Deltas) -> Iterator[Blob]:
        """Count deltas and collect them until there are enough."""
        for minute, count in rows_by_minute(deltas).items():
            self._report.events[source, minute] += count
        self._deltas[source].append(deltas)
        self._delta_bytes[source] += deltas.nbytes
        if self._delta_bytes[source] >= _DELTA_BYTES_AT_ONCE:
            yield from self._send_deltas(source)

    def _send_deltas(self, source: str) -> Iterator[Blob]:
        aggregator = self._plan.aggregators[source]
        deltas = aggregator.merge(self._deltas.pop(source))
        del self._delta_bytes[source]
        yield from _delta_blobs(deltas, self._plan, source, self._limits)

    def _add_deltas(self, source: str, read: ReadDeltas) -> Iterator[Blob]:
        if read.ahead is not None:
            self._report.counters["quarantined", source, AHEAD] += read.ahead_rows
            yield from Blob.of(Kind.AHEAD, read.ahead, source=source)
        if source in self._plan.aggregators:
            yield from self._collect(source, read.deltas)


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
    """The state of earlier batches, as far as it is in local files; the rest comes as blobs."""
    folder: str | None
    """Where tasks write the state of this batch. None: they return it."""
    rows_only: bool = False
    """Whether to return rows of event types, in place of deltas, and to write nothing."""
    answering: frozenset[str] | None = None
    """The hosts outside that have answered; None: not known."""

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Deltas, TopN, and what was counted; blobs without spans go through."""
        context = TaskContext.get()
        return self.run(0 if context is None else context.partitionId(), batches)

    def run(self, task: int, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The same, as that task."""
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
        links = link(spans, earlier, self.tick, self.expire_before, self.answering)
        report.answering |= links.answering
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
                    yield from _row_blobs(source, table, made)
                    continue
                deltas = made.deltas
                for minute, count in rows_by_minute(deltas).items():
                    report.derived[source, minute] += count
                yield from _delta_blobs(deltas, plan, source, self.limits)
        if self.rows_only:
            return
        for reason, count in links.unresolved.items():
            report.counters["unresolved", SPAN.name, reason] += count
        records = topn_records(spans, plan.top_n, plan.thresholds)
        for kind, table in ((Kind.TOPN, records), (Kind.STATEMENTS, statement_stats(spans))):
            parts = text_parts(table["entity"], plan.parts)
            yield from _split(kind, table, parts, self.limits)
        summary = by_part(links.summary, trace_parts(links.summary, plan.parts))
        yield from self._keep(StateKind.PENDING, summary, state, report)
        if self.dedup:
            ids = spans.select(["trace_id", "span_id"])
            fresh = (
                (part, ids_of(rows)) for part, rows in by_part(ids, trace_parts(ids, plan.parts))
            )
            yield from self._keep(StateKind.IDS, fresh, state, report)
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
                report.kept.append(write_state(kind, parts, folder))


_State: TypeAlias = Sequence[tuple[StateFile, Sequence[tuple[int, pa.Table]]]]


def _tables(state: _State, kind: StateKind) -> list[pa.Table]:
    return [table for file, own in state if file.kind is kind for _, table in own]


def _split(
    kind: Kind, table: pa.Table, parts: Parts, limits: Limits, *, source: str = ""
) -> Iterator[Blob]:
    """The blobs of a table's rows, by part, or by the task that gets the part."""
    for part, rows in by_part(table, parts if limits.tasks is None else parts % limits.tasks):
        yield from Blob.of(kind, rows, source=source, part=part)


def _row_blobs(source: str, rows: pa.Table, made: Made) -> Iterator[Blob]:
    """The rows that deltas were made of."""
    valid = rows.filter(pa.array(made.reasons.valid)) if made.reasons else rows
    yield from Blob.of(Kind.ROWS, valid, source=source)


def _delta_blobs(deltas: Deltas, plan: TaskPlan, source: str, limits: Limits) -> Iterator[Blob]:
    if not len(deltas):
        return
    own = plan.aggregators[source].plan
    parts = entity_parts(deltas.roles, own.source, plan.parts)
    yield from _split(Kind.DELTAS, to_arrow(deltas, own), parts, limits, source=source)


def _no_spans() -> pa.Table:
    return check_spans(pa.table({}), 0).rows
