"""Decodes requests with the compiled decoder, ``wire.c``, where it was built.

It gives the same spans, rejections and errors as :mod:`.protobuf` and :mod:`.json`, which are the
reference: what ``wire.c`` does not take, the reference decodes. Its result stays in C's memory, as
columns, and becomes an Arrow table together with that of other requests.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
import os
import sys
import threading
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import pyarrow as pa
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from batchmill.errors import ConfigError
from batchmill.ingest.decode import json, protobuf
from batchmill.ingest.decode.body import BadRequest, Limits, TooLarge
from batchmill.ingest.decode.rows import (
    INDEX_BYTES,
    KINDS,
    STATUSES,
    UNKNOWN_SERVICE,
    Decoded,
    Pairs,
    Rows,
    expanded_bytes,
)
from batchmill.spool import (
    RESOURCE_COLUMNS,
    SEGMENT_COLUMNS,
    SPAN_COLUMNS,
    PackedSpans,
    SpanBatch,
)

log = logging.getLogger("batchmill.ingest")

LIBRARY = Path(__file__).with_name("wire.lib")
"""Built from ``wire.c`` with the package, where there is a C compiler."""
SETTING = "BATCHMILL_DECODER"
"""Environment variable: ``python`` or ``compiled``; by default what is there."""
_VERSION = 4
_DONE, _GIVE_UP, _NO_MEMORY = range(3)
_TIME, _END, _TRACE, _SPAN, _PARENT, _KIND, _STATUS, _RESOURCE = range(-20, -12)
_REST_OFFSETS, _REST_KEYS, _REST_VALUES = range(-12, -9)
_NAME = len(SEGMENT_COLUMNS)
_CACHED_RESOURCE_BYTES = 4096
_TABLE_ROW_BYTES = 72
"""What a span takes in a table beyond what it takes before."""
_UNLIMITED = 2**40
MOST_ODD = 0.25
"""Share of odd spans up to which a request is decoded here: each takes twice as long as in the
reference, and is decoded again if the request is refused in the end."""

_MICROS = pa.timestamp("us", tz="UTC")
_TEXTS = pa.dictionary(pa.int32(), pa.string())
_SEEDING = threading.Lock()
_NO_BYTES = pa.py_buffer(b"")
_KIND_TEXTS, _STATUS_TEXTS = pa.array(KINDS[1:]), pa.array(STATUSES)


class _Limits(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            *("max_spans", "max_unknown", "max_span_bytes", "max_attributes"),
            *("max_attribute_length", "max_key_length", "max_name_length"),
            *("max_json_depth", "max_json_values"),
        )
    ]


class _Replacement(ctypes.Structure):
    _fields_ = [
        ("start", ctypes.c_int64),
        ("data", ctypes.c_char_p),
        ("size", ctypes.c_int64),
    ]


class _About(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "groups", "attributes", "bytes")),
        *((name, ctypes.c_int64) for name in ("resource_count", "odd_count")),
        *((name, ctypes.POINTER(ctypes.c_int64)) for name in ("resources", "odd")),
    ]


class _View(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("length", "nulls", "distinct", "text_bytes")),
        *((name, ctypes.c_void_p) for name in ("numbers", "valid", "offsets", "text")),
    ]


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled decoder; None where it was not built, or is not wanted.

    Raises :class:`ConfigError` if it is wanted, and cannot be had.
    """
    wanted = os.environ.get(SETTING, "")
    if wanted not in ("", "python", "compiled"):
        raise ConfigError(SETTING, wanted, "python or compiled, or not set")
    if wanted == "python":
        return None
    try:
        if sys.byteorder != "little":
            raise OSError("it needs a little-endian processor")
        wire = _declare(ctypes.CDLL(str(LIBRARY)))
        if wire.batchmill_version() != _VERSION:
            raise OSError("it is of another version: install batchmill again")
    except (OSError, AttributeError) as error:
        if wanted:
            allowed = f"python, or not set: the compiled decoder cannot be used ({error})"
            raise ConfigError(SETTING, wanted, allowed) from error
        if LIBRARY.exists():
            log.warning("requests are decoded in Python, slower: %s: %s", LIBRARY, error)
        return None
    with _SEEDING:
        wire.batchmill_seed(*array("Q", os.urandom(16)))
    return wire


