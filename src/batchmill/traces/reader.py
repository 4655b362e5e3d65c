"""Finds traces among kept spans, and reads them."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchmill.traces.files import FileCache, OpenFile, RowGroup, UnreadableError
from batchmill.traces.keeper import KeepStats
from batchmill.traces.layout import HOUR_US, SCHEMA, list_files
from batchmill.traces.query import SpanMeaning, TraceQuery, is_in, mask_of, one
from batchmill.traces.trace import Trace, has_route, spans_of

MOST_SPANS = 20_000
"""How many spans of a trace are shown: those that began first."""
_NARROW = (
    *("trace_id", "span_id", "parent_span_id", "time", "duration_us"),
    *("service", "name", "kind", "status"),
)
_THREADS = 2
"""How many threads decode files for one search."""
_PARENTS = (
    *("trace_id", "span_id", "parent_span_id", "time", "duration_us"),
    *("service", "name", "kind"),
)
_INSTANCES = ("trace_id", "span_id", "service", "instance", "resource")
_EXAMPLE = ("trace_id", "span_id", "service", "time", "duration_us")
_SERVED = ("SERVER", "CONSUMER")
"""The kinds of spans that are calls which a service serves."""
_HEX = re.compile(r"[0-9a-f]{1,32}")
_MOST_GROUPS = 8
"""Among how many groups of rows examples are looked for."""
_MOST_CALLS = 10_000
"""Of how many spans it is remembered for which call they were made."""
_SLACK_US = 60_000_000
"""Spans of a found trace are looked for so long before and after the span that was found."""


@dataclass(frozen=True)
class TraceSummary:
    """A trace that was found, in one line."""

    trace_id: str
    start_us: int
    duration_us: int
    service: str
    """Of the root, or of its first span if the root is not kept."""
    name: str
    spans: int
    errors: int
    services: Mapping[str, int]
    """Spans by service."""
    matched_us: int
    """The duration of the longest span to which the query applies."""


@dataclass(frozen=True)
class SearchResult:
    """Traces that were found, the newest first."""

    traces: tuple[TraceSummary, ...]
    more: bool
    """Whether there are more than the limit."""


@dataclass(frozen=True)
class SpanExample:
    """A span that stands for others like it."""

    trace_id: str
    span_id: str
    start_us: int
    duration_us: int


class SpanReader:
    """Reads a folder of kept spans, which need not exist. May be used by several threads."""

    def __init__(self, folder: Path, meaning: SpanMeaning | None = None) -> None:
        self.folder = folder
        self._meaning = meaning
        self._cache = FileCache()
        self._served_calls: dict[tuple[str, str], str] = {}

    def stats(self) -> KeepStats:
        """What is kept, and what was dropped."""
        return KeepStats.read(self.folder)

    @property
    def unreadable_files(self) -> int:
        """How many files are left out of what is read, since they cannot be read."""
        return self._cache.unreadable_files

    def hours(self) -> dict[datetime, list[str]]:
        """The names of the files of each hour, by its start, without segments that wait."""
        names: dict[datetime, list[str]] = defaultdict(list)
        for file in list_files(self.folder):
            if file.hour_us is not None:
                hour = datetime.fromtimestamp(file.hour_us // 1_000_000, UTC)
                names[hour].append(file.path.name)
        return dict(names)

    def trace(self, trace_id: str) -> Trace | None:
        """A trace by its id, which may lack leading zeros; None if no span of it is kept."""
        wanted = trace_id.lower()
        if _HEX.fullmatch(wanted):
            wanted = wanted.zfill(32)
        return _first_spans(self._rows([wanted], SCHEMA.names))

    def traces(self, trace_ids: Sequence[str]) -> list[Trace]:
        """Several traces, as far as they are kept."""
        table = self._rows(list(trace_ids), SCHEMA.names)
        ids = one(table["trace_id"]).dictionary_encode()
        places = dict(zip(ids.dictionary.to_pylist(), range(len(ids.dictionary)), strict=True))
        codes = ids.indices.to_numpy()
        traces = (
            _first_spans(table.take(np.flatnonzero(codes == places[trace_id])))
            for trace_id in trace_ids
            if trace_id in places
        )
        return [trace for trace in traces if trace is not None]

    def search(self, query: TraceQuery) -> SearchResult:
        """The newest traces of a query."""
        matches: dict[str, tuple[int, int]] = {}
        files = self._open(query.start_us, query.end_us)
        files.sort(key=lambda file: file.last_us, reverse=True)
        with ThreadPoolExecutor(_THREADS, "batchmill-traces") as threads:
            for file in files:
                needed = 0 if len(matches) <= query.limit else _nth(matches, query.limit)
                if file.last_us < needed:
                    break  # nothing in it, or in those after it, is newer than what was found
                groups = [group for group in file.groups if group.last_us >= needed]
                search = functools.partial(_matches_of, file, query, self._meaning)
                for trace_id, moment, duration in chain(*threads.map(search, groups)):
                    known = matches.get(trace_id, (0, 0))
                    matches[trace_id] = max(known[0], moment), max(known[1], duration)
        newest = sorted(matches, key=lambda trace_id: matches[trace_id][0], reverse=True)
        chosen = newest[: query.limit]
        summaries = self._summaries(chosen, matches)
        return SearchResult(summaries, len(newest) > len(chosen))

    def services(self) -> dict[str, set[tuple[str, str]]]:
        """The services that have kept spans, with the names and kinds of these."""
        names: dict[str, set[tuple[str, str]]] = defaultdict(set)
        for file in self._open():
            for service, own in file.services.items():
                names[service].update((name or "", kind or "INTERNAL") for name, kind in own)
        return dict(names)

    def examples(
        self, start_us: int, end_us: int, bounds_us: Sequence[int]
    ) -> dict[tuple[str, int], SpanExample]:
        """The newest call that each service served, for each range of durations.

        By service and range: range *n* lies above ``bounds_us[n - 1]``, up to and with
        ``bounds_us[n]``. Takes part of a second at most, however many spans there are: only some
        groups of rows are read, each of which has all spans of some traces, and segments that are
        not sorted yet are left out.
        """
        groups = [
            (file, group)
            for file in self._open(start_us, end_us, waiting=False)
            for group in file.groups
            if group.last_us >= start_us and group.first_us <= end_us
        ]
        query = TraceQuery(start_us=start_us, end_us=end_us)
        tables = []
        for file, group in groups[:: -(-len(groups) // _MOST_GROUPS) or 1]:
            try:
                mask = mask_of(file, group, query)
                mask &= is_in(file.read(group, ["kind"])["kind"], pa.array(_SERVED))
                if mask.any():
                    tables.append(_plain(file.read(group, _EXAMPLE).filter(pa.array(mask))))
            except UnreadableError:
                continue
        return _newest(pa.concat_tables(tables), bounds_us) if tables else {}

    def served_calls(
        self, spans: Collection[tuple[str, str]], start_us: int, end_us: int
    ) -> dict[tuple[str, str], str]:
        """For which call of its service each span was made: the endpoint of what served that.

        By trace and span id, of spans that began within a time. Those whose trace is not kept, or
        has no such span, are left out; of very large traces a part is read.
        """
        known = self._served_calls
        calls = {span: name for span in spans if (name := known.get(span)) is not None}
        missing = [span for span in spans if span not in calls]
        if missing:
            traces = sorted({trace_id for trace_id, _ in missing})
            table = self._whole(traces, _PARENTS, start_us, end_us)
            rows = table.slice(0, MOST_SPANS).to_pylist()
            by_id = {(row["trace_id"], row["span_id"]): row for row in rows}
            served = {span: row for span in missing if (row := _served_call(by_id, span))}
            new = self._endpoints(served, start_us, end_us)
            if len(known) > _MOST_CALLS:
                known.clear()
            known.update(new)  # a span does not change
            calls |= new
        return calls

    def _endpoints(
        self, served: Mapping[tuple[str, str], Mapping[str, Any]], start_us: int, end_us: int
    ) -> dict[tuple[str, str], str]:
        """The endpoint of each of some rows."""
        meaning = self._meaning
        names = {span: row["name"] or "" for span, row in served.items()}
        if meaning is None:
            return names
        endpoints = {span: meaning.endpoint(name, has_route=False) for span, name in names.items()}
        doubtful = [span for span, name in names.items() if endpoints[span] != name]
        if doubtful:
            traces = sorted({trace_id for trace_id, _ in doubtful})
            table = self._whole(traces, (*_PARENTS, "attributes"), start_us, end_us)
            ids = pa.array({served[span]["span_id"] for span in doubtful}, pa.string())
            routed = {
                (row["trace_id"], row["span_id"])
                for row in table.filter(pc.is_in(table["span_id"], ids)).to_pylist()
                if has_route(dict(row["attributes"] or ()))
            }
            for span in doubtful:
                if (span[0], served[span]["span_id"]) in routed:
                    endpoints[span] = names[span]
        return endpoints

    def instances(
        self, spans: Collection[tuple[str, str]], start_us: int, end_us: int
    ) -> dict[tuple[str, str], str]:
        """The instance of each span, by trace and span id, of spans that began within a time.

        The id in the span's resource, else its host, else its service, as metrics have it.
        """
        traces = sorted({trace_id for trace_id, _ in spans})
        files = self._open(start_us - _SLACK_US, end_us + _SLACK_US)
        tables = self._parts(files, traces, _INSTANCES)
        wanted = pa.array([span_id for _, span_id in spans], pa.string())
        instances = {}
        for table in tables:
            for row in table.filter(pc.is_in(table["span_id"], wanted)).to_pylist():
                host = dict(row["resource"] or ()).get("host.name", "")
                names = (row["instance"] or "", host, row["service"] or "unknown_service")
                name = next(name for name in names if name.strip())
                instances[row["trace_id"], row["span_id"]] = name
        return instances

    def _open(
        self, start_us: int | None = None, end_us: int | None = None, *, waiting: bool = True
    ) -> list[OpenFile]:
        """The files with spans that began within a time; also segments that wait to be sorted."""
        listed = list_files(self.folder)
        self._cache.keep_only(listed)
        if not waiting:
            listed = [file for file in listed if file.sorted]
        if start_us is not None and end_us is not None:
            listed = [
                file
                for file in listed
                if file.hour_us is None or start_us - HOUR_US < file.hour_us <= end_us
            ]
        opened = filter(None, map(self._cache.open, listed))
        return [
            file
            for file in opened
            if start_us is None
            or end_us is None
            or (file.groups and file.last_us >= start_us and file.first_us <= end_us)
        ]

    def _rows(self, trace_ids: Sequence[str], columns: Sequence[str]) -> pa.Table:
        """The spans of some traces, each once."""
        return _once(self._parts(self._open(), trace_ids, columns), columns)

    def _whole(
        self, trace_ids: Sequence[str], columns: Sequence[str], start_us: int, end_us: int
    ) -> pa.Table:
        """The spans of some traces that have spans within a time, without reading all files.

        Files are read until they have all the time of these spans and of their parents. A span that
        began more than :data:`_SLACK_US` after all others have ended may be in another file.
        """
        tables: list[pa.Table] = []
        read: set[Path] = set()
        table = _once(tables, columns)
        while True:
            begun, until = start_us - _SLACK_US, end_us + _SLACK_US
            files = [file for file in self._open(begun, until) if file.path not in read]
            if not files and len(orphans := _orphans(table)):
                # Parents that ran while their children began may have begun long before.
                first, last = orphans[0], orphans[-1]
                files = [
                    file
                    for file in self._open(0, last)
                    if file.path not in read and file.last_us + file.longest_us >= first
                ]
            if not files:
                return table
            read.update(file.path for file in files)
            tables += self._parts(files, trace_ids, columns)
            table = _once(tables, columns)
            if table.num_rows:
                times = table["time"].cast(pa.int64())
                start_us = min(start_us, pc.min(times).as_py())
                end_us = max(end_us, pc.max(pc.add(times, table["duration_us"])).as_py())

    def _parts(
        self, files: Iterable[OpenFile], trace_ids: Sequence[str], columns: Sequence[str]
    ) -> list[pa.Table]:
        """The spans of some traces in some files."""
        wanted = pa.array(trace_ids, pa.string())
        tables = []
        for file in files:
            try:
                own = [trace_id for trace_id in trace_ids if self._cache.may_have(file, [trace_id])]
                for group in file.groups:
                    if not any(group.first_trace <= trace <= group.last_trace for trace in own):
                        continue
                    mask = is_in(file.read(group, ["trace_id"])["trace_id"], wanted)
                    if mask.any():
                        rows = file.read(group, columns).filter(pa.array(mask))
                        tables.append(_plain(rows))
            except UnreadableError:
                continue
        return tables

    def _summaries(
        self, chosen: Sequence[str], matches: Mapping[str, tuple[int, int]]
    ) -> tuple[TraceSummary, ...]:
        if not chosen:
            return ()
        moments = [matches[trace_id][0] for trace_id in chosen]
        table = self._whole(chosen, _NARROW, min(moments), max(moments))
        by_trace = defaultdict(list)
        times = table["time"].cast(pa.int64()).to_pylist()
        rows = table.drop_columns(["time"]).to_pylist()
        for row, start_us in zip(rows, times, strict=True):
            by_trace[row["trace_id"]].append(row | {"start_us": start_us})
        summaries = []
        for trace_id in chosen:
            own = by_trace.get(trace_id)
            if not own:  # dropped just now
                continue
            start = min(row["start_us"] for row in own)
            end = max(row["start_us"] + row["duration_us"] for row in own)
            head = _head(own)
            services: dict[str, int] = defaultdict(int)
            for row in own:
                services[row["service"] or "unknown_service"] += 1
            summaries.append(
                TraceSummary(
                    trace_id,
                    start,
                    end - start,
                    head["service"] or "unknown_service",
                    head["name"] or "",
                    len(own),
                    sum(row["status"] == "ERROR" for row in own),
                    dict(sorted(services.items(), key=lambda pair: (-pair[1], pair[0]))),
                    matches[trace_id][1],
                )
            )
        return tuple(sorted(summaries, key=lambda trace: -trace.start_us))


def _once(tables: Sequence[pa.Table], columns: Sequence[str]) -> pa.Table:
    """The spans of tables, each once."""
    if not tables:
        return pa.schema([SCHEMA.field(name) for name in columns]).empty_table()
    table = pa.concat_tables(tables)
    keys = table.select(["trace_id", "span_id"]).append_column(
        "at", pa.array(np.arange(table.num_rows))
    )
    first = keys.group_by(["trace_id", "span_id"]).aggregate([("at", "min")])["at_min"]
    return table.take(first) if len(first) < table.num_rows else table


def _orphans(table: pa.Table) -> list[int]:
    """When the spans began whose parents are not among the rows, in order."""
    parents = table["parent_span_id"]
    missing = pc.and_(parents.is_valid(), pc.invert(pc.is_in(parents, table["span_id"])))
    times: list[int] = table["time"].filter(missing).cast(pa.int64()).to_pylist()
    return sorted(times)


def _head(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The span that a trace is named after: the first one of its waterfall."""
    known = {row["span_id"] for row in rows}
    return min(
        rows,
        key=lambda row: (
            row["parent_span_id"] in known,
            row["parent_span_id"] is not None,
            row["start_us"],
            -row["duration_us"],
            row["span_id"],
        ),
    )


