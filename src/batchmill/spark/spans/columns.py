"""Reduces OpenTelemetry spans to the plain columns that all later steps need.

:func:`compact` looks up each attribute once and drops the wide maps, except for spans whose event
types have them. All later steps (:mod:`.sources`, :mod:`.links`, :mod:`.topn`) use its columns
only.

Two rules hold throughout. An attribute that is blank or null counts as missing. Where several
attributes could give a name, the first one that is present does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from pyspark.sql import DataFrame

from batchmill.spark.spans.meaning import (
    ADDRESSES,
    CACHES,
    CONNECTING,
    MEANINGS,
    SENDS,
    STEPS,
)
from batchmill.spark.sql import literal, read_whole
from batchmill.spool import ATTRIBUTE_COLUMNS

STATEMENT_LIMIT = 2000
"""How many characters of a statement are kept."""

WHITESPACE = (
    "\t\n\x0b\x0c\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005"
    "\u2006\u2007\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000"
)
"""The characters that ``str.strip()`` removes: a text of nothing else is blank."""

# Commands of redis and memcached.
_READS = """
    GET MGET HGET HGETALL HMGET LRANGE SMEMBERS EXISTS ZRANGE SCAN STRLEN TTL TYPE KEYS GETS
"""
_WRITES = """
    SET MSET SETEX SETNX HSET HMSET DEL INCR DECR INCRBY DECRBY EXPIRE LPUSH RPUSH LPOP RPOP
    SADD SREM ZADD ZREM APPEND PUT ADD REPLACE DELETE HDEL UNLINK GETSET
"""

SERVES = "kind IN ('SERVER', 'CONSUMER')"
"""Condition of spans in which a service serves a request or processes a message."""
CALLS = "kind IN ('CLIENT', 'PRODUCER')"
"""Condition of spans in which a service makes a request or sends a message."""

_TEXT_MAP = "MAP<STRING, STRING>"
_WELL_KNOWN = ", ".join(literal(key) for key in ATTRIBUTE_COLUMNS)
_ENTRIES = ", ".join(f"{literal(key)}, {name}" for key, name in ATTRIBUTE_COLUMNS.items())
_ALL_ATTRIBUTES = (
    f"MAP_CONCAT(COALESCE(MAP_FILTER(attributes, (key, value) -> key NOT IN ({_WELL_KNOWN})), "
    f"CAST(MAP() AS {_TEXT_MAP})), MAP_FILTER(MAP({_ENTRIES}), (key, value) -> value IS NOT NULL))"
)
"""SQL of a span's attributes, those with a column of their own among them. A segment of an older
version has these in the map as well."""


def compact(spans: DataFrame, *, keys: Collection[str] | None = None) -> DataFrame:
    """One row for each span of ``SPAN_SCHEMA``, with all columns that are derived from it.

    Beyond the span's own columns: ``latency`` in whole ms, ``latencyMicros``, ``status`` as a
    boolean, ``instance``, ``type``, the codes; ``tags`` and ``tag`` of spans that serve; ``peer``
    and ``peer_layer``, where a call went as far as the caller knows; ``store`` (the ``peer`` of a
    call to a database or cache) with ``system``, ``cache_operation`` (null for a database) and
    ``statement``; ``broker`` (of a message that was sent or processed) with ``broker_endpoint``;
    ``provider`` and ``model`` with the two token counts. Columns that do not apply to a span are
    null. With ``keys``, ``tags`` and ``tag`` have the attributes with these keys only: putting all
    attributes together is most of the work.

    ``kind`` is INTERNAL also for spans that are only steps of a call or of a message: connecting to
    a database, and receiving a message.

    Persist the result: a filter on it would otherwise look everything up once more. The session
    should have ``spark.sql.codegen.hugeMethodLimit=8000``, beyond which the JVM does not compile;
    with Spark's own limit this runs at an eighth of the speed. It should also have
    ``spark.sql.constraintPropagation.enabled=false``: with it, planning a query on the result that
    is not persisted takes minutes.
    """
    facts = spans.selectExpr(
        *("NULLIF(trace_id, '') AS trace_id", "NULLIF(span_id, '') AS span_id"),
        *("NULLIF(parent_span_id, '') AS parent_span_id", "name", "time"),
        "COALESCE(kind, 'INTERNAL') AS _kind",
        "UNIX_MICROS(end_time) - UNIX_MICROS(time) AS _micros",
        "NOT (status <=> 'ERROR') AS status",
        f"COALESCE({_filled('service')}, 'unknown_service') AS service",
        f"{_filled('service_instance_id')} AS _instance",
        f"{_filled('host_name')} AS _host",
        f"CAST({_only_if(SERVES, _attributes(keys))} AS {_TEXT_MAP}) AS _tag",
        *(f"{_first(names)} AS {_alias(meaning)}" for meaning, names in MEANINGS.items()),
        *(f"{_filled(name)} AS {_alias(name)}" for name in _PLACE_COLUMNS),
    )
    return facts.selectExpr(*_ROLES).selectExpr(*_COLUMNS)


def is_blank(text: str) -> str:
    """SQL: whether a text has nothing but white space; null for null."""
    # Trimming one end is enough, and it stops at the first character that stays.
    return f"(LTRIM({literal(WHITESPACE)}, {text}) = '')"


def _filled(text: str) -> str:
    # Most are null; nearly all others begin with a visible character of ASCII.
    visible = f"{text} >= '!' AND {text} < {literal(chr(127))}"
    return (
        f"CASE WHEN {text} IS NULL THEN NULL WHEN {visible} THEN {text} "
        f"WHEN {is_blank(text)} THEN NULL ELSE {text} END"
    )


def _attributes(keys: Collection[str] | None) -> str:
    """SQL of a span's attributes with these keys, or of all; null if it has none of the keys."""
    if keys is None:
        return _ALL_ATTRIBUTES
    if not keys:
        return "NULL"
    values = {
        key: ATTRIBUTE_COLUMNS.get(key, f"TRY_ELEMENT_AT(attributes, {literal(key)})")
        for key in sorted(keys)
    }
    entries = ", ".join(f"{literal(key)}, {value}" for key, value in values.items())
    return _only_if(f"COALESCE({', '.join(values.values())}) IS NOT NULL", f"MAP({entries})")


