"""Who called whom: spans paired with their parents and children, across micro-batches.

A relation takes two spans, and they may arrive in different batches. So each batch leaves a digest
of its spans behind, which later batches are given for as long as the waiting window lasts:

- A span that serves pairs with its parent in the batch in which the later of the two arrives. If
  the parent is of another service, that is a relation as the one who serves saw it (SERVER); if the
  parent calls, it is also one as the caller saw it (CLIENT). So a call that is served by three
  services relates to each of them.
- A span that calls, and for which no other service has answered until its digest expires, went
  where the caller itself says (its ``peer``).
- What found no partner by then is counted as unresolved.

Every delivered row speaks once, whatever the split into batches: a served request that was
delivered twice counts twice, on both sides, as it does in all other sources; a call that was
delivered twice counts twice only if nobody answered it. The *other* end of a pair is looked up by
(trace id, span id), however often it was delivered; should spans that differ share an id, the first
to start counts. A span without these ids can never be paired, and does not wait.

It works because a digest never changes. A row waiting since batch 3 has been paired in the
meantime exactly if a partner is among the carried rows: it came after batch 3, so it has not
expired. That is why expired rows must be taken away oldest first, and why rows that expire now are
still to be passed in.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql import DataFrame
from pyspark.sql import types as T
from pyspark.sql.functions import expr

from batchmill.spark.spans.columns import CALLS, SERVES

DIGEST_SCHEMA = T.StructType(
    [
        T.StructField("trace_id", T.StringType()),
        T.StructField("span_id", T.StringType()),
        T.StructField("parent_span_id", T.StringType()),
        T.StructField("name", T.StringType()),
        T.StructField("kind", T.StringType()),
        T.StructField("time", T.TimestampType()),
        T.StructField("latency", T.IntegerType()),
        T.StructField("status", T.BooleanType()),
        T.StructField("service", T.StringType()),
        T.StructField("instance", T.StringType()),
        T.StructField("type", T.StringType()),
        T.StructField("httpResponseStatusCode", T.IntegerType()),
        T.StructField("rpcStatusCode", T.StringType()),
        T.StructField("peer", T.StringType()),
        T.StructField("peer_layer", T.StringType()),
        T.StructField("batch", T.LongType()),
        T.StructField("settled", T.BooleanType()),
    ]
)
"""What is kept of a span until its partners have come: the first columns are those of
:func:`.columns.compact`, ``batch`` is the one it arrived in, ``settled`` says that as one end of a
pair it waits for nothing (it can still be the other end of somebody else's)."""

_SPAN_COLUMNS = tuple(DIGEST_SCHEMA.names[:-2])
_MEASURED = ("time", "latency", "status", "type", "httpResponseStatusCode", "rpcStatusCode")
_PARENT_COLUMNS = ("time", "service", "instance", "name", "kind", *_MEASURED[1:])


@dataclass(frozen=True)
class Links:
    """What pairing the spans of one batch gives. All frames are lazy."""

    relations: DataFrame
    """The calls found in this batch; :func:`relation_sources` makes rows of sources of them."""
    digest: DataFrame
    """This batch's spans for later batches, as :data:`DIGEST_SCHEMA`."""
    unresolved: DataFrame
    """``kind``, ``reason`` and ``spans``: how many found no partner, or never can."""
    paired: DataFrame
    """What the other three are taken from; persist it, as each of them would pair anew."""


def link(
    new: DataFrame, carried: DataFrame | None, batch: int, expire_before: int | None = None
) -> Links:
    """Pair the spans of a batch with each other and with those that were carried over.

    ``new`` is of :func:`.columns.compact`; ``carried`` has the digests of earlier batches in the
    window, those included that end their wait now: of batches up to ``expire_before``. To let
    everything expire, pass an empty ``new`` and the highest number. Both frames are read more than
    once.
    """
    # Numbers that change from batch to batch are kept out of the stages that are costly to compile.
    known = new.selectExpr(*_SPAN_COLUMNS, "false AS settled", "true AS fresh", "false AS expired")
    if carried is not None:
        expires = "false" if expire_before is None else f"batch <= {expire_before}L"
        old = _touched(new, carried.withColumn("expired", expr(expires)))
        known = known.unionByName(
            old.selectExpr(*_SPAN_COLUMNS, "settled", "false AS fresh", "expired")
        )
    paired = _pair(known)
    return Links(
        relations=paired.where("relation IS NOT NULL").selectExpr(
            "INLINE(IF(callers_view IS NULL, ARRAY(relation), ARRAY(relation, callers_view)))"
        ),
        digest=paired.where("fresh").selectExpr(*_SPAN_COLUMNS, f"{batch}L AS batch", "settled"),
        unresolved=paired.where("lost IS NOT NULL")
        .groupBy("kind", "lost")
        .count()
        .selectExpr("kind", "lost AS reason", "count AS spans"),
        paired=paired,
    )


def _touched(new: DataFrame, carried: DataFrame) -> DataFrame:
    """The carried rows of traces in which something can happen now."""
    waited = carried.where("expired AND NOT settled").select("trace_id")
    traces = new.select("trace_id").unionByName(waited)
    return carried.join(traces, "trace_id", "left_semi")


def _pair(known: DataFrame) -> DataFrame:
    """Each span under its own id and, if it has a parent to find, under that id again.

    So a span, its twins and those who name it as their parent meet in one group: one shuffle and
    one sort for everything. ``own`` marks the row that speaks for its span.
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
    # Null ids are equal to a window, but they are nobody's.
    node = "NOT as_child AND trace_id IS NOT NULL AND key IS NOT NULL"
    leaf = "as_child AND trace_id IS NOT NULL"
    group = "OVER (PARTITION BY trace_id, key)"
    # If any child is of another service than the caller, so is the first or the last of them.
    met = roles.selectExpr(
        "*",
        f"MIN(IF({node}, STRUCT({', '.join(_PARENT_COLUMNS)}), NULL)) {group} AS parent",
        f"MAX({node} AND NOT fresh) {group} AS parent_known",
        f"MIN(IF({leaf}, service, NULL)) {group} AS served_from",
        f"MAX(IF({leaf}, service, NULL)) {group} AS served_to",
    )
    return (
        # Fresh rows are not settled yet; those that were settled as they came have no more to say.
        met.where("own AND NOT settled")
        .selectExpr(
            "*",
            "fresh AND (trace_id IS NULL OR key IS NULL) AS hopeless",
            "is_child AND (fresh OR NOT parent_known) AND parent.service <> service AS pairs",
            f"CASE WHEN is_child THEN parent IS NOT NULL WHEN {CALLS} THEN "
            "COALESCE(served_from <> service OR served_to <> service, false) "
            "ELSE true END AS answered",
        )
        .selectExpr("*", "(hopeless OR expired) AND NOT answered AS given_up")
        .where("fresh OR pairs OR given_up")
        .selectExpr(*_SPAN_COLUMNS, "fresh", *_OUTCOMES)
    )


def _relation(
    detect: str, source: str, dest: str, source_endpoint: str | None = None, of: str = ""
) -> str:
    """``of``: whose measures they are, where not the row's own; a prefix of columns."""
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
    f"WHEN given_up AND NOT is_child AND peer IS NOT NULL THEN {_relation('CLIENT', _SELF, _PEER)} "
    "END AS relation",
    f"IF(pairs AND parent.{CALLS}, {_relation('CLIENT', _PARENT, _SERVED, of='parent.')}, NULL) "
    "AS callers_view",
    "CASE WHEN given_up AND is_child THEN 'parent never came' "
    "WHEN given_up AND peer IS NULL THEN 'no destination' END AS lost",
    "hopeless OR answered AS settled",
)