def decoder_in_use() -> str:
    """``compiled`` or ``python``."""
    return "python" if library() is None else "compiled"


def _declare(wire: ctypes.CDLL) -> ctypes.CDLL:
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    wire.batchmill_seed.argtypes = [ctypes.c_uint64] * 2
    wire.batchmill_keys.argtypes = [ctypes.c_char_p, pointer, ctypes.c_int32]
    wire.batchmill_keys.restype = pointer
    wire.batchmill_decode.argtypes = [
        *(pointer, ctypes.POINTER(_Limits), ctypes.c_int, ctypes.c_char_p, number),
        *(pointer, number, ctypes.POINTER(pointer)),
    ]
    wire.batchmill_about.argtypes = [pointer, ctypes.POINTER(_About)]
    wire.batchmill_trim.argtypes = [pointer]
    wire.batchmill_spans_free.argtypes = [pointer]
    wire.batchmill_join.argtypes = [pointer, number, pointer, pointer, ctypes.POINTER(pointer)]
    wire.batchmill_view.argtypes = [pointer, ctypes.c_int, ctypes.POINTER(_View)]
    wire.batchmill_table_free.argtypes = [pointer]
    for name in ("seed", "about", "trim", "spans_free", "table_free"):
        getattr(wire, f"batchmill_{name}").restype = None
    return wire


class Form(NamedTuple):
    """A form of requests, with the reference for its parts."""

    is_json: bool
    read_spans: Callable[[bytes, Iterable[tuple[int, int, int]], Rows], None]
    read_resource: Callable[[bytes, Rows], Pairs]


PROTOBUF = Form(False, protobuf.read_spans, protobuf.read_resource)
JSON = Form(True, json.read_spans, json.read_resource)


class Resource(NamedTuple):
    """The resource of a group of spans."""

    sent: bytes
    """As it was sent: one object for all requests, if it is cached."""
    pairs: Pairs
    cuts: tuple[tuple[str, int], ...] = ()
    attributes: int = 0
    """How many attributes count towards the limit of a request."""


def decode_compiled(body: bytes, form: Form, limits: Limits) -> Decoded | None:
    """Decode a request; None if the reference has to do it."""
    wire = library()
    if wire is None:
        return None
    rows = Rows(limits)
    try:
        spans = _call(wire, body, form, _c_limits(limits))
        if spans is None:
            return None
        rows.attribute_count(spans.about.attributes)
        odd = spans.odd()
        if len(odd) > MOST_ODD * (spans.about.rows + len(odd)):
            return None
        replacements = [_replacement(body, start, end, form, rows) for start, end in odd]
        if replacements:
            spans = _call(wire, body, form, _c_limits(limits, relaxed=True), replacements)
            if spans is None or spans.about.odd_count:
                return None
        largest = most = 0
        sent: list[bytes] = []
        known: dict[bytes, Resource] = {}
        for data in _resources_as_sent(body, spans):
            resource = known.get(data) or known.setdefault(data, _resource(data, form, limits))
            sent.append(resource.sent)
            rows.attribute_count(resource.attributes)
            for why, count in resource.cuts:
                rows.cut(why, count)
            largest = max(largest, expanded_bytes(resource.pairs))
            most = max(most, len(resource.pairs))
        if spans.about.rows * largest > limits.max_expanded_bytes:
            return None  # it may be too much: the reference counts the spans of each resource
    except (BadRequest, TooLarge):
        return None  # something is wrong: the reference says what comes first
    spans.trim()
    batch = CompiledSpans(spans, sent, form, limits, most, odd_spans=len(replacements))
    return Decoded(batch, rows.rejections, rows.cuts, batch.table_bytes)


