"""Reduces OpenTelemetry spans to the plain columns that all later steps need.

:func:`compact` looks up each attribute once and drops the wide maps, except for spans whose event
types have them. All later steps (:mod:`.sources`, :mod:`.links`, :mod:`.topn`) use its columns
only.

Two rules hold throughout. An attribute that is blank or null counts as missing. Where several
attributes could give a name, the first one that is present does.
"""

from __future__ import annotations

from collections.abc import Iterable

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


def compact(spans: DataFrame, *, tags: bool = True) -> DataFrame:
    """One row for each span of ``SPAN_SCHEMA``, with all columns that are derived from it.

    Beyond the span's own columns: ``latency`` in whole ms, ``status`` as a boolean, ``instance``,
    ``type``, the codes; ``tags`` and ``tag`` of spans that serve; ``peer`` and ``peer_layer``,
    where a call went as far as the caller knows; ``store`` (the ``peer`` of a call to a database or
    cache) with ``system``, ``cache_operation`` (null for a database) and ``statement``; ``broker``
    (of a message that was sent or processed) with ``broker_endpoint``; ``provider`` and ``model``
    with the two token counts. Columns that do not apply to a span are null. Without ``tags``, so
    are ``tags`` and ``tag``: putting all attributes together is most of the work.

    ``kind`` is INTERNAL also for spans that are only steps of a call or of a message: connecting to
    a database, and receiving a message.

    Persist the result: a filter on it would otherwise look everything up once more. The session
    should have ``spark.sql.codegen.hugeMethodLimit=8000``, beyond which the JVM does not compile;
    with Spark's own limit this runs at an eighth of the speed.
    """
    facts = spans.selectExpr(
        *("NULLIF(trace_id, '') AS trace_id", "NULLIF(span_id, '') AS span_id"),
        *("NULLIF(parent_span_id, '') AS parent_span_id", "name", "time"),
        "COALESCE(kind, 'INTERNAL') AS _kind",
        "UNIX_MICROS(end_time) - UNIX_MICROS(time) AS _micros",
        "NOT (status <=> 'ERROR') AS status",
        f"COALESCE({_filled('service')}, 'unknown_service') AS service",
        f"{_filled('service_instance_id')} AS _instance",
        f"{_filled('host_name')} AS _host_name",
        f"CAST({_only_if(_MAY_SERVE, _ALL_ATTRIBUTES) if tags else 'NULL'} AS {_TEXT_MAP}) AS _tag",
        *(f"{_first(keys)} AS {_alias(meaning)}" for meaning, keys in MEANINGS.items()),
        f"{_HOST} AS _host",
        f"{_PORT} AS _port",
    )
    return facts.selectExpr("*", *_ROLES).selectExpr(*_COLUMNS)


def is_blank(text: str) -> str:
    """SQL: whether a text has nothing but white space; null for null."""
    # Trimming one end is enough, and it stops at the first character that stays.
    return f"(LTRIM({literal(WHITESPACE)}, {text}) = '')"


def _filled(text: str) -> str:
    return f"IF({is_blank(text)}, NULL, {text})"


def _first(keys: Iterable[str]) -> str:
    """SQL of the first of these attributes that is present."""
    return f"COALESCE({', '.join(_filled(ATTRIBUTE_COLUMNS[key]) for key in keys)})"


def _alias(meaning: str) -> str:
    return f"_{meaning.lower().replace(' ', '_')}"


def _one_of(words: Iterable[str]) -> str:
    return ", ".join(literal(word) for word in words)


def _only_if(condition: str, value: str) -> str:
    return f"IF({condition}, {value}, NULL)"


_MAY_SERVE = "kind IN ('SERVER', 'CONSUMER')"
_HAS_DESTINATION = "kind IN ('CLIENT', 'PRODUCER', 'CONSUMER')"
_URL = r"^[A-Za-z][A-Za-z0-9+.-]*://(?:[^/?#]*@)?(\\[[^\\]/?#]*\\]|[^:/?#]*)(?::([0-9]*))?"
"""Regular expression of a URL without its path: host and port are groups."""


def _url_part(url: str, group: int) -> str:
    return f"NULLIF(REGEXP_EXTRACT({url}, '{_URL}', {group}), '')"


def _url_port(url: str) -> str:
    """SQL of a URL's port; without one, that of its scheme."""
    default = f"CASE WHEN {url} ILIKE 'https:%' THEN '443' WHEN {url} ILIKE 'http:%' THEN '80' END"
    return f"COALESCE({_url_part(url, 2)}, {default})"


