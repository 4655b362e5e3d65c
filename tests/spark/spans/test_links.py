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
        self.messages: list[dict[str, Any]] = []
        """Those of the last batch."""
        self.all_messages: list[dict[str, Any]] = []
        self.lost: Counter[str] = Counter()

    def batch(self, spans: Iterable[Span], expire: int | None = None) -> list[dict[str, Any]]:
        """Link one batch; its relations."""
        from batchmill.spark.spans.links import SUMMARY_SCHEMA, link
        from batchmill.spark.spans.sources import broker_sources

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
        self.messages = rows_of(frame_of(broker_sources(links.paired)["MQEndpointAccess"]))
        self.all_messages += self.messages
        self._digests[self._number] = links.summary.collect()
        assert links.summary.schema.simpleString() == SUMMARY_SCHEMA.simpleString()
        for row in links.unresolved.collect():
            self.lost[f"{row['kind']}: {row['reason']}"] += row["spans"]
        links.paired.unpersist()
        for number in [batch for batch in self._digests if expire is not None and batch <= expire]:
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
HOST = {"server.address": "h", "server.port": "1"}
QUEUE = {"messaging.system": "kafka"}


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
    frames = {source: frame_of(rows) for source, rows in relations.items()}
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
    assert rows_of(frames["ServiceRelation"]) == in_order(
        row | {"sourceLayer": layer, "destLayer": "GENERAL"} for row, layer in rows
    )
    assert rows_of(frames["ServiceInstanceRelation"]) == in_order(
        row | {"sourceServiceLayer": layer, "destServiceLayer": "GENERAL"} for row, layer in rows
    )
    assert rows_of(frames["EndpointRelation"]) == [
        serving
        | {"serviceName": "shop", "serviceInstanceName": "h1", "serviceLayer": "GENERAL"}
        | {"endpoint": "op call", "childServiceName": "stock", "childEndpoint": "op work"}
        | {"childServiceInstanceName": "i2", "childServiceLayer": "GENERAL", "rpcLatency": 5}
    ]


def _at(microseconds: int) -> datetime:
    return EPOCH.replace(microsecond=microseconds)


def test_a_call_without_an_answering_span_goes_where_its_caller_says(spark: SparkSession) -> None:
    """In the layer of its target; at once where no answer can come, else at the wait's end."""
    places = {"far": FAR | HOST, "h:1": HOST, "else": {"server.port": "1"}}
    at_once = {
        "db": ({"db.system": "mysql"}, "VIRTUAL_DATABASE", "mysql"),
        "cache": ({"db.system.name": "redis"}, "VIRTUAL_CACHE", "redis"),
        "mq": ({"messaging.system": "kafka"}, "VIRTUAL_MQ", "kafka"),
    }
    later = {
        "ai": ({"gen_ai.system": "x"}, "VIRTUAL_GENAI", "x"),
        "http": ({"http.method": "GET"}, None, None),
    }
    run = Run(spark)
    run.batch(
        span(f"{name} {place}", "PRODUCER" if name == "mq" else "CLIENT", attributes=facts | known)
        for name, (facts, _, _) in (at_once | later).items()
        for place, known in places.items()
    )
    assert _destinations(run.relations) == {
        (f"op {name} {place}", system if place == "else" else place, layer)
        for name, (_, layer, system) in at_once.items()
        for place in places
    }
    assert run.waiting(1) == {f"{name} {place}" for name in later for place in places}
    run.relations.clear()
    run.batch([served("later")])
    assert brief(run.relations) == ["User > shop/op later SERVER"]
    assert _destinations(run.end()) == {
        ("op ai far", "far", "VIRTUAL_GENAI"),
        ("op ai h:1", "h:1", "VIRTUAL_GENAI"),
        ("op ai else", "x", "VIRTUAL_GENAI"),
        ("op http far", "far", "GENERAL"),
        ("op http h:1", "h:1", "UNDEFINED"),
    }
    assert run.lost == {"CLIENT: no destination": 1}


def _destinations(relations: Iterable[dict[str, Any]]) -> set[tuple[str, str, str]]:
    rows = list(relations)
    assert all(row["destService"] == row["destInstance"] for row in rows)
    assert all(row["detectPoint"] == "CLIENT" for row in rows)
    return {(row["endpoint"], row["destService"], row["destLayer"]) for row in rows}


def test_a_message_relates_its_consumer_to_its_sender(spark: SparkSession) -> None:
    """As the consumer sees it, in any batch; the sender called the broker, once."""
    run = Run(spark)
    sent = span("sent", "PRODUCER", attributes=QUEUE)
    assert brief(run.batch([sent])) == ["shop > kafka/op sent CLIENT"]
    consumed = span("got", "CONSUMER", parent_span_id="sent", service="mail", attributes=QUEUE)
    assert brief(run.batch([consumed])) == ["shop > mail/op got SERVER"]
    assert run.end() == []
    assert not run.lost


