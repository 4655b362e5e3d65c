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

import functools
import pickle
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

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
from batchmill.spark.errors import PipelineError
from batchmill.spark.input.deltas import AHEAD, DeltaReader, UnusableError, read_statements
from batchmill.spark.input.rows import (
    REASON,
    SPAN,
    CheckedRows,
    ColumnTypeError,
    check_rows,
    check_spans,
    read_rows,
    read_spans,
)
from batchmill.spark.input.segments import BadSegment, read_segment, source_of

Parts: TypeAlias = npt.NDArray[Any]
"""The part of each row."""
_AT_ONCE = 500_000
"""How many rows a task checks and aggregates at a time: its memory grows with that."""


@dataclass
class TaskReport:
    """What tasks count; the driver adds the reports up."""

    segments: int = 0
    """Segments that could be read."""
    events: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Rows of events by event type and minute (``yyyyMMddHHmm``)."""
    derived: Counter[tuple[str, int]] = field(default_factory=Counter)
    """The same of rows that spans gave."""
    counters: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """The store's counters, as far as tasks know them."""
    bad: list[BadSegment] = field(default_factory=list)
    kept: Counter[str] = field(default_factory=Counter)
    """Rows of the state that this batch keeps, by kind."""
    fault: str = ""
    """Why a segment cannot be read now, though it may be good; empty: all could be read."""

    def add(self, other: TaskReport) -> None:
        """Add what another task has counted."""
        self.segments += other.segments
        for name in ("events", "derived", "counters", "kept"):
            getattr(self, name).update(getattr(other, name))
        self.bad += other.bad
        self.fault = self.fault or other.fault


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
    plan: TaskPlan = pickle.loads(data)
    return plan


@dataclass(frozen=True)
class Limits:
    """What depends on when a batch is made."""

    latest_us: int
    """The latest valid start, in microseconds since 1970."""
    late_before_us: int | None
    """Spans that start before this are late; None: none is."""


@dataclass(frozen=True)
class OldState:
    """State as version 1 kept it: rows of spans in a folder of Parquet files."""

    kind: Kind
    file: str
    """Its name."""
    folder: str


