"""Who called whom, for spans that arrive in any order and in any batches."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from tests.kit.spark import EPOCH, compact_frame, frame_of, in_order, rows_of, span

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytest.importorskip("pyspark")

Span = dict[str, Any]


def served(span_id: str | None, parent: str | None = None, **changes: Any) -> Span:
    """A span that serves."""
    return span(span_id, parent_span_id=parent, **changes)


def called(span_id: str | None, **changes: Any) -> Span:
    """A span that calls."""
    return span(span_id, "CLIENT", **changes)


class Run:
    """Batches linked one after the other, each digest carried on for ``window`` batches."""

    def __init__(self, spark: SparkSession, window: int | None = None) -> None:
        self._spark = spark
        self._window = window
        self._digests: dict[int, list[Any]] = {}
        self._number = 0
        self.relations: list[dict[str, Any]] = []
        self.lost: Counter[str] = Counter()

    def batch(self, spans: Iterable[Span], expire: int | None = None) -> list[dict[str, Any]]:
        """Link one batch; its relations."""
        from batchmill.spark.spans.links import SUMMARY_SCHEMA, link

        self._number += 1
        if expire is None and self._window is not None:
            expire = self._number - self._window
        carried = [row for rows in self._digests.values() for row in rows]
        links = link(
            compact_frame(self._spark, spans),
            self._spark.createDataFrame(carried, SUMMARY_SCHEMA) if carried else None,
            self._number,
            expire,
        )
        links.paired.persist()
        relations = rows_of(links.relations)
        self._digests[self._number] = links.summary.collect()
        assert links.summary.schema.simpleString() == SUMMARY_SCHEMA.simpleString()
        for row in links.unresolved.collect():
            self.lost[f"{row['kind']}: {row['reason']}"] += row["spans"]
        links.paired.unpersist()
        for number in [each for each in self._digests if expire is not None and each <= expire]:
            del self._digests[number]
        self.relations += relations
        return relations

    def end(self) -> list[dict[str, Any]]:
        """Let everything expire."""
        return self.batch([], expire=self._number)

    def waiting(self, number: int) -> set[str | None]:
        """The spans of a batch that are not settled."""
        return {row["span_id"] for row in self._digests[number] if not row["settled"]}


def brief(relations: Iterable[dict[str, Any]]) -> list[str]:
    """Each relation as ``caller > callee/endpoint`` and its detect point, sorted."""
    return sorted(
        f"{row['sourceService']} > {row['destService']}/{row['endpoint']} {row['detectPoint']}"
        for row in relations
    )


FAR = {"peer.service": "far"}


def test_one_batch_gives_every_relation_of_its_spans(spark: SparkSession) -> None:
    """The rows of the three relation sources, whole, for a trace that is there at once."""
    from batchmill.spark.spans.links import link
    from batchmill.spark.spans.sources import relation_sources

    spans = [
        served("root", us=9000, resource={"host.name": "h1"}),
        called("call", parent_span_id="root", at=10, resource={"host.name": "h1"}, us=4000)
        | {"attributes": {"http.response.status_code": "503"} | FAR, "status": "ERROR"},
        served("work", "call", at=20, service="stock", resource={"service.instance.id": "i2"})
        | {"attributes": {"rpc.grpc.status_code": "2"}},
    ]
    relations = relation_sources(link(compact_frame(spark, spans), None, 1).relations)
    found = {source: frame_of(rows) for source, rows in relations.items()}
    user = {"sourceServiceName": "User", "sourceServiceInstanceName": "User"}
    shop = {"sourceServiceName": "shop", "sourceServiceInstanceName": "h1"}
    to_shop = {"destServiceName": "shop", "destServiceInstanceName": "h1", "endpoint": "op root"}
    to_stock = {"destServiceName": "stock", "destServiceInstanceName": "i2", "endpoint": "op work"}
    plain = {"status": True, "httpResponseStatusCode": None, "rpcStatusCode": None, "type": "RPC"}
    at = {"time": EPOCH, "latency": 9, "latencyMicros": 9000, "detectPoint": "SERVER"}
    calling = {"time": _at(10), "latency": 4, "status": False, "httpResponseStatusCode": 503}
    calling |= {
        "latencyMicros": 4000,
        "rpcStatusCode": None,
        "type": "HTTP",
        "detectPoint": "CLIENT",
    }
    serving = plain | {"time": _at(20), "rpcStatusCode": "2", "detectPoint": "SERVER"}
    serving["latencyMicros"] = 5000
    rows = [
        (user | to_shop | plain | at, "UNDEFINED"),
        (shop | to_stock | calling, "GENERAL"),
        (shop | to_stock | serving | {"latency": 5}, "GENERAL"),
    ]
    assert rows_of(found["ServiceRelation"]) == in_order(
        row | {"sourceLayer": layer, "destLayer": "GENERAL"} for row, layer in rows
    )
    assert rows_of(found["ServiceInstanceRelation"]) == in_order(
        row | {"sourceServiceLayer": layer, "destServiceLayer": "GENERAL"} for row, layer in rows
    )
    assert rows_of(found["EndpointRelation"]) == [
        serving
        | {"serviceName": "shop", "serviceInstanceName": "h1", "serviceLayer": "GENERAL"}
        | {"endpoint": "op call", "childServiceName": "stock", "childEndpoint": "op work"}
        | {"childServiceInstanceName": "i2", "childServiceLayer": "GENERAL", "rpcLatency": 5}
    ]


def _at(microseconds: int) -> datetime:
    return EPOCH.replace(microsecond=microseconds)


def test_a_call_without_an_answering_span_goes_where_its_caller_says(spark: SparkSession) -> None:
    """At the end of the wait: peer.service, else server.address, in the layer of its target."""
    host = {"server.address": "h", "server.port": "1"}
    kinds = {
        "http": ({"http.method": "GET"}, "GENERAL", "UNDEFINED"),
        "db": ({"db.system": "mysql"}, "VIRTUAL_DATABASE", "VIRTUAL_DATABASE"),
        "cache": ({"db.system.name": "redis"}, "VIRTUAL_CACHE", "VIRTUAL_CACHE"),
        "mq": ({"messaging.system": "kafka"}, "VIRTUAL_MQ", "VIRTUAL_MQ"),
        "ai": ({"gen_ai.system": "x"}, "VIRTUAL_GENAI", "VIRTUAL_GENAI"),
    }
    run = Run(spark)
    run.batch(
        span(f"{name} {place}", "PRODUCER" if name == "mq" else "CLIENT", attributes=facts | known)
        for name, (facts, _, _) in kinds.items()
        for place, known in (("far", FAR | host), ("h", host), ("nowhere", {"server.port": "1"}))
    )
    assert run.relations == []
    run.batch([served("later")])
    assert brief(run.relations) == ["User > shop/op later SERVER"]
    run.relations.clear()
    found = {
        (row["endpoint"], row["destService"], row["destInstance"], row["destLayer"])
        for row in run.end()
    }
    assert found == {
        (f"op {name} {place}", place, place, layer)
        for name, (_, peer, address) in kinds.items()
        for place, layer in (("far", peer), ("h", address))
    }
    assert run.lost == {"CLIENT: no destination": 4, "PRODUCER: no destination": 1}


def test_odd_ids_and_parents(spark: SparkSession) -> None:
    """Parents of one's own service, oneself as a parent, ids that are missing or in two traces."""
    run = Run(spark)
    found = run.batch(
        [
            served("a", "in", service="x"),
            span("in", "INTERNAL", service="x"),  # the same service: nothing
            served("self", "self"),
            served("same", "other trace", service="x"),
            called("other trace", trace_id="t2"),
            served("b", "step", trace_id="t3", service="y"),
            span("step", trace_id="t3") | {"kind": None},  # any kind can be a parent
            called(None, trace_id="t3", attributes=FAR),
            served("c", None, trace_id=None),
            served("d", "", trace_id=""),
            served("e", "step", trace_id=None),
            called("step", trace_id=None),
            served(None, "step", trace_id="t3", service="z"),
        ]
    )
    assert brief(found) == [
        "User > shop/op c SERVER",
        "User > shop/op d SERVER",
        "shop > far/op None CLIENT",
        "shop > y/op b SERVER",
        "shop > z/op None SERVER",
    ]
    # What has no trace can never be found, and does not wait.
    assert run.lost == {"SERVER: parent never came": 1, "CLIENT: no destination": 1}
    assert run.waiting(1) == {"same", "other trace"}
    assert run.end() == []
    assert run.lost == {"SERVER: parent never came": 2, "CLIENT: no destination": 2}


