"""Finds which service called which: pairs spans with their parents and children across batches.

A relation takes two spans, and they may arrive in different batches. So each batch keeps a summary
of its spans, which later batches read for as long as spans wait:

- A span that serves pairs with its parent in the batch in which the later of the two arrives. If
  the parent is a call or of another service, that is a relation as the server saw it (SERVER); if
  the parent is a call, it is also one as the caller saw it (CLIENT). A call that three services
  serve thus relates to each of them, and one that its own service serves is a call to itself.
- A call to a database, a cache or a broker relates to that (its ``peer``) at once, as the caller
  saw it. If somebody serves it all the same, such as the consumer of a message, that is a relation
  as the server saw it only: a call counts once for its caller.
- A call that nobody has served until its summary expires went where the caller itself says (its
  ``peer``).
- A message that is consumed pairs with the span that sent it in the same way; how long it took is
  known then. Without that span it counts as consumed when it expires.
- A span without a partner by then is counted as unresolved.

Each delivered row counts once, whatever the split into batches: a served request that was delivered
twice counts twice, on both sides, as in all other event types; a call that was delivered twice
counts twice only if nobody served it; one to a database, a cache or a broker counts as often as it
was delivered. The *other* span of a pair is looked up by (trace id, span id), however often it was
delivered; if different spans share an id, the first to start counts. A span without these ids can
never be paired, and does not wait.

This works because a summary never changes. A row that waits since batch 3 has been paired exactly
if a partner is among the pending rows: it arrived after batch 3, so it has not expired. That is why
rows must expire oldest first, and why rows that expire now still have to be passed in.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql import DataFrame
from pyspark.sql import types as T
from pyspark.sql.functions import expr

from batchmill.spark.spans.columns import CALLS, SERVES

_TEXT, _INT, _FLAG = T.StringType(), T.IntegerType(), T.BooleanType()
SUMMARY_SCHEMA = T.StructType(
    [
        T.StructField(name, kind)
        for name, kind in {
            **dict.fromkeys(("trace_id", "span_id", "parent_span_id", "name", "kind"), _TEXT),
            "time": T.TimestampType(),
            "latency": _INT,
            "latencyMicros": T.LongType(),
            "status": _FLAG,
            **dict.fromkeys(("service", "instance", "type"), _TEXT),
            "httpResponseStatusCode": _INT,
            "rpcStatusCode": _TEXT,
            **dict.fromkeys(("peer", "peer_layer", "broker", "broker_endpoint"), _TEXT),
            "batch": T.LongType(),
            "settled": _FLAG,
        }.items()
    ]
)
"""The summary of a span that is kept until its partners have arrived. Files of older versions may
lack columns, which are then null. The first columns are from :func:`.columns.compact`; ``batch`` is
the one it arrived in; ``settled`` means that the span waits for no partner of its own, though it
can still be the partner of another span."""

_SPAN_COLUMNS = tuple(SUMMARY_SCHEMA.names[:-2])
_MEASURED = (
    *("time", "latency", "status", "type", "httpResponseStatusCode", "rpcStatusCode"),
    "latencyMicros",
)
_PARENT_COLUMNS = ("time", "service", "instance", "name", "kind", *_MEASURED[1:], "peer_layer")


@dataclass(frozen=True)
class Links:
    """The result of pairing the spans of one batch. All frames are lazy."""

    relations: DataFrame
    """The calls found in this batch; see :func:`.sources.relation_sources`."""
    summary: DataFrame
    """This batch's spans for later batches, in :data:`SUMMARY_SCHEMA`."""
    unresolved: DataFrame
    """``kind``, ``reason`` and ``spans``: how many spans have no partner, or never can."""
    paired: DataFrame
    """What the other three are derived from; persist it, or each of them pairs again. Its rows
    with ``accessed`` are messages that were sent or consumed; see :func:`.sources.broker_sources`.
    """


def link(
    new: DataFrame, pending: DataFrame | None, batch: int, expire_before: int | None = None
) -> Links:
    """Pair the spans of a batch with each other and with those of earlier batches.

    ``new`` comes from :func:`.columns.compact`; ``pending`` has the summaries of earlier batches,
    including those that expire now: of batches up to ``expire_before``. To expire everything, pass
    an empty ``new`` and the highest number. Both frames are read more than once.
    """
    # Numbers that change from batch to batch are kept out of the stages that are costly to compile.
    known = new.selectExpr(*_SPAN_COLUMNS, "false AS settled", "true AS fresh", "false AS expired")
    if pending is not None:
        expires = "false" if expire_before is None else f"batch <= {expire_before}L"
        old = _touched(new, pending.withColumn("expired", expr(expires)))
        known = known.unionByName(
            old.selectExpr(*_SPAN_COLUMNS, "settled", "false AS fresh", "expired")
        )
    paired = _pair(known)
    return Links(
        relations=paired.where("relation IS NOT NULL").selectExpr(
            "INLINE(IF(callers_view IS NULL, ARRAY(relation), ARRAY(relation, callers_view)))"
        ),
        summary=paired.where("fresh").selectExpr(*_SPAN_COLUMNS, f"{batch}L AS batch", "settled"),
        unresolved=paired.where("lost IS NOT NULL")
        .groupBy("kind", "lost")
        .count()
        .selectExpr("kind", "lost AS reason", "count AS spans"),
        paired=paired,
    )