def _first_spans(table: pa.Table) -> Trace | None:
    """The trace of some rows; of too many, those that began first, since parents come first."""
    left_out = max(0, table.num_rows - MOST_SPANS)
    if left_out:
        table = table.sort_by("time").slice(0, MOST_SPANS)
    return Trace.of(spans_of(table), left_out)


def _served_call(
    rows: Mapping[tuple[str, str], Mapping[str, Any]], span: tuple[str, str]
) -> Mapping[str, Any] | None:
    """The next span above one that their service served; rows are by their ids."""
    row = rows.get(span)
    service = row["service"] if row else None
    passed: set[tuple[str, str]] = set()  # against a circle of parents
    while row and row["service"] == service and span not in passed:
        if row["kind"] in _SERVED:
            return row
        passed.add(span)
        span = (span[0], row["parent_span_id"])
        row = rows.get(span)
    return None


def _newest(table: pa.Table, bounds_us: Sequence[int]) -> dict[tuple[str, int], SpanExample]:
    """The newest span of each service and range of durations."""
    services = one(table["service"].fill_null("unknown_service")).dictionary_encode()
    names, codes = services.dictionary.to_pylist(), services.indices.to_numpy()
    times = table["time"].cast(pa.int64()).to_numpy()
    took = table["duration_us"].to_numpy()
    ranges = np.searchsorted(np.asarray(bounds_us), took)
    order = np.lexsort((times, ranges, codes))
    is_last = (np.diff(codes[order], append=-1) != 0) | (np.diff(ranges[order], append=-1) != 0)
    rows = order[is_last]
    ids = table.select(_EXAMPLE[:2]).take(rows).to_pylist()
    return {
        (names[codes[row]], int(ranges[row])): SpanExample(
            **own, start_us=int(times[row]), duration_us=int(took[row])
        )
        for row, own in zip(rows, ids, strict=True)
    }