class _Spans:
    """The columns of one request, in C's memory."""

    def __init__(self, wire: ctypes.CDLL, address: ctypes.c_void_p) -> None:
        self.wire = wire
        self.address = address
        self.about = _About()
        wire.batchmill_about(address, ctypes.byref(self.about))

    def __del__(self) -> None:
        self.wire.batchmill_spans_free(self.address)

    def trim(self) -> None:
        """Keep only what a table is made of: the spans may wait for long."""
        self.wire.batchmill_trim(self.address)
        self.wire.batchmill_about(self.address, ctypes.byref(self.about))

    def odd(self) -> list[tuple[int, int]]:
        """Start and end of each odd span in the body."""
        numbers = self.about.odd[: self.about.odd_count]
        return list(zip(numbers[1::3], numbers[2::3], strict=True))

    def resource_parts(self) -> list[tuple[int, int, int]]:
        """Group, start and end of each part of a resource in the body."""
        numbers = self.about.resources[: self.about.resource_count]
        return list(zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True))


def _call(
    wire: ctypes.CDLL,
    body: bytes,
    form: Form,
    limits: _Limits,
    replacements: Sequence[_Replacement] = (),
) -> _Spans | None:
    address = ctypes.c_void_p()
    others = (_Replacement * len(replacements))(*replacements)
    outcome = wire.batchmill_decode(
        *(_keys(), ctypes.byref(limits), form.is_json, body, len(body)),
        *(ctypes.byref(others), len(others), ctypes.byref(address)),
    )
    if outcome == _NO_MEMORY:
        raise MemoryError
    return _Spans(wire, address) if outcome == _DONE else None


@functools.cache
def _keys() -> int:
    wire = library()
    assert wire is not None
    keys = [key.encode() for key in SEGMENT_COLUMNS]
    ends = array("i", itertools.accumulate(map(len, keys)))
    address = wire.batchmill_keys(b"".join(keys), ends.buffer_info()[0], len(keys))
    if not address:
        raise MemoryError
    return int(address)


@functools.lru_cache
def _c_limits(limits: Limits, *, relaxed: bool = False) -> _Limits:
    """``relaxed`` for spans that the reference has brought within the limits, in characters."""
    texts = (
        limits.max_attributes,
        limits.max_attribute_length,
        limits.max_key_length,
        limits.max_name_length,
    )
    return _Limits(
        limits.max_spans,
        4 * limits.max_spans + protobuf.SPARE_FIELDS,
        _UNLIMITED if relaxed else limits.max_span_bytes,
        *([_UNLIMITED] * len(texts) if relaxed else texts),
        limits.max_json_depth,
        limits.max_json_values,
    )


def _replacement(body: bytes, start: int, end: int, form: Form, rows: Rows) -> _Replacement:
    """An odd span, decoded by the reference and written again in plain protobuf."""
    known = len(rows.batch.columns["attributes"])
    form.read_spans(body, [(0, start, end)], rows)
    if len(rows.batch.columns["attributes"]) == known:
        return _Replacement(start, None, -1)  # rejected
    span = {name: values[-1] for name, values in rows.batch.columns.items() if values}
    data = Span(
        trace_id=bytes.fromhex(span["trace_id"]),
        span_id=bytes.fromhex(span["span_id"]),
        parent_span_id=bytes.fromhex(span["parent_span_id"] or ""),
        name=span["name"],
        kind=cast("Any", KINDS.index(span["kind"])),
        start_time_unix_nano=span["time"] * 1000,
        end_time_unix_nano=span["end_time"] * 1000,
        status=Status(code=cast("Any", STATUSES.index(span["status"]))),
        attributes=[
            KeyValue(key=key, value=AnyValue(string_value=text))
            for key, text in span["attributes"].items()
        ],
    ).SerializeToString()
    return _Replacement(start, data, len(data))


def _resources_as_sent(body: bytes, spans: _Spans) -> list[bytes]:
    """The bytes of each group's resource."""
    pieces: list[list[bytes]] = [[] for _ in range(spans.about.groups)]
    for group, start, end in spans.resource_parts():
        pieces[group].append(body[start:end])
    # A field that occurs several times is one message: its parts are concatenated.
    return [b"".join(parts) for parts in pieces]


