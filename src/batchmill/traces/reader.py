"""Finds traces among kept spans, and reads them."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchmill.traces.files import FileCache, OpenFile, RowGroup
from batchmill.traces.keeper import KeepStats
from batchmill.traces.layout import HOUR_US, MAPS, SCHEMA, list_files
from batchmill.traces.trace import Trace, TraceSpan, spans_of

Mask: TypeAlias = npt.NDArray[np.bool_]

MOST_SPANS = 20_000
"""How many spans of a trace are read."""
_NARROW = (
    *("trace_id", "span_id", "parent_span_id", "time", "duration_us"),
    *("service", "name", "kind", "status"),
)
_THREADS = 2
"""How many threads decode files for one search."""
_PARENTS = ("trace_id", "span_id", "parent_span_id", "service", "name", "kind")
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


@dataclass(frozen=True, kw_only=True)
class TraceQuery:
    """Which traces to find: those that have a span to which all of it applies."""

    start_us: int
    """Spans that began from then on, in microseconds since 1970."""
    end_us: int
    service: str | None = None
    name: str | None = None
    """The name of the span: of an endpoint, for example."""
    kind: str | None = None
    error: bool | None = None
    status: str | None = None
    """``OK``, ``ERROR`` or ``UNSET``."""
    status_message: str | None = None
    min_us: int | None = None
    max_us: int | None = None
    attributes: Mapping[str, str] = field(default_factory=dict)
    """Of the span, or of its resource."""
    limit: int = 20


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

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._cache = FileCache()
        self._served_calls: dict[tuple[str, str], str] = {}

    def stats(self) -> KeepStats:
        """What is kept, and what was dropped."""
        return KeepStats.read(self.folder)

    def hours(self) -> dict[datetime, int]:
        """How many spans are kept of each hour, by its start, without those that wait for it."""
        counts: dict[datetime, int] = defaultdict(int)
        for file in list_files(self.folder):
            if file.hour_us is not None:
                counts[datetime.fromtimestamp(file.hour_us // 1_000_000, UTC)] += file.rows
        return dict(counts)

    def trace(self, trace_id: str) -> Trace | None:
        """A trace by its id, which may lack leading zeros; None if no span of it is kept."""
        wanted = trace_id.lower()
        if _HEX.fullmatch(wanted):
            wanted = wanted.zfill(32)
        table = self._rows([wanted], SCHEMA.names)
        return Trace.of(spans_of(table.slice(0, MOST_SPANS)))

    def traces(self, trace_ids: Sequence[str]) -> list[Trace]:
        """Several traces, as far as they are kept."""
        table = self._rows(list(trace_ids), SCHEMA.names)
        spans: dict[str, list[TraceSpan]] = defaultdict(list)
        for span in spans_of(table):
            if len(spans[span.trace_id]) < MOST_SPANS:
                spans[span.trace_id].append(span)
        traces = (Trace.of(spans[trace_id]) for trace_id in trace_ids if trace_id in spans)
        return [trace for trace in traces if trace is not None]

    def search(self, query: TraceQuery) -> SearchResult:
        """The newest traces of a query."""
        matches: dict[str, tuple[int, int]] = {}
        files = self._open(query.start_us, query.end_us)
        files.sort(key=lambda file: file.last_us, reverse=True)
        with ThreadPoolExecutor(_THREADS) as threads:
            for file in files:
                needed = 0 if len(matches) <= query.limit else _nth(matches, query.limit)
                if file.last_us < needed:
                    break  # nothing in it, or in those after it, is newer than what was found
                groups = [group for group in file.groups if group.last_us >= needed]
                search = functools.partial(_matches_of, file, query)
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
                mask = _mask(file, group, query)
                mask &= _is_in(file.read(group, ["kind"])["kind"], pa.array(_SERVED))
                if mask.any():
                    tables.append(_plain(file.read(group, _EXAMPLE).filter(pa.array(mask))))
            except FileNotFoundError:  # it was merged into another one
                continue
        return _newest(pa.concat_tables(tables), bounds_us) if tables else {}

    def served_calls(
        self, spans: Collection[tuple[str, str]], start_us: int, end_us: int
    ) -> dict[tuple[str, str], str]:
        """For which call of its service each span was made: the name of the span that served it.

        By trace and span id, of spans that began within a time. Those whose trace is not kept, or
        has no such span, are left out; of very large traces a part is read.
        """
        known = self._served_calls
        calls = {span: name for span in spans if (name := known.get(span)) is not None}
        missing = [span for span in spans if span not in calls]
        if missing:
            traces = sorted({trace_id for trace_id, _ in missing})
            table = self._rows(traces, _PARENTS, start_us - _SLACK_US, end_us + _SLACK_US)
            rows = table.slice(0, MOST_SPANS).to_pylist()
            by_id = {(row["trace_id"], row["span_id"]): row for row in rows}
            new = {span: name for span in missing if (name := _served_call(by_id, span))}
            if len(known) > _MOST_CALLS:
                known.clear()
            known.update(new)  # a span does not change
            calls |= new
        return calls

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

    def _rows(
        self,
        trace_ids: Sequence[str],
        columns: Sequence[str],
        start_us: int | None = None,
        end_us: int | None = None,
    ) -> pa.Table:
        """The spans of some traces, each once."""
        wanted = pa.array(trace_ids, pa.string())
        tables = []
        for file in self._open(start_us, end_us):
            own = [trace_id for trace_id in trace_ids if self._cache.may_have(file, [trace_id])]
            for group in file.groups:
                if not any(group.first_trace <= trace <= group.last_trace for trace in own):
                    continue
                try:
                    mask = _is_in(file.read(group, ["trace_id"])["trace_id"], wanted)
                    if mask.any():
                        rows = file.read(group, columns).filter(pa.array(mask))
                        tables.append(_plain(rows))
                except FileNotFoundError:  # it was merged into another one
                    continue
        if not tables:
            return pa.schema([SCHEMA.field(name) for name in columns]).empty_table()
        table = pa.concat_tables(tables)
        keys = table.select(["trace_id", "span_id"]).append_column(
            "at", pa.array(np.arange(table.num_rows))
        )
        first = keys.group_by(["trace_id", "span_id"]).aggregate([("at", "min")])["at_min"]
        return table.take(first) if len(first) < table.num_rows else table

    def _summaries(
        self, chosen: Sequence[str], matches: Mapping[str, tuple[int, int]]
    ) -> tuple[TraceSummary, ...]:
        if not chosen:
            return ()
        moments = [matches[trace_id][0] for trace_id in chosen]
        table = self._rows(chosen, _NARROW, min(moments) - _SLACK_US, max(moments) + _SLACK_US)
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
            head = min(own, key=lambda row: (row["parent_span_id"] is not None, row["start_us"]))
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


def _served_call(rows: Mapping[tuple[str, str], Any], span: tuple[str, str]) -> str | None:
    """The name of the next span above one that their service served; rows are by their ids."""
    row = rows.get(span)
    service = row["service"] if row else None
    passed: set[tuple[str, str]] = set()  # against a circle of parents
    while row and row["service"] == service and span not in passed:
        if row["kind"] in _SERVED:
            return str(row["name"] or "")
        passed.add(span)
        span = (span[0], row["parent_span_id"])
        row = rows.get(span)
    return None


def _newest(table: pa.Table, bounds_us: Sequence[int]) -> dict[tuple[str, int], SpanExample]:
    """The newest span of each service and range of durations."""
    services = _one(table["service"].fill_null("unknown_service")).dictionary_encode()
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
    file: OpenFile, query: TraceQuery, group: RowGroup
) -> Iterable[tuple[str, int, int]]:
    """The newest traces of a group to which the query applies: when, and how long."""
    if group.last_us < query.start_us or group.first_us > query.end_us:
        return ()
    if query.min_us is not None and group.longest_us < query.min_us:
        return ()
    if query.service is not None and query.service not in file.services:
        return ()
    try:
        mask = _mask(file, group, query)
        places = np.flatnonzero(mask)
        if not len(places):
            return ()
        table = file.read(group, ["trace_id", "time", "duration_us"])
    except FileNotFoundError:  # it was merged into another one
        return ()
    ids = _one(table["trace_id"]).take(pa.array(places))
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


def _mask(file: OpenFile, group: RowGroup, query: TraceQuery) -> Mask:
    """To which rows of a group a query applies; the cheapest columns are read first."""
    mask = np.ones(group.rows, np.bool_)
    if group.first_us < query.start_us or group.last_us > query.end_us:
        times = file.read(group, ["time"])["time"].cast(pa.int64()).to_numpy()
        mask &= (times >= query.start_us) & (times <= query.end_us)
    columns = ("service", "name", "kind", "status", "status_message")
    texts = {column: getattr(query, column) for column in columns}
    if query.error is not None:
        status = _is_in(file.read(group, ["status"])["status"], pa.array(["ERROR"]))
        mask &= status if query.error else ~status
    for column, text in texts.items():
        if text is not None and mask.any():
            mask &= _is_in(file.read(group, [column])[column], pa.array([text]))
    if (query.min_us is not None or query.max_us is not None) and mask.any():
        took = file.read(group, ["duration_us"])["duration_us"].to_numpy()
        if query.min_us is not None:
            mask &= took >= query.min_us
        if query.max_us is not None:
            mask &= took <= query.max_us
    maps: dict[str, pa.Array] = {}
    for key, text in query.attributes.items():
        has = np.zeros(group.rows, np.bool_)
        for name in MAPS:
            keys = file.keys.get(name)
            if not mask.any() or (keys is not None and key not in keys):
                continue
            if name not in maps:
                maps[name] = _one(file.read(group, [name])[name])
            has |= _has_pair(maps[name], key, text)
        mask &= has
    return mask


def _has_pair(maps: pa.Array, key: str, text: str) -> Mask:
    """Which maps have an entry."""
    mask = np.zeros(len(maps), np.bool_)
    # Fewer entries have the value than the key: the others' keys need no look.
    places = np.flatnonzero(_is_in(pa.chunked_array([maps.items]), pa.array([text])))
    if not len(places):
        return mask
    keys = pa.chunked_array([maps.keys.take(pa.array(places))])
    offsets = maps.offsets.to_numpy()
    places = places[_is_in(keys, pa.array([key]))]
    rows = np.searchsorted(offsets, places, side="right") - 1
    mask[rows[(rows >= 0) & (rows < len(maps))]] = True
    return mask


def _is_in(column: pa.ChunkedArray, texts: pa.Array) -> Mask:
    """Which rows have one of some texts; of a dictionary, each text is compared once."""
    parts = [np.zeros(0, np.bool_)]
    for chunk in column.chunks:
        if pa.types.is_dictionary(chunk.type):
            is_text = pc.is_in(chunk.dictionary, texts).to_numpy(zero_copy_only=False)
            if not is_text.any():
                parts.append(np.zeros(len(chunk), np.bool_))
                continue
            codes = chunk.indices.fill_null(-1).to_numpy()
            parts.append(np.append(is_text, False)[codes])
        else:
            parts.append(pc.is_in(chunk, texts).to_numpy(zero_copy_only=False))
    mask: Mask = np.concatenate(parts)
    return mask


def _one(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def _plain(table: pa.Table) -> pa.Table:
    """The same rows with plain texts."""
    fields = [SCHEMA.field(name) for name in table.column_names]
    arrays = []
    for column, wanted in zip(table.columns, fields, strict=True):
        array = _one(column)
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
