"""Turns spans into rows of event types.

A single span gives rows of the service that served, and of the database, cache or model that was
called. Calls between services take two spans, and so does a message's way through its broker:
:mod:`.links` finds them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchmill.spans.columns import serves
from batchmill.spans.texts import Mask, Texts

SERVED = ("Service", "ServiceInstance", "Endpoint")
"""The event types that a span gives that serves a request."""
TAGS = frozenset(("tags", "tag"))
"""Their columns that hold attributes of the span."""

_TIMED = ("latency", "latencyMicros", "status")
_SERVED = (*_TIMED, "httpResponseStatusCode", "rpcStatusCode", "type", "tags", "tag")
_RELATED = (
    *("latencyMicros", "status", "httpResponseStatusCode", "rpcStatusCode", "type"),
    "detectPoint",
)
_TOKENS = {
    "input_tokens": "inputTokens",
    "output_tokens": "outputTokens",
    "cost": "totalEstimatedCost",
}
_BROKERED = ("operation", "transmissionLatency", "status")

_Columns = Mapping[str, str]
"""The columns of rows: their names so far to those of the event type."""


def _same(*names: str) -> dict[str, str]:
    return dict(zip(names, names, strict=True))


_SERVED_ROWS: Mapping[str, _Columns] = {
    "Service": {
        "service": "name",
        "layer": "layer",
        "instance": "serviceInstanceName",
        "name": "endpointName",
        **_same(*_SERVED),
    },
    "ServiceInstance": {
        "instance": "name",
        "service": "serviceName",
        "layer": "serviceLayer",
        "name": "endpointName",
        **_same(*_SERVED),
    },
    "Endpoint": {
        "name": "name",
        "service": "serviceName",
        "instance": "serviceInstanceName",
        "layer": "serviceLayer",
        **_same(*_SERVED),
    },
}
_DATABASE_ROWS: Mapping[str, _Columns] = {"DatabaseAccess": {"store": "name", **_same(*_TIMED)}}
_CACHE_ROWS: Mapping[str, _Columns] = {
    "CacheAccess": {"store": "name", **_same(*_TIMED), "cache_operation": "operation"}
}
_MODEL_ROWS: Mapping[str, _Columns] = {
    "GenAIProviderAccess": {"provider": "name", **_TOKENS, **_same(*_TIMED)},
    "GenAIModelAccess": {
        "provider": "serviceName",
        "model": "modelName",
        **_TOKENS,
        **_same(*_TIMED),
    },
}
_RELATION_ROWS: Mapping[str, _Columns] = {
    "ServiceRelation": {
        "sourceService": "sourceServiceName",
        "sourceInstance": "sourceServiceInstanceName",
        "sourceLayer": "sourceLayer",
        "destService": "destServiceName",
        "destInstance": "destServiceInstanceName",
        "destLayer": "destLayer",
        **_same("endpoint", "latency", *_RELATED),
    },
    "ServiceInstanceRelation": {
        "sourceService": "sourceServiceName",
        "sourceInstance": "sourceServiceInstanceName",
        "sourceLayer": "sourceServiceLayer",
        "destService": "destServiceName",
        "destInstance": "destServiceInstanceName",
        "destLayer": "destServiceLayer",
        **_same("endpoint", "latency", *_RELATED),
    },
}
_ENDPOINT_RELATION_ROWS: Mapping[str, _Columns] = {
    "EndpointRelation": {
        "sourceService": "serviceName",
        "sourceInstance": "serviceInstanceName",
        "sourceLayer": "serviceLayer",
        "sourceEndpoint": "endpoint",
        "destService": "childServiceName",
        "destInstance": "childServiceInstanceName",
        "destLayer": "childServiceLayer",
        "endpoint": "childEndpoint",
        "latency": "rpcLatency",
        **_same(*_RELATED),
    }
}
_BROKER_ROWS: Mapping[str, _Columns] = {
    "MQAccess": {"broker": "name", **_same(*_BROKERED)},
    "MQEndpointAccess": {
        "broker": "serviceName",
        "broker_endpoint": "endpoint",
        **_same(*_BROKERED),
    },
}


def direct_rows(compact: pa.Table, wanted: Collection[str]) -> dict[str, pa.Table]:
    """The rows that single spans give, of the event types that are wanted and have rows.

    They have ``time`` and those of the catalog's columns that spans have; the others are missing.
    """
    rows: dict[str, pa.Table] = {}
    if _wants(wanted, _SERVED_ROWS):
        served = _chosen(compact, serves(compact), _SERVED_ROWS)
        rows |= _named(_with_texts(served, "layer", "GENERAL"), _SERVED_ROWS, wanted)
    if _wants(wanted, _DATABASE_ROWS) or _wants(wanted, _CACHE_ROWS):
        is_cache = _present(compact["cache_operation"])
        is_database = _present(compact["store"]) & ~is_cache
        for mask, columns in ((is_database, _DATABASE_ROWS), (is_cache, _CACHE_ROWS)):
            if _wants(wanted, columns):
                rows |= _named(_chosen(compact, mask, columns), columns, wanted)
    if _wants(wanted, _MODEL_ROWS):
        calls = _chosen(compact, _present(compact["provider"]), _MODEL_ROWS)
        if calls.num_rows:
            latency = calls.schema.get_field_index("latency")
            calls = calls.set_column(latency, "latency", calls["latency"].cast(pa.int64()))
            calls = calls.append_column("cost", pa.array(np.zeros(calls.num_rows, np.int64)))
        rows |= _named(calls, _MODEL_ROWS, wanted)
    return rows


def relation_rows(relations: pa.Table, wanted: Collection[str]) -> dict[str, pa.Table]:
    """The rows of calls between services, as :func:`.links.link` finds them, by event type.

    They have ``time`` (the start of the span that was measured: the serving one where the detect
    point is SERVER, else the calling one) and those of the catalog's columns that spans have.
    """
    rows = _named(relations, _RELATION_ROWS, wanted)
    if _wants(wanted, _ENDPOINT_RELATION_ROWS) and relations.num_rows:
        of_endpoints = _chosen(relations, _mask(relations["ofEndpoints"]), _ENDPOINT_RELATION_ROWS)
        rows |= _named(of_endpoints, _ENDPOINT_RELATION_ROWS, wanted)
    return rows


def broker_rows(accessed: pa.Table, wanted: Collection[str]) -> dict[str, pa.Table]:
    """The rows of messages that were sent or consumed, as :func:`.links.link` pairs them.

    ``transmissionLatency`` of a message that was consumed is the time from the start of the span
    that sent it to the start of the span that consumed it; null if the former is not known.
    """
    if not accessed.num_rows or not _wants(wanted, _BROKER_ROWS):
        return {}
    consumed = Texts.of(accessed["kind"]).one_of("CONSUMER")
    on_the_way = accessed["on_the_way"].cast(pa.int64())
    accessed = accessed.append_column(
        "operation", Texts.chosen(consumed, "Produce", "Consume").array()
    ).append_column("transmissionLatency", pc.if_else(pa.array(consumed), on_the_way, 0))
    return _named(accessed, _BROKER_ROWS, wanted)


def _wants(wanted: Collection[str], rows: Mapping[str, _Columns]) -> bool:
    return any(source in wanted for source in rows)


def _chosen(table: pa.Table, mask: Mask, rows: Mapping[str, _Columns]) -> pa.Table:
    """The rows where the mask is true, with those of the columns that the event types need."""
    needed = {"time"}.union(*rows.values())
    table = table.select([name for name in table.column_names if name in needed])
    if mask.all():
        return table
    places = pa.array(np.flatnonzero(mask))
    return pa.table(
        {
            name: pa.nulls(len(places), column.type)
            if column.null_count == len(column)
            else column.take(places)
            for name, column in zip(table.column_names, table.columns, strict=True)
        }
    )


def _named(
    table: pa.Table, rows: Mapping[str, _Columns], wanted: Collection[str]
) -> dict[str, pa.Table]:
    """The rows by event type, with its names of the columns."""
    if not table.num_rows:
        return {}
    return {
        source: table.select(["time", *columns]).rename_columns(["time", *columns.values()])
        for source, columns in rows.items()
        if source in wanted
    }


def _with_texts(table: pa.Table, name: str, text: str) -> pa.Table:
    return table.append_column(name, Texts.chosen(np.zeros(table.num_rows), text).array())


def _present(column: pa.ChunkedArray) -> Mask:
    return _mask(column.is_valid())


def _mask(column: pa.ChunkedArray) -> Mask:
    return np.asarray(column.to_numpy())