def test_a_call_is_related_to_every_service_that_answers(spark: SparkSession) -> None:
    """As the caller measured it, in the batch of each; its peer attribute is not used then."""
    run = Run(spark)
    call = span("x", "PRODUCER", attributes=FAR, us=7000)
    assert run.batch([served("before", "x", at=30, service="a", us=1000)]) == []
    found = run.batch([call, served("own", "x", at=1), served("with", "x", at=20, service="b")])
    assert brief(found) == [
        "shop > a/op before CLIENT",
        "shop > a/op before SERVER",
        "shop > b/op with CLIENT",
        "shop > b/op with SERVER",
    ]
    assert {(row["time"], row["latency"]) for row in found if row["detectPoint"] == "CLIENT"} == {
        (EPOCH, 7)
    }
    assert run.waiting(2) == set()
    again = served("after", "x", at=9, service="a") | {"kind": "CONSUMER"}
    assert brief(run.batch([again, call, again])) == [
        *["shop > a/op after CLIENT"] * 2,  # delivered twice
        *["shop > a/op after SERVER"] * 2,
    ]
    assert run.end() == []
    assert not run.lost


def test_a_call_that_only_its_own_service_answers_waits_for_another(spark: SparkSession) -> None:
    """Until its time is over, and an answer that comes with its end is in time."""
    run = Run(spark)
    calls = [called(each, attributes=FAR) for each in ("x", "y", "z")]
    assert run.batch([*calls, served("own", "x"), served("own z", "z")]) == []
    assert run.waiting(1) == {"x", "y", "z"}
    assert brief(run.batch([served("late", "y", service="b")])) == [
        "shop > b/op late CLIENT",
        "shop > b/op late SERVER",
    ]
    assert brief(run.batch([served("last", "z", service="a")], expire=1)) == [
        "shop > a/op last CLIENT",
        "shop > a/op last SERVER",
        "shop > far/op x CLIENT",
    ]
    assert run.end() == []
    assert not run.lost