def test_a_message_counts_once_with_its_way(spark: SparkSession) -> None:
    """When its sender is known, or will never be; whichever of the two came first."""
    got = {"kind": "CONSUMER", "attributes": QUEUE}
    receive = span("receive", "CONSUMER", attributes=QUEUE | {"messaging.operation": "receive"})
    batches = [
        [
            served("early", "sent", at=2500) | got,
            served("lost", "gone") | got,
            served("root") | got,
            served("no trace", "x", trace_id=None) | got,
        ],
        [span("sent", "PRODUCER", attributes=QUEUE), receive, receive],
        [
            served("late", "sent", at=7999, service="mail") | got,
            served("skewed", "sent", at=-1) | got,
            served("step", "receive", at=9) | got,
            called("commit", attributes=QUEUE | {"messaging.operation": "commit"}),
        ],
    ]
    run = Run(spark)
    ways = []
    for batch in batches:
        run.batch(batch)
        ways.append(_ways(run.messages))
    run.end()
    assert [*ways, _ways(run.messages)] == [
        ["Consume op no trace None", "Consume op root None"],
        ["Consume op early 2", "Produce op sent 0"],
        ["Consume op late 7", "Consume op skewed 0", "Consume op step None"],
        ["Consume op lost None"],
    ]


def _ways(messages: Iterable[dict[str, Any]]) -> list[str]:
    return sorted(
        f"{row['operation']} {row['endpoint']} {row['transmissionLatency']}" for row in messages
    )


