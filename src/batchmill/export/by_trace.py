"""A request with traces, one message for each of them: a key must be that of all that it is for.

The bytes of an ``ExportTraceServiceRequest`` are cut and put together again, and nothing in them is
parsed but its frame: what is not known of it stays, and a small body cannot take much memory.
"""

from __future__ import annotations

from collections.abc import Iterator

_RESOURCE_SPANS = _TRACE_ID = 1
_SCOPE_SPANS = _SPANS = 2
_LENGTH_DELIMITED = 2
_FIXED = {1: 8, 5: 4}


class Part:
    """The spans of one trace."""

    def __init__(self, key: bytes | None) -> None:
        self.key = key
        """The trace id; None: it has none."""
        self.spans = 0
        self._groups: dict[int, tuple[bytes, dict[int, tuple[bytes, list[bytes]]]]] = {}

    def add(self, group: int, shared: bytes, scope: int, named: bytes, span: bytes) -> None:
        """One more span, of the resource and the scope of these numbers and fields."""
        self.spans += 1
        scopes = self._groups.setdefault(group, (shared, {}))[1]
        scopes.setdefault(scope, (named, []))[1].append(span)

    def body(self) -> bytes:
        """The request that they make, made now: there may be many, each with what all share."""
        parts = []
        for shared, scopes in self._groups.values():
            inner = [shared]
            for named, spans in scopes.values():
                inner.append(_field(_SCOPE_SPANS, b"".join([named, *spans])))
            parts.append(_field(_RESOURCE_SPANS, b"".join(inner)))
        return b"".join(parts)


class _Whole(Part):
    """A request as it came."""

    def __init__(self, key: bytes | None, spans: int, body: bytes) -> None:
        super().__init__(key)
        self.spans = spans
        self._body = body

    def body(self) -> bytes:
        return self._body


def by_trace(body: bytes) -> list[Part]:
    """The request's traces, in the order of their first spans; raises ValueError if it is none."""
    parts: dict[bytes, Part] = {}
    for group, (start, end) in enumerate(_only(body, 0, len(body), _RESOURCE_SPANS)):
        shared = _others(body, start, end, _SCOPE_SPANS)
        for scope, (first, last) in enumerate(_only(body, start, end, _SCOPE_SPANS)):
            named = _others(body, first, last, _SPANS)
            for at, until in _only(body, first, last, _SPANS):
                key = _trace_id(body, at, until)
                part = parts.get(key)
                if part is None:
                    part = parts[key] = Part(key or None)
                part.add(group, shared, scope, named, _field(_SPANS, body[at:until]))
    found = list(parts.values())
    if len(found) > 1:
        return found
    return [_Whole(found[0].key, found[0].spans, body) if found else _Whole(None, 0, body)]


def _trace_id(body: bytes, start: int, end: int) -> bytes:
    for first, last in _only(body, start, end, _TRACE_ID):
        return body[first:last]
    return b""


def _only(body: bytes, start: int, end: int, wanted: int) -> Iterator[tuple[int, int]]:
    """Where the contents of the fields with that number are."""
    for number, kind, _, first, last in _fields(body, start, end):
        if number == wanted and kind == _LENGTH_DELIMITED:
            yield first, last


def _others(body: bytes, start: int, end: int, left_out: int) -> bytes:
    """All other fields, as they are."""
    return b"".join(
        body[begin:last]
        for number, _, begin, _, last in _fields(body, start, end)
        if number != left_out
    )


def _fields(body: bytes, start: int, end: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Number and wire type of each field, where it begins, where its content begins and ends."""
    at = start
    while at < end:
        begin = at
        tag, at = _varint(body, at, end)
        number, kind = tag >> 3, tag & 7
        first = at
        if kind == 0:
            _, at = _varint(body, at, end)
        elif kind == _LENGTH_DELIMITED:
            length, first = _varint(body, at, end)
            at = first + length
        elif kind in _FIXED:
            at += _FIXED[kind]
        else:
            raise ValueError(f"the wire type {kind} at byte {begin} is none that is in use")
        if at > end:
            raise ValueError(f"the field at byte {begin} has no end")
        yield number, kind, begin, first, at


def _varint(body: bytes, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 70:
        byte = body[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError(f"the number at byte {at} has no end")


def _field(number: int, content: bytes) -> bytes:
    head = bytearray([number << 3 | _LENGTH_DELIMITED])
    length = len(content)
    while length > 0x7F:
        head.append(length & 0x7F | 0x80)
        length >>= 7
    head.append(length)
    return bytes(head) + content
