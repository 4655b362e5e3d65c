"""Reduces OpenTelemetry spans to the plain columns that all later steps need.

:func:`compact` looks up each attribute once and drops the wide maps, except for spans whose event
types have them. All later steps (:mod:`.sources`, :mod:`.links`, :mod:`.topn`) use its columns
only.

Two rules hold throughout. An attribute that is blank or null counts as missing. Where several
attributes could give a name, the first one that is present does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pyspark.sql import DataFrame

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

# Short names for the attributes.
_ATTRIBUTES: Mapping[str, str] = {
    "_status_code": "http.response.status_code",
    "_old_status_code": "http.status_code",
    "_method": "http.request.method",
    "_old_method": "http.method",
    "_route": "http.route",
    "_url": "url.full",
    "_old_url": "http.url",
    "_grpc_code": "rpc.grpc.status_code",
    "_messaging": "messaging.system",
    "_provider": "gen_ai.provider.name",
    "_old_provider": "gen_ai.system",
    "_request_model": "gen_ai.request.model",
    "_model": "gen_ai.response.model",
    "_ai_operation": "gen_ai.operation.name",
    "_peer": "peer.service",
    "_address": "server.address",
    "_port": "server.port",
    "_destination": "messaging.destination.name",
    "_namespace": "db.namespace",
    "_old_namespace": "db.name",
    "_operation": "db.operation.name",
    "_old_operation": "db.operation",
    "_query": "db.query.text",
    "_old_query": "db.statement",
    "_input": "gen_ai.usage.input_tokens",
    "_output": "gen_ai.usage.output_tokens",
}

SERVES = "kind IN ('SERVER', 'CONSUMER')"
"""Condition of spans in which a service serves a request."""
CALLS = "kind IN ('CLIENT', 'PRODUCER')"
"""Condition of spans in which a service makes a request."""

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
    and ``peer_layer``, where a call went as far as the caller knows; ``store`` (the database or
    cache of a call) with ``system``, ``cache_operation`` (null for a database) and ``statement``;
    ``broker`` with ``broker_operation`` and ``broker_endpoint``; ``provider`` and ``model`` with
    the two token counts. Columns that do not apply to a span are null. With ``keys``, ``tags`` and
    ``tag`` have the attributes with these keys only: putting all attributes together is most of the
    work.

    Persist the result: a filter on it would otherwise look everything up once more. The session
    should have ``spark.sql.codegen.hugeMethodLimit=8000``, beyond which the JVM does not compile;
    with Spark's own limit this runs at an eighth of the speed.
    """
    facts = spans.selectExpr(
        *("NULLIF(trace_id, '') AS trace_id", "NULLIF(span_id, '') AS span_id"),
        *("NULLIF(parent_span_id, '') AS parent_span_id", "name", "time"),
        "COALESCE(kind, 'INTERNAL') AS kind",
        "UNIX_MICROS(end_time) - UNIX_MICROS(time) AS _micros",
        "NOT (status <=> 'ERROR') AS status",
        f"COALESCE({_filled('service')}, 'unknown_service') AS service",
        f"{_filled('service_instance_id')} AS _instance",
        f"{_filled('host_name')} AS _host",
        f"COALESCE({_filled('db_system_name')}, {_filled('db_system')}) AS system",
        f"CAST({_only_if(SERVES, _attributes(keys))} AS {_TEXT_MAP}) AS tag",
        *_present(_ATTRIBUTES),
    )
    return facts.selectExpr(*_COLUMNS)


def is_blank(text: str) -> str:
    """SQL: whether a text has nothing but white space; null for null."""
    # Trimming one end is enough, and it stops at the first character that stays.
    return f"(LTRIM({literal(WHITESPACE)}, {text}) = '')"


def _filled(text: str) -> str:
    return f"IF({is_blank(text)}, NULL, {text})"


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


def _present(keys: Mapping[str, str]) -> list[str]:
    return [f"{_filled(ATTRIBUTE_COLUMNS[key])} AS {alias}" for alias, key in keys.items()]


def _one_of(words: str) -> str:
    return ", ".join(f"'{word}'" for word in words.split())


_IS_HTTP = (
    "COALESCE(_method, _old_method, _route, _url, _old_url, _status_code, _old_status_code) "
    "IS NOT NULL"
)
_IS_AI = "COALESCE(_provider, _old_provider, _request_model, _model, _ai_operation) IS NOT NULL"
_IS_CACHE = "system IN ('redis', 'memcached')"