@dataclass(frozen=True)
class ReadStep:
    """Reads the segments of a batch: a row of its input has the number of a slice of them."""

    shipped: Shipped
    limits: Limits
    slices: Sequence[Sequence[str]]
    old: Sequence[OldState] = ()
    """The first slice's task reads these, too."""

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Blobs of all kinds but TopN."""
        for batch in batches:
            for number in batch.column(0).to_pylist():
                reader = _Reader(self.shipped.plan, self.limits)
                yield from write_blobs(reader.read(self.slices[number]))
                if number == 0:
                    yield from write_blobs(
                        blob for old in self.old for blob in _old_blobs(old, self.shipped.plan)
                    )


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


class _Reader:
    """Turns rows into blobs; events are aggregated, spans reduced to plain columns."""

    def __init__(self, plan: TaskPlan, limits: Limits) -> None:
        self._plan = plan
        self._limits = limits
        self._report = TaskReport()
        self._rows: dict[str, list[pa.Table]] = defaultdict(list)
        self._slowest = SlowestStatements(plan.top_n, plan.thresholds)

    def read(self, paths: Iterable[str]) -> Iterator[Blob]:
        """The blobs of segments, and a report."""
        try:
            for path in paths:
                blobs = read_segment(path, functools.partial(self._read, path))
                if isinstance(blobs, BadSegment):
                    self._report.bad.append(blobs)
                    continue
                self._report.segments += 1
                yield from blobs
            yield from self._rest()
        except PipelineError as error:
            self._report.fault = str(error)
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

    def _read(self, path: str, file: pq.ParquetFile) -> list[Blob] | BadSegment:
        source, rows = source_of(path), file.metadata.num_rows
        schema = file.schema_arrow
        latest_us = self._limits.latest_us
        try:
            if source == STATEMENT_SOURCE and is_statements(schema):
                return self._read_statements(path, file.read(use_threads=False))
            if is_deltas(schema):
                return self._read_deltas(path, file.read(use_threads=False))
            if source == SPAN.name:
                maps = self._plan.reads_maps
                return list(self._add(source, read_spans(file, latest_us, maps=maps)))
            if source in self._plan.aggregators:
                plan = self._plan.aggregators[source].plan
                checked = read_rows(file, plan.source, plan.columns, latest_us)
                return list(self._add(source, checked))
        except ColumnTypeError as error:
            return BadSegment(path, source, "wrong type", str(error), rows)
        if source not in self._plan.catalog.sources:
            return self._unknown(path, source, rows)
        self._report.counters["unused", source, "no metric reads it"] += rows
        return []

    def _unknown(self, path: str, source: str, rows: int) -> BadSegment:
        detail = f"there is no event type named {source!r}"
        return BadSegment(path, source, "unknown source", detail, rows)

    def _add(self, source: str, checked: CheckedRows) -> Iterator[Blob]:
        """Collect valid rows until there are enough; the blobs that this gives."""
        if checked.invalid is not None:
            for reason, count in Counter(checked.invalid[REASON].to_pylist()).items():
                self._report.counters["quarantined", source, reason] += count
            yield from Blob.of(Kind.INVALID, checked.invalid, source=source)
        self._rows[source].append(checked.rows)
        if sum(table.num_rows for table in self._rows[source]) >= _AT_ONCE:
            yield from self._flush(source)

    def _rest(self) -> Iterator[Blob]:
        for source in list(self._rows):
            yield from self._flush(source)
        if self._slowest.runs or self._slowest.records:
            yield from Blob.of(Kind.SLOWEST, statements_to_arrow(self._slowest))

    def _flush(self, source: str) -> Iterator[Blob]:
        tables = [table for table in self._rows.pop(source) if table.num_rows]
        if not tables:
            return
        rows = concat(tables)
        if source == SPAN.name:
            spans = compact(rows, keys=self._plan.attributes)
            yield from _split(Kind.SPANS, spans, _trace_parts(spans, self._plan.parts))
            return
        deltas = self._plan.aggregators[source].make(rows).deltas
        for minute, count in rows_by_minute(deltas).items():
            self._report.events[source, minute] += count
        yield from _delta_blobs(deltas, self._plan.aggregators[source], self._plan.parts)

    def _read_deltas(self, path: str, table: pa.Table) -> list[Blob] | BadSegment:
        source = source_of(path)
        if source not in self._plan.catalog.sources:
            return self._unknown(path, source, table.num_rows)
        # Without any metric of the source, the reader says which ones are missing here.
        reader = self._plan.readers.get(source) or DeltaReader(
            Aggregator(self._plan.catalog.source(source), ())
        )
        try:
            read = reader.read(table, self._limits.latest_us)
        except UnusableError as error:
            return BadSegment(path, source, error.reason, str(error), error.rows)
        blobs: list[Blob] = []
        if read.ahead is not None:
            self._report.counters["quarantined", source, AHEAD] += read.ahead_rows
            blobs += Blob.of(Kind.AHEAD, read.ahead, source=source)
        if source in self._plan.aggregators:
            for minute, count in rows_by_minute(read.deltas).items():
                self._report.events[source, minute] += count
            blobs += _delta_blobs(read.deltas, reader.aggregator, self._plan.parts)
        return blobs

    def _read_statements(self, path: str, table: pa.Table) -> list[Blob] | BadSegment:
        plan = self._plan
        try:
            read = read_statements(table, plan.top_n, plan.thresholds, self._limits.latest_us)
        except UnusableError as error:
            return BadSegment(path, source_of(path), error.reason, str(error), error.rows)
        self._slowest.merge(read.statements)
        self._report.counters["rows", STATEMENT_SOURCE, ""] += read.count
        return []


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
    file: str | None
    """The name of the state that this batch writes; None: it writes none."""
    merged: Collection[tuple[Kind, str]] = ()
    """State that goes into this batch's, by kind and name: a batch gives both kinds one name."""

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Deltas, TopN, and the state that the batch keeps; what has no spans goes through."""
        blobs: dict[Kind, list[Blob]] = defaultdict(list)
        for blob in read_blobs(batches):
            if blob.kind is Kind.SPANS or blob.kind in (Kind.PENDING, Kind.IDS):
                blobs[blob.kind].append(blob)
            else:
                yield from write_blobs([blob])
        if blobs:
            yield from write_blobs(self._process(blobs))

    def _process(self, blobs: Mapping[Kind, Sequence[Blob]]) -> Iterator[Blob]:
        plan, report = self.shipped.plan, TaskReport()
        spans = self._unique(blobs, report)
        pending = [blob.table for blob in blobs.get(Kind.PENDING, ())]
        links = link(spans, concat(pending) if pending else None, self.tick, self.expire_before)
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
        if self.file is not None:
            # Also without new spans in this task: others have some, and earlier files are merged.
            yield from self._kept(self.file, Kind.PENDING, links.summary, blobs, report)
            if self.dedup:
                ids = spans.select(["trace_id", "span_id"])
                yield from self._kept(self.file, Kind.IDS, ids, blobs, report)
        yield Blob.of_report(report)

    def _unique(self, blobs: Mapping[Kind, Sequence[Blob]], report: TaskReport) -> pa.Table:
        """The spans that count."""
        tables = [blob.table for blob in blobs.get(Kind.SPANS, ())]
        spans = concat(tables) if tables else compact(_no_spans())
        if self.dedup:
            known = [blob.table for blob in blobs.get(Kind.IDS, ())]
            spans, dropped = drop_duplicates(spans, known)
            report.counters["duplicates", SPAN.name, DUPLICATE] += dropped
        report.counters["rows", SPAN.name, ""] += spans.num_rows
        if self.limits.late_before_us is not None and spans.num_rows:
            starts = pc.cast(spans["time"], pa.int64())
            late = pc.sum(pc.less(starts, self.limits.late_before_us)).as_py() or 0
            report.counters["late", SPAN.name, ""] += late
        return spans

    def _kept(
        self,
        file: str,
        kind: Kind,
        table: pa.Table,
        blobs: Mapping[Kind, Sequence[Blob]],
        report: TaskReport,
    ) -> Iterator[Blob]:
        """The state that this batch keeps, and that of earlier ones which is merged with it."""
        parts = self.shipped.plan.parts
        tables: dict[int, list[pa.Table]] = defaultdict(list)
        for part, rows in _by_part(table, _trace_parts(table, parts)):
            tables[part].append(ids_of(rows) if kind is Kind.IDS else rows)
        for blob in blobs.get(kind, ()):
            if (kind, blob.source) in self.merged:
                tables[blob.part].append(blob.table)
        for part, several in tables.items():
            whole = merge_ids(several) if kind is Kind.IDS else concat(several)
            report.kept[kind] += whole.num_rows
            yield from Blob.of(kind, whole, source=file, part=part)


DUPLICATE = "same trace and span id"
"""The reason of the counter ``duplicates``; one for all, so that it does not depend on batches."""


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


def concat(tables: Sequence[pa.Table]) -> pa.Table:
    """Several tables as one, each column in one piece."""
    if len(tables) == 1:
        return tables[0].combine_chunks()
    return pa.concat_tables(tables, promote_options="permissive").combine_chunks()


def _split(kind: Kind, table: pa.Table, parts: Parts, *, source: str = "") -> Iterator[Blob]:
    """The blobs of a table's rows, by part."""
    for part, rows in _by_part(table, parts):
        yield from Blob.of(kind, rows, source=source, part=part)