def _hosts() -> tuple[str, str]:
    """SQL of the host that was called, and of its port, by :data:`.meaning.ADDRESSES`.

    A host without a port of its own has that of the URL: older clients leave out the usual ones.
    """
    urls = [ATTRIBUTE_COLUMNS[key] for key, port in ADDRESSES if port is None]
    url = f"COALESCE({', '.join(map(_filled, urls))})"
    hosts, ports = [], []
    for key, port_key in ADDRESSES:
        host = _filled(ATTRIBUTE_COLUMNS[key])
        if port_key is None:
            hosts.append(_url_part(host, 1))
            ports.append(f"WHEN {_url_part(host, 1)} IS NOT NULL THEN {_url_port(host)}")
        else:
            port = _filled(ATTRIBUTE_COLUMNS[port_key])
            hosts.append(host)
            ports.append(f"WHEN {host} IS NOT NULL THEN COALESCE({port}, {_url_port(url)})")
    return (
        _only_if(_HAS_DESTINATION, f"COALESCE({', '.join(hosts)})"),
        f"CASE WHEN NOT ({_HAS_DESTINATION}) THEN NULL {' '.join(ports)} END",
    )


_HOST, _PORT = _hosts()

_IS_CACHE = f"_system IN ({_one_of(CACHES)})"
_COMMAND = r"UPPER(REGEXP_EXTRACT(COALESCE(_operation, _statement, name), '(\\S+)', 1))"
_CONNECTS = (
    "_system IS NOT NULL AND IF(COALESCE(_operation, _statement) IS NULL, "
    f"LOWER(name) RLIKE {literal(CONNECTING)}, "
    "UPPER(TRIM(COALESCE(_operation, _statement))) = 'CONNECT')"
)
# With two colons it is an address of IPv6.
_AT_PORT = (
    "CASE WHEN _port IS NULL THEN _host WHEN _host LIKE '%:%:%' AND _host NOT LIKE '[%' "
    "THEN CONCAT('[', _host, ']:', _port) ELSE CONCAT(_host, ':', _port) END"
)

_ROLES = (
    f"CASE WHEN _kind IN ('CLIENT', 'PRODUCER', 'CONSUMER') AND "
    f"LOWER(_message_operation) IN ({_one_of(STEPS)}) THEN 'INTERNAL' "
    f"WHEN _kind = 'CLIENT' AND {_CONNECTS} THEN 'INTERNAL' ELSE _kind END AS kind",
    "IF(_kind IN ('CLIENT', 'PRODUCER', 'CONSUMER'), "
    f"COALESCE(_peer, {_AT_PORT}, _namespace, _system, _messaging, _provider), NULL) "
    "AS _destination",
)

_IN_STORE = "kind = 'CLIENT' AND _system IS NOT NULL"
_IN_BROKER = (
    "_messaging IS NOT NULL AND (kind IN ('PRODUCER', 'CONSUMER') OR kind = 'CLIENT' "
    f"AND COALESCE(LOWER(_message_operation) IN ({_one_of(SENDS)}), true))"
)
_IN_AI = "kind = 'CLIENT' AND _model_call IS NOT NULL"

_COLUMNS = (
    *("trace_id", "span_id", "parent_span_id", "name", "kind", "time"),
    # More than 24 days do not fit an int.
    "CASE WHEN _micros < 0 THEN 0 WHEN _micros >= 2147483647000 THEN 2147483647 "
    "ELSE CAST(_micros DIV 1000 AS INT) END AS latency",
    "status",
    "service",
    "COALESCE(_instance, _host_name, service) AS instance",
    "CASE WHEN _model_call IS NOT NULL THEN 'GenAI' WHEN _system IS NOT NULL THEN 'DATABASE' "
    "WHEN _messaging IS NOT NULL THEN 'MQ' WHEN _rpc IS NOT NULL THEN 'RPC' "
    "WHEN _http IS NOT NULL THEN 'HTTP' ELSE 'RPC' END AS type",
    f"{read_whole('_http_status', 'INT')} AS httpResponseStatusCode",
    "_rpc_status AS rpcStatusCode",
    _only_if(
        SERVES,
        "TRANSFORM(SORT_ARRAY(MAP_ENTRIES(_tag)), x -> CONCAT(x.key, ':', COALESCE(x.value, '')))",
    )
    + " AS tags",
    f"{_only_if(SERVES, '_tag')} AS tag",
    f"{_only_if(CALLS, '_destination')} AS peer",
    f"CASE WHEN NOT ({CALLS}) OR _destination IS NULL THEN NULL "
    "WHEN _model_call IS NOT NULL THEN 'VIRTUAL_GENAI' "
    f"WHEN {_IS_CACHE} THEN 'VIRTUAL_CACHE' WHEN _system IS NOT NULL THEN 'VIRTUAL_DATABASE' "
    "WHEN _messaging IS NOT NULL THEN 'VIRTUAL_MQ' WHEN _peer IS NOT NULL THEN 'GENERAL' "
    "ELSE 'UNDEFINED' END AS peer_layer",
    f"{_only_if(_IN_STORE, '_destination')} AS store",
    f"{_only_if(_IN_STORE, '_system')} AS system",
    f"CASE WHEN NOT ({_IN_STORE} AND {_IS_CACHE}) THEN NULL "
    f"WHEN {_COMMAND} IN ({_one_of(_READS.split())}) THEN 'Read' "
    f"WHEN {_COMMAND} IN ({_one_of(_WRITES.split())}) THEN 'Write' ELSE 'Others' END "
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
