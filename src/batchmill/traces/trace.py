"""One trace: its spans as a tree, and its critical path."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa


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
    def is_error(self) -> bool:
        """Whether it failed."""
        return self.status == "ERROR"


@dataclass(frozen=True)
class Trace:
    """The spans of a trace that are kept, in the order of a waterfall."""

    trace_id: str
    spans: tuple[TraceSpan, ...]
    """Each after its parent; those of one parent by their start."""
    depths: tuple[int, ...]
    """How many spans are above each of them."""
    critical: tuple[tuple[tuple[int, int], ...], ...]
    """Of each span, the parts of its time that the whole trace waits for: start and end in
    microseconds since 1970."""

    @classmethod
    def of(cls, spans: Sequence[TraceSpan]) -> Trace | None:
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
    the spans without a parent.
    """
    parts: dict[str, list[tuple[int, int]]] = {}
    if not spans or not children.get(None):
        return parts
    root = max(children[None], key=lambda span: span.duration_us)
    stack = [(root, root.end_us)]
    visited: set[str] = set()
    while stack:
        span, until = stack.pop()
        if span.span_id in visited:
            continue
        visited.add(span.span_id)
        at = min(span.end_us, until)
        own = parts.setdefault(span.span_id, [])
        for child in sorted(
            children.get(span.span_id, ()), key=lambda child: child.end_us, reverse=True
        ):
            # What runs on after the parent (a message that was sent) is not waited for.
            if child.end_us > at or child.start_us < span.start_us or not child.duration_us:
                continue
            if child.end_us < at:
                own.append((child.end_us, at))
            stack.append((child, child.end_us))
            at = child.start_us
        if at > span.start_us:
            own.append((span.start_us, at))
        own.reverse()
    return parts