def _by_part(table: pa.Table, parts: Parts) -> Iterator[tuple[int, pa.Table]]:
    """The rows of each part; ``parts`` has the part of each row."""
    if not table.num_rows:
        return
    order = np.argsort(parts, kind="stable")
    present, starts = np.unique(parts[order], return_index=True)
    rows = table if len(present) == 1 else table.take(pa.array(order))
    for part, start, end in zip(present, starts, [*starts[1:], len(parts)], strict=True):
        yield int(part), rows.slice(start, end - start)


def _delta_blobs(deltas: Deltas, aggregator: Aggregator, parts: int) -> Iterator[Blob]:
    if not len(deltas):
        return
    places = part_of(combine(*map(hash64, deltas.roles)), parts)
    table = to_arrow(deltas, aggregator.plan)
    yield from _split(Kind.DELTAS, table, places, source=aggregator.plan.source.name)


def _trace_parts(spans: pa.Table, parts: int) -> Parts:
    return part_of(hash64(spans["trace_id"]), parts)


def _old_blobs(old: OldState, plan: TaskPlan) -> Iterator[Blob]:
    """The state of version 1 as blobs."""
    table = pq.read_table(old.folder, use_threads=False)
    if old.kind is Kind.PENDING:
        places = _trace_parts(table, plan.parts)
        yield from _split(old.kind, table, places, source=old.file)
        return
    for part, rows in _by_part(table, _trace_parts(table, plan.parts)):
        yield from Blob.of(old.kind, ids_of(rows), source=old.file, part=part)


def _no_spans() -> pa.Table:
    return check_spans(pa.table({}), 0).rows


@dataclass(frozen=True)
class RepartStep:
    """Divides state anew that was divided into another number of parts."""

    shipped: Shipped

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Spans by their trace; ids, which do not tell their trace, go to all parts."""
        parts = self.shipped.plan.parts
        for blob in read_blobs(batches):
            if blob.kind is Kind.PENDING:
                table = blob.table
                places = _trace_parts(table, parts)
                yield from write_blobs(_split(blob.kind, table, places, source=blob.source))
            else:
                yield from write_blobs(replace(blob, part=part) for part in range(parts))