def test_a_parent_delivered_again_relates_nothing_again(spark: SparkSession) -> None:
    """Twins of a parent, in one batch and in later ones, before and after its child."""
    parent = span("p", "INTERNAL")
    run = Run(spark)
    assert run.batch([served("c", "p", service="x")]) == []
    assert brief(run.batch([parent, parent])) == ["shop > x/op c SERVER"]
    assert brief(run.batch([served("d", "p", service="x"), parent])) == ["shop > x/op d SERVER"]
    assert run.end() == []
    assert not run.lost


SERVICES = ("a", "b", "c")


def forest(rng: random.Random) -> list[Span]:
    """Spans of a few traces with everything that can be odd about them."""
    spans: list[Span] = []
    for trace in range(rng.randint(1, 3)):
        made: list[Span] = []
        for number in range(rng.randint(1, 9)):
            pool = [f"s{number}" for number in range(9)] + [None, "", "gone"]
            parent = rng.choice(pool) if not made or rng.random() < 0.2 else made[-1]["span_id"]
            kind = rng.choice(("SERVER", "CONSUMER", "CLIENT", "PRODUCER", "INTERNAL"))
            made.append(
                span(
                    rng.choice((f"s{number}",) * 9 + (None,)),
                    kind,
                    name=f"op{number}",
                    service=rng.choice(SERVICES),
                    trace_id=rng.choice((f"t{trace}",) * 9 + (None,)),
                    parent_span_id=parent,
                    at=rng.randint(0, 3),
                    us=rng.randint(0, 3) * 1000,
                    attributes=rng.choice(({}, FAR)),
                )
            )
        made += rng.sample(made, k=rng.randint(0, 2) if len(made) > 1 else 0)
        spans += made
    return spans


def copied(spans: Iterable[Span], copy: int) -> list[Span]:
    """The same spans in a world of their own, so that many worlds go through Spark together."""
    return [
        each
        | {"service": f"{copy}:{each['service']}"}
        | {"trace_id": each["trace_id"] and f"{copy}:{each['trace_id']}"}
        | {"attributes": {name: f"{copy}:{value}" for name, value in each["attributes"].items()}}
        for each in spans
    ]


def by_copy(relations: Iterable[dict[str, Any]]) -> dict[int, Counter[str]]:
    """The relations of each world, counted."""
    result: dict[int, Counter[str]] = {}
    for row in relations:
        copy, _, dest = row["destService"].partition(":")
        what = f"{row['time']} {row['latency']} {row['sourceService'].partition(':')[2]}"
        what += f" {row['sourceEndpoint']}"
        key = f"{what} > {dest}/{row['endpoint']} {row['destLayer']} {row['detectPoint']}"
        result.setdefault(int(copy), Counter())[key] += 1
    return result


