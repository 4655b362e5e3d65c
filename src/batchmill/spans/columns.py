"""Reduces OpenTelemetry spans to the plain columns that all later steps need.

:func:`compact` looks up each attribute once and drops the wide maps, except for spans whose event
types have them. All later steps (:mod:`.sources`, :mod:`.links`, :mod:`.topn`) use its columns
only.

Two rules hold throughout. An attribute that is blank or null counts as missing. Where several
attributes could give a name, the first one that is present does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchmill.aggregate import read_whole
from batchmill.spans.meaning import (
    ADDRESSES,
    CACHES,
    CONNECTING,
    MEANINGS,
    PORTS,
    SENDS,
    STEPS,
)
from batchmill.spans.names import normalise_names
from batchmill.spans.tags import tag_columns
from batchmill.spans.texts import Longs, Mask, Texts, at, first, masked, one_array
from batchmill.spool import ATTRIBUTE_COLUMNS

STATEMENT_LIMIT = 2000
"""How many characters of a statement are kept."""
RPC_STATUS_LIMIT = 64
"""How many characters of an RPC status are kept: more than any name of a code has."""

# Commands of redis and memcached.
_READS = """
    GET MGET HGET HGETALL HMGET LRANGE SMEMBERS EXISTS ZRANGE SCAN STRLEN TTL TYPE KEYS GETS
"""
_WRITES = """
    SET MSET SETEX SETNX HSET HMSET DEL INCR DECR INCRBY DECRBY EXPIRE LPUSH RPUSH LPOP RPOP
    SADD SREM ZADD ZREM APPEND PUT ADD REPLACE DELETE HDEL UNLINK GETSET
