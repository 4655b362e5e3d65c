"""Who called whom: spans paired with their parents and children, across micro-batches.

A relation takes two spans, and they may arrive in different batches. So each batch leaves a digest
of its spans behind, which later batches are given for as long as the waiting window lasts:

- A span that serves and has a parent pairs with it in the batch in which the later of the two
  arrives; one whose parent serves for the same service relates nothing.
- A span that calls pairs with a span of another service that names it as its parent, in the first
  batch in which both are known: with the one that started first, of those known by then. If there
  is none until its digest expires, where it went is what the caller itself knows (its ``peer``).
- What found no partner by then is counted as unresolved.

Every delivered row speaks once, whatever the split into batches: a call or a served request that
was delivered twice counts twice, as it does in all other sources. The *other* end of a pair is
looked up by (trace id, span id), however often it was delivered. A span without these ids can never
be paired, and does not wait.

It works because a digest never changes. A row waiting since batch 3 has been paired in the
meantime exactly if a partner of a batch after 3 is among the carried rows: partners arrived later,
so they have not expired. That is why expired rows must be taken away oldest first, and why rows
that expire now are still to be passed in.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql import DataFrame
from pyspark.sql import types as T
from pyspark.sql.functions import expr

from batchmill.spark._spans import CALLS, SERVES

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
:func:`._spans.compact`, ``batch`` is the one it arrived in, ``settled`` says that as one end of a
pair it waits for nothing (it can still be the other end of somebody else's)."""

_SPAN_COLUMNS = tuple(DIGEST_SCHEMA.names[:-2])


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

    ``new`` is of :func:`._spans.compact`; ``carried`` has the digests of the earlier batches in the
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
        relations=paired.where("relation IS NOT NULL").selectExpr("relation.*"),
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
    # Two smallest children, of different services, are enough to know the smallest child that is
    # not of the caller's; and if any old child is of another service, so is the first or the last.
    met = roles.selectExpr(
        "*",
        f"MIN(IF({node}, STRUCT(time, service, instance, name), NULL)) {group} AS parent",
        f"MAX({node} AND NOT fresh) {group} AS parent_known",
        f"MIN(IF({leaf}, STRUCT(time, span_id, service, instance, name), NULL)) {group} AS first",
        f"MIN(IF({leaf} AND NOT fresh, service, NULL)) {group} AS old_from",
        f"MAX(IF({leaf} AND NOT fresh, service, NULL)) {group} AS old_to",
    ).selectExpr(
        "*",
        f"MIN(IF({leaf} AND service <> first.service, "
        f"STRUCT(time, span_id, service, instance, name), NULL)) {group} AS second",
    )
    return (
        met.selectExpr(
            "*",
            f"own AND {CALLS} AS is_call",
            "IF(first.service <> service, first, second) AS served_by",
            "fresh AND (trace_id IS NULL OR key IS NULL) AS hopeless",
            "COALESCE(old_from <> service OR old_to <> service, false) AS served_before",
        )
        .selectExpr(
            "*",
            "own AND is_child AND NOT settled AS asks_parent",
            "is_call AND NOT settled AS asks_child",
            "hopeless OR expired AS at_end",
        )
        .where("own AND (fresh OR asks_parent OR asks_child)")
        .selectExpr(*_SPAN_COLUMNS, "fresh", *_OUTCOMES)
        .where("fresh OR relation IS NOT NULL OR lost IS NOT NULL")
    )


def _relation(detect: str, source: str, dest: str, source_endpoint: str | None = None) -> str:
    of_endpoints = "false" if source_endpoint is None else "true"
    return (
        f"NAMED_STRUCT('time', time, 'detectPoint', '{detect}', {source}, {dest}, "
        f"'sourceEndpoint', {source_endpoint or 'CAST(NULL AS STRING)'}, "
        f"'ofEndpoints', {of_endpoints}, 'latency', latency, 'status', status, 'type', type, "
        "'httpResponseStatusCode', httpResponseStatusCode, 'rpcStatusCode', rpcStatusCode)"
    )


def _end(side: str, service: str, instance: str, layer: str) -> str:
    return f"'{side}Service', {service}, '{side}Instance', {instance}, '{side}Layer', {layer}"


_SOURCE = _end("source", "service", "instance", "'GENERAL'")
_DEST = _end("dest", "service", "instance", "'GENERAL'") + ", 'endpoint', name"

_OUTCOMES = (
    "CASE WHEN fresh AND own AND kind IN ('SERVER', 'CONSUMER') AND NOT is_child THEN "
    + _relation("SERVER", _end("source", "'User'", "'User'", "'UNDEFINED'"), _DEST)
    + " WHEN asks_parent AND (fresh OR NOT parent_known) AND parent.service <> service THEN "
    + _relation(
        "SERVER",
        _end("source", "parent.service", "parent.instance", "'GENERAL'"),
        _DEST,
        "parent.name",
    )
    + " WHEN asks_child AND served_by IS NOT NULL AND NOT (served_before AND NOT fresh) THEN "
    + _relation(
        "CLIENT",
        _SOURCE,
        _end("dest", "served_by.service", "served_by.instance", "'GENERAL'")
        + ", 'endpoint', served_by.name",
    )
    + " WHEN asks_child AND served_by IS NULL AND at_end AND peer IS NOT NULL THEN "
    + _relation(
        "CLIENT", _SOURCE, _end("dest", "peer", "peer", "peer_layer") + ", 'endpoint', name"
    )
    + " END AS relation",
    "CASE WHEN asks_parent AND parent IS NULL AND at_end THEN 'parent never came' "
    "WHEN asks_child AND served_by IS NULL AND at_end AND peer IS NULL THEN 'no destination' "
    "END AS lost",
    "CASE WHEN hopeless THEN true WHEN asks_parent THEN parent IS NOT NULL "
    "WHEN asks_child THEN served_by IS NOT NULL ELSE true END AS settled",
)