def test_however_spans_are_split_the_relations_are_the_same(spark: SparkSession) -> None:
    """Twelve forests, each whole in one batch and split at random in five other ways."""
    rng = random.Random(20260301)
    batches: list[list[Span]] = [[] for _ in range(3)]
    groups: list[list[int]] = []
    for number in range(12):
        spans = forest(rng)
        copies = [number * 6 + each for each in range(6)]
        groups.append(copies)
        batches[0] += copied(spans, copies[0])
        for copy in copies[1:]:
            for each in copied(spans, copy):
                rng.choice(batches).append(each)
    run = Run(spark)
    for batch in batches:
        run.batch(batch)
    run.end()
    found = by_copy(run.relations)
    for copies in groups:
        whole = found.get(copies[0], Counter())
        assert [found.get(copy, Counter()) for copy in copies[1:]] == [whole] * 5
    assert run.lost
    assert all(count % 6 == 0 for count in run.lost.values())


def test_batch_by_batch_it_is_what_a_plain_list_of_waiting_spans_gives(spark: SparkSession) -> None:
    """Forty forests split at random with a window of two batches, against :class:`Model`."""
    rng = random.Random(7)
    batches: list[list[Span]] = [[] for _ in range(4)]
    for copy in range(40):
        for each in copied(forest(rng), copy):
            rng.choice(batches).append(each)
    run, model = Run(spark, window=2), Model(window=2)
    for batch in (*batches, [], []):
        assert by_copy(run.batch(batch)) == by_copy(model.batch(batch))
        assert run.lost == model.lost
    assert len(run.relations) > 100
    assert len(run.lost) == 4


class Model:
    """The rules once more, with a list of those who wait instead of digests."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._number = 0
        self._known: list[tuple[int, Span]] = []
        self._waiting: list[tuple[int, Span]] = []
        self.lost: Counter[str] = Counter()

    def batch(self, spans: Sequence[Span]) -> list[dict[str, Any]]:
        self._number += 1
        new = [(self._number, each) for each in spans]
        self._known += new
        found: list[dict[str, Any]] = []
        still = []
        for number, each in self._waiting + new:
            last = number <= self._number - self._window
            hopeless = each["trace_id"] is None
            serves = each["kind"] in ("SERVER", "CONSUMER")
            if serves and not each["parent_span_id"]:
                found.append(_relation(each, "User", None, each))
            elif serves:
                parents = self._spans(trace_id=each["trace_id"], span_id=each["parent_span_id"])
                if parents:
                    # Twins are alike, but two spans may also share an id: the first one counts.
                    parent = min(
                        parents, key=lambda one: (one["time"], one["service"], one["name"])
                    )
                    if parent["service"] != each["service"]:
                        found.append(_relation(each, parent["service"], parent["name"], each))
                        if parent["kind"] in ("CLIENT", "PRODUCER"):
                            found.append(_relation(parent, parent["service"], None, each))
                elif last or hopeless:
                    self.lost[f"{each['kind']}: parent never came"] += 1
                else:
                    still.append((number, each))
            elif each["kind"] in ("CLIENT", "PRODUCER"):
                children = self._spans(trace_id=each["trace_id"], parent_span_id=each["span_id"])
                if any(
                    one["kind"] in ("SERVER", "CONSUMER") and one["service"] != each["service"]
                    for one in children
                ):
                    continue  # They have told, or tell now.
                if not (last or hopeless or each["span_id"] is None):
                    still.append((number, each))
                elif peer := each["attributes"].get("peer.service"):
                    found.append(_relation(each, each["service"], None, each | {"service": peer}))
                else:
                    self.lost[f"{each['kind']}: no destination"] += 1
        self._waiting = still
        # What expires now was still there for this batch.
        oldest = self._number - self._window
        self._known = [one for one in self._known if one[0] > oldest]
        return found

    def _spans(self, **ids: str | None) -> list[Span]:
        if None in ids.values():
            return []
        return [one for _, one in self._known if ids.items() <= one.items()]


def _relation(of: Span, source: str, endpoint: str | None, dest: Span) -> dict[str, Any]:
    return {
        "sourceService": source,
        "sourceEndpoint": endpoint,
        "destService": dest["service"],
        "endpoint": dest["name"],
        "destLayer": "GENERAL",
        "detectPoint": "SERVER" if of["kind"] in ("SERVER", "CONSUMER") else "CLIENT",
        "time": of["time"],
        "latency": (of["end_time"] - of["time"]) // timedelta(milliseconds=1),
    }