def _first(keys: Iterable[str]) -> str:
    """SQL of the first of these attributes that is present."""
    return f"COALESCE({', '.join(_filled(ATTRIBUTE_COLUMNS[key]) for key in keys)})"


def _alias(meaning: str) -> str:
    return f"_{meaning.lower().replace(' ', '_')}"


def _one_of(words: Iterable[str]) -> str:
    return ", ".join(literal(word) for word in words)


def _only_if(condition: str, value: str) -> str:
    return f"IF({condition}, {value}, NULL)"


_MAY_CALL = "_kind IN ('CLIENT', 'PRODUCER', 'CONSUMER')"
"""Condition of spans that may have called a place, or processed a message of a broker there."""
_PLACE_COLUMNS = tuple(
    dict.fromkeys(ATTRIBUTE_COLUMNS[key] for entry in ADDRESSES for key in entry if key)
)

_URL = r"^[A-Za-z][A-Za-z0-9+.-]*://(?:[^/?#]*@)?(\\[[^\\]/?#]+\\]|[^:/?#]+)(?::([0-9]+))?"
"""Regular expression of the beginning of a URL that has a host: this and its port are groups."""


def _url_port(url: str) -> str:
    """SQL of a URL's port, or the usual one: older clients leave it out."""
    usual = f"CASE WHEN {url} ILIKE 'https:%' THEN '443' WHEN {url} ILIKE 'http:%' THEN '80' END"
    return f"COALESCE(NULLIF(REGEXP_EXTRACT({url}, '{_URL}', 2), ''), {usual})"


def _place(host: str, port: str) -> str:
    """SQL of a host with its port, if there is one."""
    # With two colons it is an address of IPv6.
    is_ipv6 = f"CONTAINS({host}, ':') AND {host} LIKE '%:%:%' AND NOT STARTSWITH({host}, '[')"
    bracketed = f"IF({is_ipv6}, CONCAT('[', {host}, ']'), {host})"
    return f"COALESCE(CONCAT({bracketed}, ':', {port}), {host})"


def _places() -> list[str]:
    """SQL of the places that may have been called, in the order of :data:`.meaning.ADDRESSES`."""
    urls = [_alias(ATTRIBUTE_COLUMNS[key]) for key, port in ADDRESSES if port is None]
    ports = [f"WHEN {url} RLIKE '{_URL}' THEN {_url_port(url)}" for url in urls]
    places = []
    past_urls = False
    for key, port_key in ADDRESSES:
        host = _alias(ATTRIBUTE_COLUMNS[key])
        if port_key is None:
            past_urls = True
            place = _place(f"REGEXP_EXTRACT({host}, '{_URL}', 1)", _url_port(host))
            places.append(_only_if(f"{host} RLIKE '{_URL}'", place))
        else:
            port = _alias(ATTRIBUTE_COLUMNS[port_key])
            if not past_urls:
                port = f"COALESCE({port}, CASE {' '.join(ports)} END)"
            places.append(_only_if(f"{host} IS NOT NULL", _place(host, port)))
    return places


