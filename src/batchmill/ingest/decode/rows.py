"""Decoded spans as columns, and attribute values as text: checked, limited and counted."""

from __future__ import annotations

import base64
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from batchmill.ingest.decode.body import (
    ATTRIBUTE_BYTES,
    Limits,
    TooLarge,
    expanded_too_large,
)
from batchmill.spool import (
    EVENTS,
    RESOURCE_COLUMNS,
    SEGMENT_COLUMNS,
    STATUS_MESSAGE,
    PackedSpans,
    SpanBatch,
)

Pairs = dict[str, str]

UNKNOWN_SERVICE = "unknown_service"

KINDS = ("INTERNAL", "INTERNAL", "SERVER", "CLIENT", "PRODUCER", "CONSUMER")
"""By number in OTLP. 0 is unspecified, which OpenTelemetry defines as INTERNAL."""

STATUSES = ("UNSET", "OK", "ERROR")

EVENT_ROOM = 4
"""The events of a span may be so many times as long as the longest attribute, as text."""

_NO_TRACE, _NO_SPAN = bytes(16), bytes(8)

_WAITING_ROW_BYTES, _TABLE_ROW_BYTES = 132, 320
"""What a span takes beside its attributes: while it waits, and while it is written: in the table of
a segment, or in a message of Kafka."""
INDEX_BYTES = 8
"""What an attribute takes there, beside the texts, which are there once."""
_COLUMN_BYTES = 4
"""What a column of attributes takes for each span, whether it has that attribute or not."""
_TEXT_BYTES = 4
"""What a text takes beside its characters."""
_FIELD_BYTES = 10
"""What an attribute takes in a message of Kafka beside its texts, at most."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """The spans of a request, and what was rejected or cut."""

    batch: SpanBatch | PackedSpans
    rejections: dict[str, int] = field(default_factory=dict)
    """Number of rejected spans, by reason."""
    cuts: dict[str, int] = field(default_factory=dict)
    """Number of texts cut and attributes dropped in accepted spans, by reason."""
    written_bytes: int = 0
    """What the spans take while they are written: as the table of a segment, or as messages."""

    @property
    def rejected(self) -> int:
        """Number of rejected spans."""
        return sum(self.rejections.values())

    @property
    def reason(self) -> str:
        """Why spans were rejected, for the sender; empty if none were."""
        return ", ".join(f"{why} ({count})" for why, count in sorted(self.rejections.items()))


class Rows:
    """Collects the spans of one request, within its limits."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.rejections: dict[str, int] = {}
        self.cuts: dict[str, int] = {}
        self._batch = SpanBatch()
        columns = self._batch.columns
        self._trace_ids = columns["trace_id"]
        self._span_ids = columns["span_id"]
        self._parents = columns["parent_span_id"]
        self._names = columns["name"]
        self._kinds = columns["kind"]
        self._times = columns["time"]
        self._ends = columns["end_time"]
        self._statuses = columns["status"]
        self.attributes: list[Pairs] = columns["attributes"]
        """The decoder appends the attributes of each span that `add` accepted."""
        self.keys: set[str] = set()
        """Attribute keys that are known to be within the limits."""
        self._spans = 0
        self._groups = 0
        self._all_attributes = 0
        self._expanded = 0
        self._longest_name = limits.max_name_length

    def group(self) -> None:
        """Count a group of spans: a resource or a scope."""
        self._groups += 1
        if self._groups > self.limits.max_spans:
            raise TooLarge(
                f"the request has more than {self.limits.max_spans} groups of spans: "
                "send fewer in a request"
            )

    def span(self) -> None:
        """Count a span, before it is decoded."""
        self._spans += 1
        if self._spans > self.limits.max_spans:
            raise TooLarge(
                f"the request has more than {self.limits.max_spans} spans: send fewer in a request"
            )

    def attribute_count(self, n: int) -> None:
        """Count attributes, before they are decoded."""
        self._all_attributes += n
        if self._all_attributes > self.limits.max_attributes_in_all:
            raise TooLarge(
                f"the request has more than {self.limits.max_attributes_in_all} attributes: "
                "send fewer spans in a request"
            )

    @property
    def attributes_so_far(self) -> int:
        """Number of attributes that were counted."""
        return self._all_attributes

    @property
    def batch(self) -> SpanBatch:
        """The spans that were added."""
        return self._batch

    @property
    def spans(self) -> int:
        """Number of spans so far, with the one that is being decoded."""
        return self._spans

    def add(
        self,
        trace_id: bytes,
        span_id: bytes,
        parent_id: bytes,
        name: str,
        kind: int,
        start_ns: int,
        end_ns: int,
        status: int,
    ) -> bool:
        """Add a span, without its attributes; False if it is rejected."""
        if len(trace_id) != 16 or trace_id == _NO_TRACE:
            return self.reject("trace_id is not 16 bytes, or all zero")
        if len(span_id) != 8 or span_id == _NO_SPAN:
            return self.reject("span_id is not 8 bytes, or all zero")
        if parent_id and len(parent_id) != 8:
            return self.reject("parent_span_id is not 8 bytes")
        if end_ns < start_ns or not start_ns:
            if not start_ns:
                return self.reject("no start time")
            return self.reject("end before start" if end_ns else "no end time")
        if len(name) > self._longest_name:
            name = name[: self._longest_name]
            self.cut("name too long")
        self._trace_ids.append(trace_id.hex())
        self._span_ids.append(span_id.hex())
        # Some senders give a root span a parent of zeros.
        self._parents.append(parent_id.hex() if parent_id and parent_id != _NO_SPAN else None)
        self._names.append(name)
        self._kinds.append(KINDS[kind] if 0 <= kind < 6 else "INTERNAL")
        self._times.append(start_ns // 1000)
        self._ends.append(end_ns // 1000)
        self._statuses.append(STATUSES[status] if 0 <= status < 3 else "UNSET")
        return True

    def resource(self, pairs: Pairs) -> None:
        """Set the resource of the spans that were added since the last call."""
        columns = self._batch.columns
        new = len(self._trace_ids) - len(columns["resource"])
        self._expanded += new * expanded_bytes(pairs)
        if self._expanded > self.limits.max_expanded_bytes:
            raise expanded_too_large(self.limits)
        service = pairs.get("service.name") or UNKNOWN_SERVICE
        columns["resource"] += [pairs] * new
        columns["service"] += [service] * new

    def reject(self, why: str) -> bool:
        """Count a rejected span; always False."""
        self.rejections[why] = self.rejections.get(why, 0) + 1
        return False

    def cut(self, why: str, n: int = 1) -> None:
        """Count texts that were cut, or attributes that were dropped."""
        self.cuts[why] = self.cuts.get(why, 0) + n

    def first_attributes(self, attributes: Sequence[Any]) -> Sequence[Any]:
        """As many of the attributes as the limit allows."""
        limit = self.limits.max_attributes
        self.cut("too many attributes", len(attributes) - limit)
        return attributes[:limit]

    def learn_keys(self, keys: Collection[str]) -> bool:
        """Remember ``keys`` if all of them are within the limits; False if not."""
        if not all(0 < len(key) <= self.limits.max_key_length for key in keys):
            return False
        self.keys.update(keys)
        return True

    def put(self, pairs: Pairs, key: str, text: str | None) -> None:
        """Put an attribute into ``pairs``, cut or dropped if it is over a limit.

        ``text`` is None for a value that is nested too deep.
        """
        if not key:
            self.cut("attribute without key")
        elif len(key) > self.limits.max_key_length:
            self.cut("attribute key too long")
        elif text is None:
            self.cut("attribute nested too deep")
        else:
            if len(text) > self.limits.max_attribute_length:
                text = text[: self.limits.max_attribute_length]
                self.cut("attribute value too long")
            if key in pairs:
                self.cut("attribute key repeated")
            pairs[key] = text

    def put_extras(
        self, pairs: Pairs, message: str, events: Iterable[tuple[int, str, Pairs]]
    ) -> None:
        """Put the status message of a span, and its events, into its attributes.

        An event has its time in nanoseconds, its name and its attributes.
        """
        longest = self.limits.max_attribute_length
        if len(message) > longest:
            message = message[:longest]
            self.cut("attribute value too long")
        texts = []
        room = EVENT_ROOM * longest
        for time_ns, name, attributes in events:
            event = {"time": time_ns // 1000, "name": name, "attributes": attributes}
            text = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
            room -= len(text) + 1
            if room < 0:
                self.cut("events too long")
                break
            texts.append(text)
        events_text = f"[{','.join(texts)}]" if texts else ""
        for key, text in ((STATUS_MESSAGE, message), (EVENTS, events_text)):
            if text:
                if key in pairs:
                    self.cut("attribute key repeated")
                pairs[key] = text

    def decoded(self, *, packed: bool = True) -> Decoded:
        """The collected spans; without ``packed`` they will be written as messages of Kafka."""
        self._batch.approx_bytes, written_bytes = self._held_bytes()
        if not packed:
            written_bytes = self._message_bytes()
        return Decoded(self._batch, self.rejections, self.cuts, written_bytes)

    def _held_bytes(self) -> tuple[int, int]:
        """What the spans will take with dictionaries: while they wait, and as a table."""
        columns, spans = self._batch.columns, len(self._trace_ids)
        resources = {id(pairs): pairs for pairs in columns["resource"]}.values()
        # The texts of each dictionary: a text that is in several of them is there several times.
        keys: set[str] = set()
        others: set[str] = set()
        in_columns: dict[str, set[str]] = {}
        for pairs in columns["attributes"]:
            for key, text in pairs.items():
                if key in SEGMENT_COLUMNS:
                    in_columns.setdefault(key, set()).add(text)
                else:
                    keys.add(key)
                    others.add(text)
        texts = [{*columns["name"]}, {*columns["service"]}, keys, others, *in_columns.values()]
        texts.append({key for pairs in resources for key in pairs})
        texts.append({text for pairs in resources for text in pairs.values()})
        for key in RESOURCE_COLUMNS:
            texts.append({pairs[key] for pairs in resources if key in pairs})
        text_bytes = sum(map(_text_bytes, texts))
        attributes = sum(map(len, columns["attributes"]))
        waiting = (
            (_WAITING_ROW_BYTES + _COLUMN_BYTES * len(in_columns)) * spans
            + INDEX_BYTES * (attributes + sum(map(len, resources)))
            + text_bytes
        )
        attributes += sum(map(len, columns["resource"]))
        return waiting, _TABLE_ROW_BYTES * spans + INDEX_BYTES * attributes + text_bytes

    def _message_bytes(self) -> int:
        """What the spans will take as messages of Kafka, where each has a copy of its resource."""
        columns = self._batch.columns
        resources = Counter(map(id, columns["resource"]))
        distinct = {id(pairs): pairs for pairs in columns["resource"]}
        return (
            _TABLE_ROW_BYTES * len(self._trace_ids)
            + _utf8_bytes(columns["name"])
            + _utf8_bytes(columns["service"])
            + sum(map(_field_bytes, columns["attributes"]))
            + sum([count * _field_bytes(distinct[key]) for key, count in resources.items()])
        )


def _field_bytes(pairs: Pairs) -> int:
    """What attributes take in a message of Kafka."""
    texts = _utf8_bytes(pairs) + _utf8_bytes(pairs.values())
    return _FIELD_BYTES * len(pairs) + texts


def _text_bytes(texts: Collection[str]) -> int:
    """What a dictionary of texts takes."""
    return _utf8_bytes(texts) + _TEXT_BYTES * len(texts)


def _utf8_bytes(texts: Iterable[str]) -> int:
    sizes = [
        len(text) if text.isascii() else len(text.encode(errors="surrogatepass")) for text in texts
    ]
    return sum(sizes)


def expanded_bytes(pairs: Pairs) -> int:
    """What the attributes of a resource take for each of its spans, where they are copied."""
    texts = sum(map(len, pairs)) + sum(map(len, pairs.values()))
    return ATTRIBUTE_BYTES * len(pairs) + texts


class ValueType(Enum):
    """The type of an ``AnyValue``."""

    EMPTY = auto()
    TEXT = auto()
    BOOL = auto()
    INT = auto()
    DOUBLE = auto()
    BYTES = auto()
    ARRAY = auto()
    """Its content is an iterable of values."""
    MAP = auto()
    """Its content is an iterable of pairs of key and value."""


Content = tuple[ValueType, Any]
GetContent = Callable[[Any], Content]
"""Reads an ``AnyValue``, which is a protobuf message or a JSON object: its type and content."""


class _TooDeep(Exception):
    """A value is nested deeper than the limit."""


def text_of(value: Any, get_content: GetContent, longest: int, deepest: int) -> str | None:
    """An attribute's ``value`` as text, or as JSON if it is no text; None if nested too deep.

    A result longer than ``longest`` is incomplete: writing stops once it is that long.
    """
    kind, content = get_content(value)
    if kind is ValueType.TEXT:
        return str(content)
    if kind is ValueType.EMPTY:
        return ""
    if kind is not ValueType.ARRAY and kind is not ValueType.MAP:
        return plain_text(kind, content)
    parts: list[str] = []
    try:
        _write(kind, content, get_content, parts.append, longest + 1, deepest)
    except _TooDeep:
        return None
    return "".join(parts)


def plain_text(kind: ValueType, content: Any) -> str:
    """A number, a bool or bytes as text."""
    if kind is ValueType.BOOL:
        return "true" if content else "false"
    if kind is ValueType.INT:
        return str(content)
    if kind is ValueType.BYTES:
        return base64.b64encode(content).decode()
    if math.isfinite(content):
        return repr(content)
    return "NaN" if math.isnan(content) else "Infinity" if content > 0 else "-Infinity"


def _write(
    kind: ValueType,
    content: Any,
    get_content: GetContent,
    put: Callable[[str], None],
    room: int,
    depth: int,
) -> int:
    """Write a value as JSON while there is room; return the room left."""
    if kind is ValueType.ARRAY or kind is ValueType.MAP:
        if depth == 0:
            raise _TooDeep
        return _write_many(kind, content, get_content, put, room, depth - 1)
    if kind is ValueType.TEXT:
        text = _quoted(content, room)
    elif kind is ValueType.EMPTY:
        text = "null"
    elif kind is ValueType.BYTES:
        text = f'"{plain_text(kind, content[:room])}"'
    else:
        text = plain_text(kind, content)
        if kind is ValueType.DOUBLE and not math.isfinite(content):
            text = f'"{text}"'  # JSON has no infinity and no NaN
    put(text)
    return room - len(text)


def _write_many(
    kind: ValueType,
    content: Iterable[Any],
    get_content: GetContent,
    put: Callable[[str], None],
    room: int,
    depth: int,
) -> int:
    start, end = "[]" if kind is ValueType.ARRAY else "{}"
    put(start)
    room -= 1
    comma = ""
    for item in content:
        if room <= 0:
            return room
        if kind is ValueType.MAP:
            key, value = item
            before = f"{comma}{_quoted(key, room)}:"
        else:
            before, value = comma, item
        put(before)
        room = _write(*get_content(value), get_content, put, room - len(before), depth)
        comma = ","
    put(end)
    return room - 1


def _quoted(text: str, room: int) -> str:
    return json.dumps(text[: max(room, 0)], ensure_ascii=False)