def _resource(data: bytes, form: Form, limits: Limits) -> Resource:
    decode = _small_resource if len(data) <= _CACHED_RESOURCE_BYTES else _decode_resource
    return decode(data, form, limits)


def _decode_resource(data: bytes, form: Form, limits: Limits) -> Resource:
    rows = Rows(limits)
    pairs = form.read_resource(data, rows)
    return Resource(data, pairs, tuple(rows.cuts.items()), rows.attributes_so_far)


_small_resource = functools.lru_cache(maxsize=1024)(_decode_resource)


class CompiledSpans(PackedSpans):
    """The spans of one request.

    Their resources stay as they were sent until they are joined: as objects of Python they would
    take several times the memory.
    """

    def __init__(
        self,
        spans: _Spans,
        resources: Sequence[bytes],
        form: Form,
        limits: Limits,
        most_pairs: int,
        *,
        odd_spans: int = 0,
    ) -> None:
        """``resources`` has that of each group, ``most_pairs`` is what the largest one has."""
        self.odd_spans = odd_spans
        """How many spans the reference has decoded."""
        self._spans = spans
        self._resources = resources
        self._form = form
        self._limits = limits
        distinct = {id(data): sys.getsizeof(data) for data in resources}
        self.weight = spans.about.bytes + sum(distinct.values()) + sys.getsizeof(resources)
        # Ids are twice as long there, and each span has the numbers of its resource's texts.
        row_bytes = _TABLE_ROW_BYTES + INDEX_BYTES * most_pairs
        self.table_bytes = self.weight + row_bytes * spans.about.rows

    def __len__(self) -> int:
        return int(self._spans.about.rows)

    def unpacked(self) -> SpanBatch:
        """The same spans as lists."""
        table = self.join([self])
        columns: dict[str, list[Any]] = {}
        for name in SPAN_COLUMNS:
            column = table[name]
            if pa.types.is_timestamp(column.type):
                column = column.cast(pa.int64())
            columns[name] = column.to_pylist()
        for name in ("resource", "attributes"):
            columns[name] = [dict(pairs) for pairs in columns[name]]
        attributes = columns["attributes"]
        for key, name in SEGMENT_COLUMNS.items():
            column = table[name]
            if column.null_count < len(column):
                for pairs, text in zip(attributes, column.to_pylist(), strict=True):
                    if text is not None:
                        pairs[key] = text
        return SpanBatch(columns, approx_bytes=self.weight)

    @classmethod
    def join(cls, parts: Sequence[CompiledSpans]) -> pa.Table:
        """The spans of several requests as one table."""
        distinct: list[Pairs] = []
        numbers: dict[tuple[bytes, bool, int], int] = {}
        resources, firsts = array("i"), array("q")
        for part in parts:
            firsts.append(len(resources))
            for data in part._resources:
                key = (data, part._form.is_json, id(part._limits))
                number = numbers.setdefault(key, len(distinct))
                if number == len(distinct):
                    distinct.append(_resource(data, part._form, part._limits).pairs)
                resources.append(number)
        return _table(parts, resources, firsts, distinct)