def _nth(matches: Mapping[str, tuple[int, int]], count: int) -> int:
    """The time of the trace with this place among the newest."""
    moments = np.fromiter((moment for moment, _ in matches.values()), np.int64, len(matches))
    return int(np.partition(moments, len(moments) - count)[len(moments) - count])


def _matches_of(
    file: OpenFile, query: TraceQuery, meaning: SpanMeaning | None, group: RowGroup
) -> Iterable[tuple[str, int, int]]:
    """The newest traces of a group to which the query applies: when, and how long."""
    if group.last_us < query.start_us or group.first_us > query.end_us:
        return ()
    if query.min_us is not None and group.longest_us < query.min_us:
        return ()
    if query.service is not None and query.service not in file.services:
        return ()
    try:
        mask = mask_of(file, group, query, meaning)
        places = np.flatnonzero(mask)
        if not len(places):
            return ()
        table = file.read(group, ["trace_id", "time", "duration_us"])
    except UnreadableError:
        return ()
    ids = one(table["trace_id"]).take(pa.array(places))
    if not pa.types.is_dictionary(ids.type):
        ids = ids.dictionary_encode()
    codes, traces = np.unique(ids.indices.to_numpy(), return_inverse=True)
    moments, durations = (
        _largest(table[name].cast(pa.int64()).to_numpy()[places], traces, len(codes))
        for name in ("time", "duration_us")
    )
    newest = np.argsort(-moments, kind="stable")[: query.limit + 1]
    texts = ids.dictionary.take(pa.array(codes[newest])).to_pylist()
    return zip(texts, moments[newest].tolist(), durations[newest].tolist(), strict=True)


def _largest(
    values: npt.NDArray[np.int64], groups: npt.NDArray[np.int64], count: int
) -> npt.NDArray[np.int64]:
    """The largest value of each group."""
    largest = np.full(count, np.iinfo(np.int64).min)
    np.maximum.at(largest, groups, values)
    return largest


def _plain(table: pa.Table) -> pa.Table:
    """Rows with texts in place of dictionaries."""
    fields = [SCHEMA.field(name) for name in table.column_names]
    arrays = []
    for column, wanted in zip(table.columns, fields, strict=True):
        array = one(column)
        if pa.types.is_map(array.type):
            first, last = array.offsets[0].as_py(), array.offsets[-1].as_py()
            array = pa.MapArray.from_arrays(
                pc.subtract(array.offsets, pa.scalar(first, pa.int32())),
                array.keys[first:last].cast(pa.string()),
                array.items[first:last].cast(pa.string()),
                mask=array.is_null() if array.null_count else None,
            )
        arrays.append(array.cast(wanted.type))
    return pa.table(arrays, pa.schema(fields))
