"""The first step of a batch: reads segments, checks their rows, and aggregates events (L1).

Spans are reduced to plain columns, for the second step: :mod:`batchmill.spark.batch.span_step`.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from batchmill.aggregate import (
    STATEMENT_SOURCE,
    Aggregator,
    Deltas,
    SlowestStatements,
    is_deltas,
    is_statements,
    rows_by_minute,
    statements_to_arrow,
)
from batchmill.spans import compact
from batchmill.spark.batch.plan import (
    Limits,
    PickledPlan,
    TaskPlan,
    delta_blobs,
    row_blobs,
    split_blobs,
)
from batchmill.spark.batch.report import TaskReport
from batchmill.spark.files.quarantine import explain_unwritable
from batchmill.spark.files.statefiles import concat, write_hidden
from batchmill.spark.input.deltas import (
    AHEAD,
    DeltaReader,
    ReadDeltas,
    ReadStatements,
    UnusableError,
    events_in,
    read_statements,
)
from batchmill.spark.input.rows import (
    REASON,
    SPAN,
    CheckedRows,
    ColumnTypeError,
    check_rows,
    open_segment,
    read_rows,
    read_spans,
    with_other_columns,
)
from batchmill.spark.input.segments import BadSegment, read_segment, source_of
from batchmill.spark.shuffle import Blob, Kind, text_parts, trace_parts, write_blobs

_ROWS_AT_ONCE, _BYTES_AT_ONCE = 100_000, 128 * 2**20
"""How much a task checks and aggregates at a time: its memory grows with that."""
_DELTA_BYTES_AT_ONCE = 64 * 2**20
"""How many deltas a task collects: fewer and larger blobs cost less."""


@dataclass(frozen=True)
class ReadStep:
    """Reads the segments of a batch: a row of its input has the number of a slice of them."""

    shipped: PickledPlan
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

    shipped: PickledPlan
    limits: Limits
    rows_only: bool = False

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Blobs of segments that are given with their content."""
        reader = _Reader(self.shipped.plan, self.limits, rows_only=self.rows_only)
        segments = (
            (path.as_py(), content.as_buffer())
            for batch in batches
            for path, content in zip(batch["path"], batch["content"], strict=True)
        )
        yield from write_blobs(reader.read(segments))


@dataclass(frozen=True)
class UnusedSegment:
    """A segment of an event type that no metric reads."""

    rows: int


Content: TypeAlias = CheckedRows | ReadDeltas | ReadStatements | UnusedSegment
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
                if not self._rows_only:
                    return read_rows(file, own.source, own.columns, latest_us)
                table = file.read(use_threads=False)
                checked = check_rows(own.source, own.columns, table, latest_us)
                return CheckedRows(with_other_columns(checked, own.source, table, latest_us), None)
        except ColumnTypeError as error:
            return BadSegment(path, source, "wrong type", str(error), rows)
        except UnusableError as error:
            return BadSegment(path, source, error.reason, str(error), error.rows)
        return UnusedSegment(rows) if source in plan.catalog.sources else _unknown(path, rows)

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
            case UnusedSegment(rows):
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
            # Readers see plain texts, which are dictionaries here.
            write = functools.partial(pq.write_table, store_schema=False)
            file = write_hidden(invalid, folder / source, write)
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
            yield from split_blobs(Kind.SLOWEST, table, parts, self._limits)

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
            yield from split_blobs(Kind.SPANS, spans, parts, self._limits)
            return
        made = self._plan.aggregators[source].make(rows)
        if self._rows_only:
            yield from row_blobs(source, rows, made)
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
        yield from delta_blobs(deltas, self._plan, source, self._limits)

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