_CONNECTS = (
    "_system IS NOT NULL AND IF(COALESCE(_operation, _statement) IS NULL, "
    f"LOWER(name) RLIKE {literal(CONNECTING)}, "
    "UPPER(TRIM(COALESCE(_operation, _statement))) = 'CONNECT')"
)
_IS_CACHE = f"LOWER(_system) IN ({_one_of(CACHES)})"
_COMMAND = r"UPPER(REGEXP_EXTRACT(COALESCE(_operation, _statement, name), '(\\S+)', 1))"
_ROLES = (
    *("trace_id", "span_id", "parent_span_id", "name", "time", "status", "service"),
    f"CASE WHEN {_MAY_CALL} AND LOWER(_message_operation) IN ({_one_of(STEPS)}) "
    f"OR _kind = 'CLIENT' AND {_CONNECTS} THEN 'INTERNAL' ELSE _kind END AS kind",
    # More than 24 days do not fit an int.
    "CASE WHEN _micros < 0 THEN 0 WHEN _micros >= 2147483647000 THEN 2147483647 "
    "ELSE CAST(_micros DIV 1000 AS INT) END AS latency",
    "LEAST(GREATEST(_micros, 0L), 2147483647999L) AS latencyMicros",
    "COALESCE(_instance, _host, service) AS instance",
    "CASE WHEN _model_call IS NOT NULL THEN 'GenAI' WHEN _system IS NOT NULL THEN 'DATABASE' "
    "WHEN _messaging IS NOT NULL THEN 'MQ' WHEN _rpc IS NOT NULL THEN 'RPC' "
    "WHEN _http IS NOT NULL THEN 'HTTP' ELSE 'RPC' END AS type",
    f"IF(_http_status = '200', 200, {read_whole('_http_status', 'INT')}) AS httpResponseStatusCode",
    "_rpc_status AS rpcStatusCode",
    f"IF({_MAY_CALL}, COALESCE(_peer, {', '.join(_places())}, "
    "_namespace, _system, _messaging, _provider), NULL) AS _destination",
    f"{_only_if(_IS_CACHE, _COMMAND)} AS _command",
    *("_tag", "_peer", "_system", "_statement", "_messaging", "_message_operation"),
    *("_topic", "_provider", "_model", "_input_tokens", "_output_tokens"),
)

_IN_STORE = "kind = 'CLIENT' AND _system IS NOT NULL"
_IN_BROKER = (
    "_messaging IS NOT NULL AND (kind IN ('PRODUCER', 'CONSUMER') OR kind = 'CLIENT' "
    f"AND COALESCE(LOWER(_message_operation) IN ({_one_of(SENDS)}), true))"
)
_IN_AI = "kind = 'CLIENT' AND type = 'GenAI'"

_COLUMNS = (
    *("trace_id", "span_id", "parent_span_id", "name", "kind", "time", "latency"),
    *(
        "latencyMicros",
        "status",
        "service",
        "instance",
        "type",
        "httpResponseStatusCode",
        "rpcStatusCode",
    ),
    _only_if(
        SERVES,
        "TRANSFORM(SORT_ARRAY(MAP_ENTRIES(_tag)), x -> CONCAT(x.key, ':', COALESCE(x.value, '')))",
    )
    + " AS tags",
    f"{_only_if(SERVES, '_tag')} AS tag",
    f"{_only_if(CALLS, '_destination')} AS peer",
    f"CASE WHEN NOT ({CALLS}) OR _destination IS NULL THEN NULL "
    "WHEN type = 'GenAI' THEN 'VIRTUAL_GENAI' "
    f"WHEN {_IS_CACHE} THEN 'VIRTUAL_CACHE' WHEN _system IS NOT NULL THEN 'VIRTUAL_DATABASE' "
    "WHEN _messaging IS NOT NULL THEN 'VIRTUAL_MQ' WHEN _peer IS NOT NULL THEN 'GENERAL' "
    "ELSE 'UNDEFINED' END AS peer_layer",
    f"{_only_if(_IN_STORE, '_destination')} AS store",
    f"{_only_if(_IN_STORE, '_system')} AS system",
    f"CASE WHEN NOT ({_IN_STORE} AND {_IS_CACHE}) THEN NULL "
    f"WHEN _command IN ({_one_of(_READS.split())}) THEN 'Read' "
    f"WHEN _command IN ({_one_of(_WRITES.split())}) THEN 'Write' ELSE 'Others' END "
    "AS cache_operation",
    _only_if(_IN_STORE, f"SUBSTRING(COALESCE(_statement, name), 1, {STATEMENT_LIMIT})")
    + " AS statement",
    f"{_only_if(_IN_BROKER, '_destination')} AS broker",
    f"{_only_if(_IN_BROKER, 'COALESCE(_topic, name)')} AS broker_endpoint",
    _only_if(_IN_AI, "COALESCE(_provider, 'unknown')") + " AS provider",
    _only_if(_IN_AI, "COALESCE(_model, 'unknown')") + " AS model",
    _only_if(_IN_AI, f"COALESCE({read_whole('_input_tokens', 'BIGINT')}, 0L)") + " AS input_tokens",
    _only_if(_IN_AI, f"COALESCE({read_whole('_output_tokens', 'BIGINT')}, 0L)")
    + " AS output_tokens",
)