def _touched(new: DataFrame, pending: DataFrame) -> DataFrame:
    """The pending rows of traces in which something can change now."""
    expired = pending.where("expired AND NOT settled").select("trace_id")
    traces = new.select("trace_id").unionByName(expired)
    return pending.join(traces, "trace_id", "left_semi")


def _pair(known: DataFrame) -> DataFrame:
    """Each span under its own id and, if it waits for a parent, under the parent's id again.

    A span, its duplicates and its children thus are in one group: one shuffle and one sort for
    everything. ``own`` marks the one row that counts for its span.
    """
    child = f"({SERVES} AND parent_span_id IS NOT NULL)"
    roles = known.selectExpr(
        "*",
        f"{child} AS is_child",
        f"EXPLODE(IF({child}, ARRAY(false, true), ARRAY(false))) AS as_child",
    ).selectExpr(
        "*",
        "IF(as_child, parent_span_id, span_id) AS key",
        "as_child = is_child AS own",
    )
    # A window takes null ids as equal, but they identify no span.
    node = "NOT as_child AND trace_id IS NOT NULL AND key IS NOT NULL"
    leaf = "as_child AND trace_id IS NOT NULL"
    group = "OVER (PARTITION BY trace_id, key)"
    met = roles.selectExpr(
        "*",
        f"MIN(IF({node}, STRUCT({', '.join(_PARENT_COLUMNS)}), NULL)) {group} AS parent",
        f"MAX({node} AND NOT fresh) {group} AS parent_known",
        f"MAX({leaf}) {group} AS served",
    )
    return (
        # Fresh rows are not settled yet; rows settled on arrival have nothing more to count.
        met.where("own AND NOT settled")
        .selectExpr(
            "*",
            "fresh AND (trace_id IS NULL OR key IS NULL) AS hopeless",
            "is_child AND (fresh OR NOT parent_known) AND parent IS NOT NULL AS found",
            f"COALESCE(fresh AND peer_layer IN ({_NO_PARTNER}), false) AS at_once",
        )
        .selectExpr(
            "*",
            f"found AND (parent.service <> service OR parent.{CALLS}) AS pairs",
            f"CASE WHEN is_child THEN parent IS NOT NULL WHEN {CALLS} THEN at_once OR served "
            "ELSE true END AS answered",
        )
        .selectExpr("*", "(hopeless OR expired) AND NOT answered AS given_up")
        .where("fresh OR found OR given_up")
        .selectExpr(*_SPAN_COLUMNS, "fresh", *_OUTCOMES)
    )


_NO_PARTNER = "'VIRTUAL_DATABASE', 'VIRTUAL_CACHE', 'VIRTUAL_MQ'"
"""The layers of what is called and sends no spans."""


def _relation(
    detect: str, source: str, dest: str, source_endpoint: str | None = None, of: str = ""
) -> str:
    """SQL of a relation. ``of``: the prefix of the measured columns, if not the row's own."""
    of_endpoints = "false" if source_endpoint is None else "true"
    measures = ", ".join(f"'{name}', {of}{name}" for name in _MEASURED)
    return (
        f"NAMED_STRUCT('detectPoint', '{detect}', {source}, {dest}, "
        f"'sourceEndpoint', {source_endpoint or 'CAST(NULL AS STRING)'}, "
        f"'ofEndpoints', {of_endpoints}, {measures})"
    )


def _end(side: str, service: str, instance: str, layer: str) -> str:
    return f"'{side}Service', {service}, '{side}Instance', {instance}, '{side}Layer', {layer}"


_USER = _end("source", "'User'", "'User'", "'UNDEFINED'")
_SELF = _end("source", "service", "instance", "'GENERAL'")
_PARENT = _end("source", "parent.service", "parent.instance", "'GENERAL'")
_SERVED = _end("dest", "service", "instance", "'GENERAL'") + ", 'endpoint', name"
_PEER = _end("dest", "peer", "peer", "peer_layer") + ", 'endpoint', name"

_OUTCOMES = (
    f"CASE WHEN {SERVES} AND NOT is_child THEN {_relation('SERVER', _USER, _SERVED)} "
    f"WHEN pairs THEN {_relation('SERVER', _PARENT, _SERVED, 'parent.name')} "
    "WHEN at_once OR given_up AND NOT is_child AND peer IS NOT NULL "
    f"THEN {_relation('CLIENT', _SELF, _PEER)} END AS relation",
    f"IF(pairs AND parent.{CALLS} AND NOT COALESCE(parent.peer_layer IN ({_NO_PARTNER}), false), "
    f"{_relation('CLIENT', _PARENT, _SERVED, of='parent.')}, NULL) AS callers_view",
    "broker IS NOT NULL AND IF(is_child, found OR given_up, fresh) AS accessed",
    f"IF(found AND parent.{CALLS} AND parent.peer_layer = 'VIRTUAL_MQ', "
    "GREATEST(0L, (UNIX_MICROS(time) - UNIX_MICROS(parent.time)) DIV 1000), NULL) AS on_the_way",
    "CASE WHEN given_up AND is_child THEN 'parent never came' "
    "WHEN given_up AND peer IS NULL THEN 'no destination' END AS lost",
    "hopeless OR answered AS settled",
)