def test_odd_ids_and_parents(spark: SparkSession) -> None:
    """Parents of one's own service, oneself as a parent, ids that are missing or in two traces."""
    run = Run(spark)
    relations = run.batch(
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
    assert brief(relations) == [
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
    relations = run.batch([call, served("own", "x", at=1), served("with", "x", at=20, service="b")])
    assert brief(relations) == [
        "shop > a/op before CLIENT",
        "shop > a/op before SERVER",
        "shop > b/op with CLIENT",
        "shop > b/op with SERVER",
        "shop > shop/op own CLIENT",
        "shop > shop/op own SERVER",
    ]
    assert {
        (row["time"], row["latency"]) for row in relations if row["detectPoint"] == "CLIENT"
    } == {(EPOCH, 7)}
    assert run.waiting(2) == set()
    again = served("after", "x", at=9, service="a") | {"kind": "CONSUMER"}
    assert brief(run.batch([again, call, again])) == [
        *["shop > a/op after CLIENT"] * 2,  # delivered twice
        *["shop > a/op after SERVER"] * 2,
    ]
    assert run.end() == []
    assert not run.lost


def test_a_call_that_its_own_service_answers_is_a_call_to_itself(spark: SparkSession) -> None:
    """It waits no longer; an answer that comes with the end of its wait is in time."""
    run = Run(spark)
    calls = [called(span_id, attributes=FAR) for span_id in ("x", "y", "z")]
    nested = served("nested", "own")  # a server within a server is no call
    assert brief(run.batch([*calls, served("own", "x"), nested])) == [
        "shop > shop/op own CLIENT",
        "shop > shop/op own SERVER",
    ]
    assert run.waiting(1) == {"y", "z"}
    assert brief(run.batch([served("other", "x", service="b")])) == [
        "shop > b/op other CLIENT",
        "shop > b/op other SERVER",
    ]
    assert brief(run.batch([served("last", "z")], expire=1)) == [
        "shop > far/op y CLIENT",
        "shop > shop/op last CLIENT",
        "shop > shop/op last SERVER",
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
                    at=rng.randint(0, 3) * rng.choice((1, 900)),
                    us=rng.randint(0, 3) * 1000,
                    attributes=rng.choice(({}, FAR, QUEUE)),
                )
            )
        made += rng.sample(made, k=rng.randint(0, 2) if len(made) > 1 else 0)
        spans += made
    return spans


def copied(spans: Iterable[Span], copy: int) -> list[Span]:
    """The same spans in a world of their own, so that many worlds go through Spark together."""
    return [
        original
        | {"service": f"{copy}:{original['service']}"}
        | {"trace_id": original["trace_id"] and f"{copy}:{original['trace_id']}"}
        | {
            "attributes": {
                name: f"{copy}:{value}" for name, value in original["attributes"].items()
            }
        }
        for original in spans
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


def ways_by_copy(messages: Iterable[dict[str, Any]]) -> dict[int, Counter[str]]:
    """The messages of each world, counted."""
    result: dict[int, Counter[str]] = {}
    for row in messages:
        copy = int(row["serviceName"].partition(":")[0])
        result.setdefault(copy, Counter())[f"{row['time']} {_ways([row])}"] += 1
    return result


def test_however_spans_are_split_the_relations_are_the_same(spark: SparkSession) -> None:
    """Twelve forests, each whole in one batch and split at random in five other ways."""
    rng = random.Random(20260301)
    batches: list[list[Span]] = [[] for _ in range(3)]
    groups: list[list[int]] = []
    for number in range(12):
        spans = forest(rng)
        copies = [number * 6 + place for place in range(6)]
        groups.append(copies)
        batches[0] += copied(spans, copies[0])
        for copy in copies[1:]:
            for copied_span in copied(spans, copy):
                rng.choice(batches).append(copied_span)
    run = Run(spark)
    for batch in batches:
        run.batch(batch)
    run.end()
    for counts in (by_copy(run.relations), ways_by_copy(run.all_messages)):
        for copies in groups:
            whole = counts.get(copies[0], Counter())
            assert [counts.get(copy, Counter()) for copy in copies[1:]] == [whole] * 5
    assert run.lost
    assert all(count % 6 == 0 for count in run.lost.values())


def test_batch_by_batch_it_is_what_a_plain_list_of_waiting_spans_gives(spark: SparkSession) -> None:
    """Forty forests split at random with a window of two batches, against :class:`Model`."""
    rng = random.Random(7)
    batches: list[list[Span]] = [[] for _ in range(4)]
    for copy in range(40):
        for copied_span in copied(forest(rng), copy):
            rng.choice(batches).append(copied_span)
    run, model = Run(spark, window=2), Model(window=2)
    for batch in (*batches, [], []):
        assert by_copy(run.batch(batch)) == by_copy(model.batch(batch))
        assert ways_by_copy(run.messages) == ways_by_copy(model.messages)
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
        self.messages: list[dict[str, Any]] = []
        self.lost: Counter[str] = Counter()

    def batch(self, spans: Sequence[Span]) -> list[dict[str, Any]]:
        self._number += 1
        new = [(self._number, new_span) for new_span in spans]
        self._known += new
        relations: list[dict[str, Any]] = []
        still = []
        self.messages = []
        for number, own in self._waiting + new:
            last = number <= self._number - self._window
            hopeless = own["trace_id"] is None
            serves = own["kind"] in ("SERVER", "CONSUMER")
            broker = own["attributes"].get("messaging.system")
            if serves and not own["parent_span_id"]:
                relations.append(_relation(own, "User", None, own))
                self._count(own, None)
            elif serves:
                parents = self._spans(trace_id=own["trace_id"], span_id=own["parent_span_id"])
                if parents:
                    # Twins are alike, but two spans may also share an id: the first one counts.
                    parent = min(
                        parents, key=lambda one: (one["time"], one["service"], one["name"])
                    )
                    calls = parent["kind"] in ("CLIENT", "PRODUCER")
                    if parent["service"] != own["service"] or calls:
                        relations.append(_relation(own, parent["service"], parent["name"], own))
                        if calls and "messaging.system" not in parent["attributes"]:
                            relations.append(_relation(parent, parent["service"], None, own))
                    self._count(own, parent)
                elif last or hopeless:
                    self._count(own, None)
                    self.lost[f"{own['kind']}: parent never came"] += 1
                else:
                    still.append((number, own))
            elif own["kind"] in ("CLIENT", "PRODUCER") and broker:
                relations.append(_relation(own, own["service"], None, own | {"service": broker}))
                self._count(own, None)
            elif own["kind"] in ("CLIENT", "PRODUCER"):
                children = self._spans(trace_id=own["trace_id"], parent_span_id=own["span_id"])
                if any(one["kind"] in ("SERVER", "CONSUMER") for one in children):
                    continue  # They have told, or tell now.
                if not (last or hopeless or own["span_id"] is None):
                    still.append((number, own))
                elif peer := own["attributes"].get("peer.service"):
                    relations.append(_relation(own, own["service"], None, own | {"service": peer}))
                else:
                    self.lost[f"{own['kind']}: no destination"] += 1
        self._waiting = still
        # What expires now was still there for this batch.
        oldest = self._number - self._window
        self._known = [one for one in self._known if one[0] > oldest]
        return relations

    def _count(self, message: Span, sender: Span | None) -> None:
        broker = message["attributes"].get("messaging.system")
        if broker is None or message["kind"] == "SERVER":
            return
        consumed = message["kind"] == "CONSUMER"
        way = None if consumed else 0
        senders = ("CLIENT", "PRODUCER") if consumed and sender is not None else ()
        if sender and sender["kind"] in senders and "messaging.system" in sender["attributes"]:
            way = max(0, (message["time"] - sender["time"]) // timedelta(milliseconds=1))
        self.messages.append(
            {
                "serviceName": broker,
                "endpoint": message["name"],
                "operation": "Consume" if consumed else "Produce",
                "transmissionLatency": way,
                "time": message["time"],
            }
        )

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
        "destLayer": "VIRTUAL_MQ" if dest["service"].endswith(":kafka") else "GENERAL",
        "detectPoint": "SERVER" if of["kind"] in ("SERVER", "CONSUMER") else "CLIENT",
        "time": of["time"],
        "latency": (of["end_time"] - of["time"]) // timedelta(milliseconds=1),
    }