"""
_COMMANDS = dict.fromkeys(_READS.split(), 0) | dict.fromkeys(_WRITES.split(), 1)
_OTHER = 2
_FIRST_WORD = r"(?P<word>[^ \t\n\x0b\f\r]+)"

_SERVING = ("SERVER", "CONSUMER")
_CALLING = ("CLIENT", "PRODUCER")

_URL = (
    r"^[A-Za-z][A-Za-z0-9+.-]*://(?:[^/?#]*@)?"
    r"(?P<host>\[[^\]/?#]+\]|[^:/?#]+)(?::(?P<port>[0-9]+))?"
)
"""Regular expression of the beginning of a URL that has a host."""

_MOST_MICROS = 2**31 * 1000 - 1
"""More than 24 days in milliseconds do not fit an int."""


def compact(
    spans: pa.Table, *, keys: Collection[str] | None = None, normalise: bool = True
) -> pa.Table:
    """One row for each span of ``SPAN_SCHEMA``, with all columns that are derived from it.

    Beyond the span's own columns: ``latency`` in whole ms, ``latencyMicros``, ``status`` as a
    boolean, ``instance``, ``type``, the codes; ``tags`` and ``tag`` of spans that serve; ``peer``
    and ``peer_layer``, where a call went as far as the caller knows; ``store`` (the ``peer`` of a
    call to a database or cache) with ``system``, ``cache_operation`` (null for a database) and
    ``statement``; ``broker`` (of a message that was sent or processed) with ``broker_endpoint``;
    ``provider`` and ``model`` with the two token counts. Columns that do not apply to a span are
    null. With ``keys``, ``tags`` and ``tag`` have the attributes with these keys only; the map
    ``attributes`` is not read where each of them has a column of its own. With ``normalise``,
    ``name`` has no ids in it where it looks like a URL: see :mod:`.names`.

    ``kind`` is INTERNAL also for spans that are only steps of a call or of a message: connecting to
    a database, and receiving a message.
    """
    given = _Spans(spans.num_rows, lambda name: Texts.of(spans[name]))
    kind = given.or_else(given.column("kind"), "INTERNAL")
    # Only these may have called a place, or processed a message of a broker there.
    rows = np.flatnonzero(kind.one_of("CLIENT", "PRODUCER", "CONSUMER"))
    called = _Calls(given.take(rows), kind.take(rows))
    if called.is_step.any():
        stays = np.ones(len(given), np.bool_)
        stays[rows] = ~called.is_step
        kind = given.or_else(kind.where(stays), "INTERNAL")
    service = given.or_else(given.filled("service"), "unknown_service")
    instance = given.first_of(
        iter((given.filled("service_instance_id"), given.filled("host_name"), service))
    )
    micros = np.clip(_micros(spans["end_time"]) - _micros(spans["time"]), 0, _MOST_MICROS)
    tags, tag = tag_columns(spans, kind.one_of(*_SERVING), keys)
    name = given.column("name")
    if normalise:
        name = normalise_names(name, given.filled(ATTRIBUTE_COLUMNS["http.route"]).present)
    return pa.table(
        {
            **{name: _id(spans[name]) for name in ("trace_id", "span_id", "parent_span_id")},
            "name": name.array(),
            "kind": kind.array(),
            "time": one_array(spans["time"]),
            "latency": pa.array((micros // 1000).astype(np.int32)),
            "latencyMicros": pa.array(micros),
            "status": pa.array(~given.column("status").one_of("ERROR")),
            "service": service.array(),
            "instance": instance.array(),
            "type": _type(given).array(),
            "httpResponseStatusCode": _whole(given.first("HTTP status"), "int").cast(pa.int32()),
            "rpcStatusCode": _cut(given.first("RPC status"), RPC_STATUS_LIMIT).array(),
            "tags": tags,
            "tag": tag,
            **{name: texts.spread(rows, len(given)).array() for name, texts in called.texts()},
            **{name: _spread(numbers, rows, len(given)) for name, numbers in called.tokens()},
        }
    )


def calls_to(spans: pa.Table, place: str) -> Mask:
    """Which spans call a place, or process a message of the broker there.

    ``spans`` has ``kind``, ``name`` and those of the columns of attributes that there are. A model
    is called at its provider, too, wherever that is.
    """
    texts = _called(spans)
    mask = np.zeros(spans.num_rows, np.bool_)
    for name in ("peer", "broker", "provider"):
        mask |= texts[name].one_of(place)
    return mask


def backends_of(
    spans: Sequence[tuple[str, str, Mapping[str, str]]],
) -> list[tuple[str, str] | None]:
    """The name and the layer of what each span uses that sends no spans; None if there is none.

    That is the database, cache or model provider that it calls, or the broker of its message. A
    span is its kind, its name and its attributes.
    """
    if not spans:
        return []
    kinds, names, attributes = zip(*spans, strict=True)
    present = set().union(*attributes)
    columns = {
        column: [pairs.get(key) for pairs in attributes]
        for key, column in ATTRIBUTE_COLUMNS.items()
        if key in present
    }
    texts = _called(pa.table({"kind": list(kinds), "name": list(names), **columns}))
    wanted = ("store", "cache_operation", "broker", "provider")
    backends: list[tuple[str, str] | None] = []
    for store, in_cache, broker, provider in zip(
        *(texts[name].strings().to_pylist() for name in wanted), strict=True
    ):
        if store is not None:
            backends.append((store, "VIRTUAL_CACHE" if in_cache else "VIRTUAL_DATABASE"))
        elif broker is not None:
            backends.append((broker, "VIRTUAL_MQ"))
        else:
            backends.append(None if provider is None else (provider, "VIRTUAL_GENAI"))
    return backends


def serves(table: pa.Table) -> Mask:
    """In which spans a service serves a request or processes a message."""
    return Texts.of(table["kind"]).one_of(*_SERVING)


def calls(table: pa.Table) -> Mask:
    """In which spans a service makes a request or sends a message."""
    return Texts.of(table["kind"]).one_of(*_CALLING)


def _called(spans: pa.Table) -> dict[str, Texts]:
    """The columns of :meth:`_Calls.texts`; a column that the spans lack counts as null."""
    rows, present = spans.num_rows, spans.column_names
    given = _Spans(
        rows, lambda name: Texts.of(spans[name]) if name in present else Texts.none(rows)
    )
    return dict(_Calls(given, given.or_else(given.column("kind"), "INTERNAL")).texts())


class _Spans:
    """The texts of spans; each column is looked at once."""

    def __init__(self, count: int, read: Callable[[str], Texts]) -> None:
        self._count = count
        self._read = read
        self._columns: dict[str, Texts] = {}
        self._filled: dict[str, Texts] = {}

    def __len__(self) -> int:
        return self._count

    def take(self, rows: Longs) -> _Spans:
        """Some of the spans."""
        return _Spans(len(rows), lambda name: self.column(name).take(rows))

    def column(self, name: str) -> Texts:
        """A column as it is."""
        if name not in self._columns:
            self._columns[name] = self._read(name)
        return self._columns[name]

    def filled(self, name: str) -> Texts:
        """A column without blank texts."""
        if name not in self._filled:
            self._filled[name] = self.column(name).filled()
        return self._filled[name]

    def first(self, meaning: str) -> Texts:
        """The first attribute of a meaning that is present."""
        return self.first_of(self.filled(ATTRIBUTE_COLUMNS[key]) for key in MEANINGS[meaning])

    def any(self, meaning: str) -> Mask:
        """Which spans have an attribute of a meaning."""
        present = np.zeros(len(self), np.bool_)
        for key in MEANINGS[meaning]:
            texts = self.filled(ATTRIBUTE_COLUMNS[key])
            if not texts.is_empty:
                present |= texts.present
        return present

    def first_of(self, columns: Iterator[Texts]) -> Texts:
        """Of each span the text of the first column that has one."""
        return first(columns, len(self))

    def or_else(self, texts: Texts, other: str) -> Texts:
        """Texts, and another one for spans that have none."""
        return self.first_of(iter((texts, Texts.chosen(np.zeros(len(self)), other))))


def _type(spans: _Spans) -> Texts:
    types = np.zeros(len(spans), np.int32)
    # In this order, because the last one counts.
    for code, meaning in ((1, "HTTP"), (0, "RPC"), (2, "messaging"), (3, "system")):
        types[spans.any(meaning)] = code
    types[spans.any("model call")] = 4
    return Texts.chosen(types, "RPC", "HTTP", "MQ", "DATABASE", "GenAI")


class _Calls:
    """Spans that may have called a place, or processed a message of a broker there."""

    def __init__(self, spans: _Spans, kind: Texts) -> None:
        self._spans = spans
        self._name = spans.column("name")
        self._system = spans.first("system")
        self._operation = spans.first("operation")
        self._statement = spans.first("statement")
        self._messaging = spans.first("messaging")
        self._message_operation = spans.first("message operation")
        is_client = kind.one_of("CLIENT")
        self.is_step = _in_small_letters(self._message_operation, STEPS)
        """Which are only a step of a call or of a message."""
        self.is_step |= self._connects(is_client & self._system.present)
        is_call = ~self.is_step
        self._is_client = is_client & is_call
        self._calls = kind.one_of(*_CALLING) & is_call
        self._has_message = kind.one_of("PRODUCER", "CONSUMER") & is_call
        self._in_ai = self._is_client & spans.any("model call")

    def texts(self) -> Iterator[tuple[str, Texts]]:
        """The columns of texts."""
        spans = self._spans
        destination = spans.first_of(self._destinations())
        in_store = self._is_client & self._system.present
        is_cache = _in_small_letters(self._system, CACHES)
        in_broker = self._messaging.present & (self._has_message | self._is_client & self._sends())
        yield "peer", destination.where(self._calls)
        yield "peer_layer", self._layer(is_cache).where(self._calls & destination.present)
        yield "store", destination.where(in_store)
        yield "system", self._system.where(in_store)
        yield "cache_operation", self._cache_operation(in_store & is_cache)
        statement = self._first_where(in_store, self._statement, self._name)
        yield "statement", _cut(statement, STATEMENT_LIMIT)
        yield "broker", destination.where(in_broker)
        topic = spans.first("topic")
        yield "broker_endpoint", self._first_where(in_broker, topic, self._name)
        for name in ("provider", "model"):
            yield name, spans.or_else(spans.first(name), "unknown").where(self._in_ai)

    def tokens(self) -> Iterator[tuple[str, pa.Array]]:
        """The columns of token counts."""
        for meaning in ("input tokens", "output tokens"):
            counts = _whole(self._spans.first(meaning), "long").fill_null(0)
            yield meaning.replace(" ", "_"), masked(counts.to_numpy(), self._in_ai)

    def _first_where(self, mask: Mask, *columns: Texts) -> Texts:
        return self._spans.first_of(column.where(mask) for column in columns)

    def _sends(self) -> Mask:
        """Whether a client hands a message to its broker; those that do not say do."""
        operation = self._message_operation
        return ~operation.present | _in_small_letters(operation, SENDS)

    def _connects(self, in_store: Mask) -> Mask:
        """Which of the calls to a database only connect to it."""
        text = self._first_where(in_store, self._operation, self._statement)
        connects = text.meet(
            lambda values: pc.equal(pc.ascii_upper(pc.utf8_trim(values, " ")), "CONNECT")
        )
        silent = in_store & ~text.present
        if silent.any():
            connects |= self._name.where(silent).meet(_names_connection)
        return connects

    def _destinations(self) -> Iterator[Texts]:
        """Where a call may have gone, or a message come from; the first one counts."""
        yield self._spans.first("peer")
        yield from self._places()
        yield self._spans.first("namespace")
        yield self._system
        yield self._messaging
        yield self._spans.first("provider")

    def _places(self) -> Iterator[Texts]:
        """Hosts with their ports, in the order of :data:`.meaning.ADDRESSES`."""
        for key, port_key in ADDRESSES:
            host = self._spans.filled(ATTRIBUTE_COLUMNS[key])
            if host.is_empty:
                continue
            if port_key is None:
                yield host.replaced(_place(*_url_parts(host.values)))
            else:
                port = self._spans.filled(ATTRIBUTE_COLUMNS[port_key])
                yield _joined(host, port.or_else(self._url_port).or_else(self._usual_port))

    @cached_property
    def _usual_port(self) -> Texts:
        """The usual port of the database, cache or broker."""
        system = self._spans.first_of(iter((self._system, self._messaging)))
        ports = [PORTS.get(name.lower()) for name in system.values.to_pylist()]
        return system.replaced(pa.array(ports, pa.string()))

    @cached_property
    def _url_port(self) -> Texts:
        """The port of the first URL that has a host; it may have none."""
        ports = []
        is_new = np.ones(len(self._spans), np.bool_)
        for key, port_key in ADDRESSES:
            url = self._spans.filled(ATTRIBUTE_COLUMNS[key])
            if port_key is None and not url.is_empty:
                host, port = _url_parts(url.values)
                ports.append(url.replaced(port).where(is_new))
                is_new &= ~url.where_met(host.is_valid())
        return self._spans.first_of(iter(ports))

    def _layer(self, is_cache: Mask) -> Texts:
        layers = np.zeros(len(self._spans), np.int32)
        # In this order, because the last one counts.
        layers[self._spans.any("peer")] = 1
        layers[self._messaging.present] = 2
        layers[self._system.present] = 3
        layers[is_cache] = 4
        layers[self._spans.any("model call")] = 5
        return Texts.chosen(
            layers,
            *("UNDEFINED", "GENERAL", "VIRTUAL_MQ", "VIRTUAL_DATABASE", "VIRTUAL_CACHE"),
            "VIRTUAL_GENAI",
        )

    def _cache_operation(self, in_cache: Mask) -> Texts:
        if not in_cache.any():
            return Texts.none(len(in_cache))
        text = self._first_where(in_cache, self._operation, self._statement, self._name)
        words = Texts.of(pc.struct_field(pc.extract_regex(text.values, _FIRST_WORD), "word"))
        of_words = [_COMMANDS.get(word.upper(), _OTHER) for word in words.values.to_pylist()]
        of_texts = at(np.array(of_words, np.int32), words.codes, _OTHER)
        operations = at(of_texts, text.codes, _OTHER)
        return Texts.chosen(operations, "Read", "Write", "Others").where(in_cache)


def _in_small_letters(texts: Texts, words: Collection[str]) -> Mask:
    """Which texts are one of these words, in small letters or large ones."""
    # None of the words has a k, the one letter of ASCII that another one is written as.
    return texts.meet(lambda values: pc.is_in(pc.ascii_lower(values), pa.array(words)))


def _names_connection(names: pa.Array) -> pa.Array:
    connecting = re.compile(CONNECTING)
    return pa.array([bool(connecting.search(name.lower())) for name in names.to_pylist()])


def _url_parts(urls: pa.Array) -> tuple[pa.Array, pa.Array]:
    """The hosts of URLs, null if one has none, and the ports.

    A port that is left out is the usual one: older clients leave it out.
    """
    parts = pc.extract_regex(urls, _URL)
    host, port = pc.struct_field(parts, "host"), pc.struct_field(parts, "port")
    scheme = pc.ascii_lower(pc.utf8_slice_codeunits(urls, 0, len("https:")))
    usual = pc.case_when(
        pc.make_struct(pc.equal(scheme, "https:"), pc.starts_with(scheme, "http:")), "443", "80"
    )
    return host, pc.if_else(pc.equal(port, ""), usual, port)


def _place(host: pa.Array, port: pa.Array) -> pa.Array:
    """Hosts with their ports, if there are any."""
    # With two colons it is an address of IPv6.
    is_ipv6 = pc.and_not(pc.greater(pc.count_substring(host, ":"), 1), pc.starts_with(host, "["))
    bracketed = pc.if_else(is_ipv6, pc.binary_join_element_wise("[", host, "]", ""), host)
    return pc.coalesce(pc.binary_join_element_wise(bracketed, port, ":"), host)


def _joined(host: Texts, port: Texts) -> Texts:
    """Hosts with their ports, each pair once."""
    if port.is_empty:
        return host
    width = len(port.values) + 1
    pairs = masked(host.codes * np.int64(width) + port.codes + 1, host.present).dictionary_encode()
    of_host, of_port = np.divmod(pairs.dictionary.to_numpy(), width)
    ports = port.values.take(masked(of_port - 1, of_port > 0))
    places = _place(host.values.take(pa.array(of_host)), ports)
    return Texts.distinct(pairs.indices.fill_null(-1).to_numpy(), places)


def _cut(texts: Texts, limit: int) -> Texts:
    """Texts of at most ``limit`` characters."""
    longest = pc.max(pc.binary_length(texts.values)).as_py() or 0
    if longest <= limit:
        return texts
    return texts.replaced(pc.utf8_slice_codeunits(texts.values, 0, limit))


def _whole(texts: Texts, kind: str) -> pa.Array:
    """Texts as whole numbers; null for a text that is not one, or is too large."""
    return texts.numbers(read_whole(texts.values, kind))


def _micros(times: pa.ChunkedArray) -> Longs:
    return np.asarray(one_array(times).cast(pa.int64()).to_numpy())


def _id(ids: pa.ChunkedArray) -> pa.Array:
    """Ids; null for one without characters."""
    array = one_array(ids).cast(pa.string())
    if pc.min(pc.binary_length(array)).as_py() == 0:
        array = pc.if_else(pc.equal(array, ""), None, array)
    return array


def _spread(numbers: pa.Array, rows: Longs, count: int) -> pa.Array:
    """The numbers of ``count`` rows, of which these are at the places ``rows``."""
    if numbers.null_count == len(numbers):
        return pa.nulls(count, numbers.type)
    places = np.full(count, -1, np.int32)
    places[rows] = np.arange(len(rows), dtype=np.int32)
    return numbers.take(masked(places, places >= 0))