_SERVER = "IF(_port IS NULL, _address, CONCAT(_address, ':', _port))"
_COMMAND = (
    "UPPER(REGEXP_EXTRACT(COALESCE(_operation, _old_operation, _query, _old_query, name), "
    r"'(\\S+)', 1))"
)


def _only_if(condition: str, value: str) -> str:
    return f"IF({condition}, {value}, NULL)"


_IN_STORE = "kind = 'CLIENT' AND system IS NOT NULL"
_IN_BROKER = "kind IN ('PRODUCER', 'CONSUMER', 'CLIENT') AND _messaging IS NOT NULL"
_IN_AI = f"kind = 'CLIENT' AND {_IS_AI}"
_STATUS_CODE = "COALESCE(_status_code, _old_status_code)"

_COLUMNS = (
    *("trace_id", "span_id", "parent_span_id", "name", "kind", "time"),
    # More than 24 days do not fit an int.
    "CASE WHEN _micros < 0 THEN 0 WHEN _micros >= 2147483647000 THEN 2147483647 "
    "ELSE CAST(_micros DIV 1000 AS INT) END AS latency",
    "LEAST(GREATEST(_micros, 0L), 2147483647999L) AS latencyMicros",
    "status",
    "service",
    "COALESCE(_instance, _host, service) AS instance",
    f"CASE WHEN {_IS_AI} THEN 'GenAI' WHEN system IS NOT NULL THEN 'DATABASE' "
    f"WHEN _messaging IS NOT NULL THEN 'MQ' WHEN {_IS_HTTP} THEN 'HTTP' ELSE 'RPC' END AS type",
    f"{read_whole(_STATUS_CODE, 'INT')} AS httpResponseStatusCode",
    "_grpc_code AS rpcStatusCode",
    "TRANSFORM(SORT_ARRAY(MAP_ENTRIES(tag)), x -> CONCAT(x.key, ':', COALESCE(x.value, ''))) "
    "AS tags",
    "tag",
    f"{_only_if(CALLS, 'COALESCE(_peer, _address)')} AS peer",
    f"CASE WHEN NOT ({CALLS}) OR COALESCE(_peer, _address) IS NULL THEN NULL "
    f"WHEN {_IS_AI} THEN 'VIRTUAL_GENAI' "
    f"WHEN {_IS_CACHE} THEN 'VIRTUAL_CACHE' WHEN system IS NOT NULL THEN 'VIRTUAL_DATABASE' "
    "WHEN _messaging IS NOT NULL THEN 'VIRTUAL_MQ' WHEN _peer IS NOT NULL THEN 'GENERAL' "
    "ELSE 'UNDEFINED' END AS peer_layer",
    _only_if(_IN_STORE, f"COALESCE(_peer, {_SERVER}, _namespace, _old_namespace, system)")
    + " AS store",
    f"{_only_if(_IN_STORE, 'system')} AS system",
    f"CASE WHEN NOT ({_IN_STORE} AND {_IS_CACHE}) THEN NULL "
    f"WHEN {_COMMAND} IN ({_one_of(_READS)}) THEN 'Read' "
    f"WHEN {_COMMAND} IN ({_one_of(_WRITES)}) THEN 'Write' ELSE 'Others' END AS cache_operation",
    _only_if(_IN_STORE, f"SUBSTRING(COALESCE(_query, _old_query, name), 1, {STATEMENT_LIMIT})")
    + " AS statement",
    f"{_only_if(_IN_BROKER, f'COALESCE(_peer, {_SERVER}, _messaging)')} AS broker",
    _only_if(_IN_BROKER, "IF(kind = 'CONSUMER', 'Consume', 'Produce')") + " AS broker_operation",
    f"{_only_if(_IN_BROKER, 'COALESCE(_destination, name)')} AS broker_endpoint",
    _only_if(_IN_AI, "COALESCE(_provider, _old_provider, 'unknown')") + " AS provider",
    _only_if(_IN_AI, "COALESCE(_model, _request_model, 'unknown')") + " AS model",
    _only_if(_IN_AI, f"COALESCE({read_whole('_input', 'BIGINT')}, 0L)") + " AS input_tokens",
    _only_if(_IN_AI, f"COALESCE({read_whole('_output', 'BIGINT')}, 0L)") + " AS output_tokens",
)