class _Table:
    """A table in C's memory; its buffers keep it alive."""

    def __init__(self, parts: Sequence[_Spans], resources: array[int], firsts: array[int]) -> None:
        self._wire = parts[0].wire
        self._address = ctypes.c_void_p()
        self._no_texts: dict[int, pa.Array] = {}
        addresses = (ctypes.c_void_p * len(parts))(*(part.address for part in parts))
        outcome = self._wire.batchmill_join(
            *(ctypes.byref(addresses), len(parts)),
            *(resources.buffer_info()[0], firsts.buffer_info()[0]),
            ctypes.byref(self._address),
        )
        if outcome != _DONE:
            raise MemoryError

    def __del__(self) -> None:
        self._wire.batchmill_table_free(self._address)

    def view(self, column: int) -> _View:
        view = _View()
        self._wire.batchmill_view(self._address, column, ctypes.byref(view))
        return view

    def buffer(self, address: int | None, size: int) -> pa.Buffer:
        return pa.foreign_buffer(address, size, self) if address else _NO_BYTES

    def numbers(self, column: int, kind: pa.DataType) -> pa.Array:
        """A column of numbers."""
        view = self.view(column)
        size = view.length * kind.bit_width // 8
        valid = self.buffer(view.valid, (view.length + 7) // 8) if view.nulls else None
        buffers = [valid, self.buffer(view.numbers, size)]
        return pa.Array.from_buffers(kind, view.length, buffers, view.nulls)

    def texts(self, column: int) -> pa.Array:
        """A column of texts that are not in a dictionary."""
        view = self.view(column)
        valid = self.buffer(view.valid, (view.length + 7) // 8) if view.nulls else None
        offsets = self.buffer(view.offsets, 4 * (view.length + 1))
        buffers = [valid, offsets, self.buffer(view.text, view.text_bytes)]
        return pa.Array.from_buffers(pa.string(), view.length, buffers, view.nulls)

    def dictionary(self, column: int) -> pa.Array:
        """A column of texts with its dictionary."""
        view = self.view(column)
        if not view.distinct:  # most columns: they share one array of nulls
            if view.length not in self._no_texts:
                self._no_texts[view.length] = pa.nulls(view.length, _TEXTS)
            return self._no_texts[view.length]
        offsets = self.buffer(view.offsets, 4 * (view.distinct + 1))
        buffers = [None, offsets, self.buffer(view.text, view.text_bytes)]
        texts = pa.Array.from_buffers(pa.string(), view.distinct, buffers, 0)
        return pa.DictionaryArray.from_arrays(self.numbers(column, pa.int32()), texts, safe=False)


def _table(
    parts: Sequence[CompiledSpans], resources: array[int], firsts: array[int], pairs: list[Pairs]
) -> pa.Table:
    table = _Table([part._spans for part in parts], resources, firsts)
    resource = table.numbers(_RESOURCE, pa.int32())
    kinds, statuses = table.numbers(_KIND, pa.int32()), table.numbers(_STATUS, pa.int32())
    services = [known.get("service.name") or UNKNOWN_SERVICE for known in pairs]
    columns = {
        "time": table.numbers(_TIME, _MICROS),
        "end_time": table.numbers(_END, _MICROS),
        "trace_id": table.texts(_TRACE),
        "span_id": table.texts(_SPAN),
        "parent_span_id": table.texts(_PARENT),
        "name": table.dictionary(_NAME),
        "kind": pa.DictionaryArray.from_arrays(kinds, _KIND_TEXTS),
        "status": pa.DictionaryArray.from_arrays(statuses, _STATUS_TEXTS),
        "service": _shared(services, resource),
        "resource": _maps(pairs).take(resource),
        "attributes": pa.MapArray.from_arrays(
            table.numbers(_REST_OFFSETS, pa.int32()),
            table.dictionary(_REST_KEYS),
            table.dictionary(_REST_VALUES),
        ),
    }
    for key, name in RESOURCE_COLUMNS.items():
        columns[name] = _shared([known.get(key) for known in pairs], resource)
    for number, name in enumerate(SEGMENT_COLUMNS.values()):
        columns[name] = table.dictionary(number)
    return pa.table(columns)


def _shared(texts: Sequence[str | None], numbers: pa.Array) -> pa.Array:
    """A text for each row, by the number of its resource."""
    return pa.array(texts, pa.string()).dictionary_encode().take(numbers)


def _maps(dicts: Sequence[Pairs]) -> pa.Array:
    offsets = pa.array([0, *itertools.accumulate(map(len, dicts))], pa.int32())
    keys = [key for pairs in dicts for key in pairs]
    texts = [text for pairs in dicts for text in pairs.values()]
    return pa.MapArray.from_arrays(
        offsets,
        pa.array(keys, pa.string()).dictionary_encode(),
        pa.array(texts, pa.string()).dictionary_encode(),
    )
