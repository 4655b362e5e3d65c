"""One trace: its spans as a tree, and its critical path."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

ROUTE = "http.route"
"""The attribute of a span whose name is that of its endpoint."""


@dataclass(frozen=True)
class TraceSpan:
    """One span of a trace. Times are in microseconds, ``start_us`` since 1970."""

    trace_id: str
    span_id: str
    parent_span_id: str | None
    start_us: int
    duration_us: int
    service: str
    name: str
    kind: str
    status: str
    status_message: str | None = None
    instance: str | None = None
    resource: dict[str, str] = field(default_factory=dict)
    attributes: dict[str, str] = field(default_factory=dict)
    events: tuple[dict[str, Any], ...] = ()

    @property
    def end_us(self) -> int:
        """When it ended."""
        return self.start_us + self.duration_us

    @property
    def has_route(self) -> bool:
        """Whether its name is that of its endpoint, since it has ``http.route``."""
        return has_route(self.attributes)

    @property
    def is_error(self) -> bool:
        """Whether it failed."""
        return self.status == "ERROR"


@dataclass(frozen=True)
class Trace:
    """The spans of a trace that are kept, in the order of a waterfall."""

    trace_id: str
    spans: tuple[TraceSpan, ...]
    """Each after its parent; those of one parent by their start, and the root first."""
    depths: tuple[int, ...]
    """How many spans are above each of them."""
    critical: tuple[tuple[tuple[int, int], ...], ...]
    """Of each span, the parts of its time that the whole trace waits for: start and end in
    microseconds since 1970."""
    left_out: int = 0
    """How many of its spans are kept, and not among these: there are too many."""

    @classmethod
    def of(cls, spans: Sequence[TraceSpan], left_out: int = 0) -> Trace | None:
        """The trace of some spans; None without any."""
        if not spans:
            return None
        unique = {span.span_id: span for span in spans}
        ordered, depths, children = _waterfall(unique)
        critical = _critical(ordered, children)
        return cls(
            spans[0].trace_id,
            tuple(ordered),
            tuple(depths),
            tuple(tuple(critical.get(span.span_id, ())) for span in ordered),
            left_out,
        )

    @property
    def start_us(self) -> int:
        """When its first span began."""
        return min(span.start_us for span in self.spans)

    @property
    def duration_us(self) -> int:
        """From the start of its first span to the end of its last."""
        return max(span.end_us for span in self.spans) - self.start_us

    @property
    def missing(self) -> int:
        """How many parents are named by spans, and not kept."""
        known = {span.span_id for span in self.spans}
        parents = {span.parent_span_id for span in self.spans if span.parent_span_id}
        return len(parents - known)


def has_route(attributes: Mapping[str, str | None]) -> bool:
    """Whether attributes have a route that is not blank."""
    return bool((attributes.get(ROUTE) or "").strip())


def spans_of(table: pa.Table) -> list[TraceSpan]:
    """The rows of kept spans as objects."""
    spans = []
    times = table["time"].cast(pa.int64()).to_pylist()
    for row, start_us in zip(table.drop_columns(["time"]).to_pylist(), times, strict=True):
        spans.append(
            TraceSpan(
                row["trace_id"],
                row["span_id"],
                row["parent_span_id"],
                start_us,
                row["duration_us"],
                row["service"] or "unknown_service",
                row["name"] or "",
                row["kind"] or "INTERNAL",
                row["status"] or "UNSET",
                row["status_message"],
                row["instance"],
                dict(row["resource"] or ()),
                dict(row["attributes"] or ()),
                _events(row["events"]),
            )
        )
    return spans


def _events(text: str | None) -> tuple[dict[str, Any], ...]:
    if not text:
        return ()
    try:
        events = json.loads(text)
    except ValueError:  # it was cut, or made by another writer
        return ({"time": None, "name": text, "attributes": {}},)
    return tuple(event for event in events if isinstance(event, dict))


def _waterfall(
    spans: dict[str, TraceSpan],
) -> tuple[list[TraceSpan], list[int], dict[str | None, list[TraceSpan]]]:
    """Spans with parents first, their depths, and the children of each."""
    children: dict[str | None, list[TraceSpan]] = {}
    for span in spans.values():
        known = span.parent_span_id in spans and span.parent_span_id != span.span_id
        children.setdefault(span.parent_span_id if known else None, []).append(span)
    for own in children.values():
        own.sort(key=lambda span: (span.start_us, -span.duration_us, span.span_id))
    # A service whose clock is behind must not seem to be the root.
    children.get(None, []).sort(key=lambda span: span.parent_span_id is not None)
    ordered: list[TraceSpan] = []
    depths: list[int] = []
    placed: set[str] = set()

    def place(first: TraceSpan) -> None:
        stack = [(first, 0)]
        while stack:
            span, depth = stack.pop()
            if span.span_id in placed:
                continue
            placed.add(span.span_id)
            ordered.append(span)
            depths.append(depth)
            stack += [(child, depth + 1) for child in reversed(children.get(span.span_id, ()))]

    for root in children.get(None, ()):
        place(root)
    for span in spans.values():  # those whose parents are each other's children
        if span.span_id not in placed:
            place(span)
            children.setdefault(None, []).append(span)
    return ordered, depths, children


def _critical(
    spans: Sequence[TraceSpan], children: dict[str | None, list[TraceSpan]]
) -> dict[str, list[tuple[int, int]]]:
    """The parts of the root's time, from its end backwards, in the span that is waited for then.

    A child counts as far as it ended before what is waited for next; the root is the longest of
    the spans without a parent. Each part is by the clock of its span.
    """
    parts: dict[str, list[tuple[int, int]]] = {}
    if not spans or not children.get(None):
        return parts
    root = max(children[None], key=lambda span: span.duration_us)
    stack = [(root, 0, root.start_us, root.end_us)]
    visited: set[str] = set()
    while stack:
        span, shift, begin, at = stack.pop()
        if span.span_id in visited:
            continue
        visited.add(span.span_id)
        own = parts.setdefault(span.span_id, [])
        for child, moved, start, end in _in_time_of(span, shift, children.get(span.span_id, ())):
            # What runs on after the parent (a message that was sent) is not waited for.
            start = max(start, begin)
            if end > at or end <= start:
                continue
            if end < at:
                own.append((end - shift, at - shift))
            stack.append((child, moved, start, end))
            at = start
        if at > begin:
            own.append((begin - shift, at - shift))
        own.reverse()
    return parts


def _in_time_of(
    span: TraceSpan, shift: int, children: Sequence[TraceSpan]
) -> list[tuple[TraceSpan, int, int, int]]:
    """The children of a span by the clock of the root, to which ``shift`` takes the span's.

    With how far each is shifted, its start and its end; the last to end comes first.
    """
    placed = []
    for child in children:
        moved = _shift(span, shift, child)
        end = child.end_us + moved
        if _is_call(span, child):  # the client did not wait for what its server did later
            end = min(end, span.end_us + shift)
        placed.append((child, moved, child.start_us + moved, end))
    return sorted(placed, key=lambda place: place[3], reverse=True)


def _shift(span: TraceSpan, shift: int, child: TraceSpan) -> int:
    """How far a child is shifted to be in the time of its parent, if another clock put it outside.

    What a client waits for lies in its time, and is put in its middle, as Jaeger does; of others
    only those that overlap with their parents, since some spans do run on.
    """
    if (span.service, span.instance) == (child.service, child.instance):
        return shift
    start, end = span.start_us + shift, span.end_us + shift
    overlaps = child.start_us < end and child.end_us > start
    if child.kind != "SERVER" or not (_is_call(span, child) or overlaps):
        return 0
    room = span.duration_us - child.duration_us
    if room < 0:  # it went on after its parent
        return 0 if start <= child.start_us < end else start - child.start_us
    if start <= child.start_us and child.end_us <= end:
        return 0
    return start + room // 2 - child.start_us


def _is_call(span: TraceSpan, child: TraceSpan) -> bool:
    return span.kind == "CLIENT" and child.kind == "SERVER"
