"""Who called whom, for spans that arrive in any order and in any batches."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

import pytest

pytest.importorskip("pyarrow")

from batchmill.spans.hosts import MOST_HOSTS, KnownHosts, is_outside
from tests.kit.spark import EPOCH, in_order, span
from tests.spans.links_kit import FAR, HOST, QUEUE, Run, Span, brief, called, served, ways


def test_one_batch_gives_every_relation_of_its_spans() -> None:
    """The rows of the three relation sources, whole, for a trace that is there at once."""
    spans = [
        served("root", us=9000, resource={"host.name": "h1"}),
        called("call", parent_span_id="root", at=10, resource={"host.name": "h1"}, us=4000)
        | {"attributes": {"http.response.status_code": "503"} | FAR, "status": "ERROR"},
        served("work", "call", at=20, service="stock", resource={"service.instance.id": "i2"})
        | {"attributes": {"rpc.grpc.status_code": "2"}},
    ]
    run = Run()
    run.batch(spans)
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
    assert in_order(run.rows["ServiceRelation"]) == in_order(
        row | {"sourceLayer": layer, "destLayer": "GENERAL"} for row, layer in rows
    )
    assert in_order(run.rows["ServiceInstanceRelation"]) == in_order(
        row | {"sourceServiceLayer": layer, "destServiceLayer": "GENERAL"} for row, layer in rows
    )
    assert run.rows["EndpointRelation"] == [
        serving
        | {"serviceName": "shop", "serviceInstanceName": "h1", "serviceLayer": "GENERAL"}
        | {"endpoint": "op call", "childServiceName": "stock", "childEndpoint": "op work"}
        | {"childServiceInstanceName": "i2", "childServiceLayer": "GENERAL", "rpcLatency": 5}
    ]


def _at(microseconds: int) -> datetime:
    return EPOCH.replace(microsecond=microseconds)


def test_a_call_without_an_answering_span_goes_where_its_caller_says() -> None:
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
    run = Run()
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
    assert run.lost == {"no destination": 1}


def _destinations(relations: Iterable[dict[str, Any]]) -> set[tuple[str, str, str]]:
    rows = list(relations)
    assert all(row["destService"] == row["destInstance"] for row in rows)
    assert all(row["detectPoint"] == "CLIENT" for row in rows)
    return {(row["endpoint"], row["destService"], row["destLayer"]) for row in rows}


def test_a_message_relates_its_consumer_to_its_sender() -> None:
    """As the consumer sees it, in any batch; the sender called the broker, once."""
    run = Run()
    sent = span("sent", "PRODUCER", attributes=QUEUE)
    assert brief(run.batch([sent])) == ["shop > kafka/op sent CLIENT"]
    consumed = span("got", "CONSUMER", parent_span_id="sent", service="mail", attributes=QUEUE)
    assert brief(run.batch([consumed])) == ["shop > mail/op got SERVER"]
    assert run.end() == []
    assert not run.lost


def test_a_message_counts_once_with_its_way() -> None:
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
    run = Run()
    result = []
    for batch in batches:
        run.batch(batch)
        result.append(ways(run.messages))
    run.end()
    assert [*result, ways(run.messages)] == [
        ["Consume op no trace None", "Consume op root None"],
        ["Consume op early 2", "Produce op sent 0"],
        ["Consume op late 7", "Consume op skewed 0", "Consume op step None"],
        ["Consume op lost None"],
    ]


def test_odd_ids_and_parents() -> None:
    """Parents of one's own service, oneself as a parent, ids that are missing or in two traces."""
    run = Run()
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
        "User > shop/op e SERVER",  # its parent can never be found
        "shop > far/op None CLIENT",
        "shop > y/op b SERVER",
        "shop > z/op None SERVER",
    ]
    # What has no trace can never be found, and does not wait.
    assert run.lost == {"parent never came": 1, "no destination": 1}
    assert run.waiting(1) == {"same", "other trace"}
    assert brief(run.end()) == ["User > x/op same SERVER"]
    assert run.lost == {"parent never came": 2, "no destination": 2}


def test_a_call_is_related_to_every_service_that_answers() -> None:
    """As the caller measured it, in the batch of each; its peer attribute is not used then."""
    run = Run()
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


def test_a_call_that_its_own_service_answers_is_a_call_to_itself() -> None:
    """It waits no longer; an answer that comes with the end of its wait is in time."""
    run = Run()
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


def test_a_parent_delivered_again_relates_nothing_again() -> None:
    """Twins of a parent, in one batch and in later ones, before and after its child."""
    parent = span("p", "INTERNAL")
    run = Run()
    assert run.batch([served("c", "p", service="x")]) == []
    assert brief(run.batch([parent, parent])) == ["shop > x/op c SERVER"]
    assert brief(run.batch([served("d", "p", service="x"), parent])) == ["shop > x/op d SERVER"]
    assert run.end() == []
    assert not run.lost


OUTSIDE = {"server.address": "api.pay.org", "server.port": "443"}
PORTS = pytest.mark.parametrize("port", ["443", "587", "50051"])


@PORTS
def test_a_call_to_a_host_outside_counts_at_once(port: str) -> None:
    """It has never answered, so nobody is waited for; and it counts once."""
    run = Run()
    host = OUTSIDE | {"server.port": port}
    call = called("c", service="shop", name="POST /pay", attributes=host)
    assert brief(run.batch([call])) == [f"shop > api.pay.org:{port}/POST /pay CLIENT"]
    assert run.waiting(1) == set()
    assert run.end() == []


@PORTS
def test_who_answers_for_a_host_outside_later_has_its_relation(port: str) -> None:
    """As the server saw it; the caller has counted its call. From then on calls to it wait."""
    run = Run()
    host = OUTSIDE | {"server.port": port}
    run.batch([called("c", service="shop", name="call", attributes=host)])
    late = run.batch([served("s", "c", service="pay", name="POST /pay")])
    assert brief(late) == ["shop > pay/POST /pay SERVER"]
    assert run.hosts.answering == {f"api.pay.org:{port}"}
    assert run.batch([called("c", trace_id="2", service="shop", attributes=host)]) == []
    answer = run.batch([served("s", "c", trace_id="2", service="pay", name="POST /pay")])
    assert brief(answer) == ["shop > pay/POST /pay CLIENT", "shop > pay/POST /pay SERVER"]
    assert run.end() == []


def test_who_answers_in_the_same_batch_is_who_was_called() -> None:
    """A service of the system may have a public name."""
    run = Run()
    pair = [
        called("c", service="shop", attributes=OUTSIDE),
        served("s", "c", service="pay", name="POST /pay"),
    ]
    expected = ["shop > pay/POST /pay CLIENT", "shop > pay/POST /pay SERVER"]
    assert brief(run.batch(pair)) == expected
    assert run.end() == []


LEGACY = {"server.address": "legacy", "server.port": "8080"}
PRIVATE = {"server.address": "10.0.0.7", "server.port": "9000"}


def legacy(trace: int, attributes: Span = LEGACY) -> Span:
    """A call to a host that is not public."""
    return called("c", trace_id=f"t{trace}", attributes=attributes)


def answer(trace: int) -> Span:
    """Who serves that call."""
    return served("s", "c", trace_id=f"t{trace}", service="old", name="GET /")


def silenced(*places: Span) -> Run:
    """A run of four batches in which nobody has answered calls to these; none waits any more."""
    run = Run(window=1)
    for number in range(3):
        run.batch([legacy(10 * place + number, to) for place, to in enumerate(places)])
    run.batch([])
    return run


@pytest.mark.parametrize(
    ("attributes", "place"),
    [
        (LEGACY, "legacy:8080"),
        (PRIVATE, "10.0.0.7:9000"),
        ({"server.address": "crm.internal"}, "crm.internal"),
        (FAR, "far"),
    ],
)
def test_only_the_first_calls_to_who_never_answers_wait(attributes: Span, place: str) -> None:
    """Once calls were given up in three batches, the next count at once; each counts once."""
    run = Run(window=1)
    given_up = f"shop > {place}/op c CLIENT"
    assert run.batch([legacy(1, attributes), legacy(2, attributes)]) == []
    assert brief(run.batch([legacy(3, attributes)])) == [given_up] * 2
    assert brief(run.batch([legacy(4, attributes)])) == [given_up]
    assert brief(run.batch([legacy(5, attributes)])) == [given_up]
    assert run.waiting(4) == {"c"}
    assert brief(run.batch([legacy(6, attributes)])) == [given_up] * 2
    assert run.waiting(5) == set()
    assert brief(run.batch([legacy(7, attributes)])) == [given_up]
    assert run.batch([]) == []
    assert not run.lost


def test_who_answers_after_all_has_its_relation_and_is_waited_for() -> None:
    """The caller has counted its call for the host, once; the next one for who answers it."""
    run = silenced(LEGACY)
    assert brief(run.batch([legacy(4)])) == ["shop > legacy:8080/op c CLIENT"]
    assert brief(run.batch([answer(4)])) == ["shop > old/GET / SERVER"]
    assert run.batch([legacy(5)]) == []
    both = ["shop > old/GET / CLIENT", "shop > old/GET / SERVER"]
    assert brief(run.batch([answer(5)])) == both
    for number in range(9, 14):  # it stays so, though nobody answers again
        run.batch([legacy(number)])
        assert run.waiting(number) == {"c"}


def test_who_answers_in_the_same_batch_is_right_at_once() -> None:
    """Though the host was silent until then."""
    run = silenced(LEGACY)
    both = ["shop > old/GET / CLIENT", "shop > old/GET / SERVER"]
    assert brief(run.batch([legacy(4), answer(4)])) == both
    assert run.batch([legacy(5)]) == []
    assert run.waiting(6) == {"c"}


def test_a_service_that_answers_some_calls_is_waited_for() -> None:
    """An answer between calls that are given up, or in the same batch, begins the count anew."""
    run = Run(window=1)
    for trace in range(1, 7):
        run.batch([legacy(trace)])
        run.batch([legacy(100 + trace), answer(100 + trace)] if trace % 2 else [])
    for trace in range(7, 12):
        run.batch([legacy(trace), legacy(100 + trace), answer(100 + trace)])
    run.batch([legacy(12)])
    run.batch([legacy(13)])
    # So far those of two batches were given up with no answer in between, and now the third.
    assert brief(run.batch([legacy(14)])) == ["shop > legacy:8080/op c CLIENT"]
    assert brief(run.batch([legacy(15)])) == ["shop > legacy:8080/op c CLIENT"] * 2


def test_silent_hosts_are_told_apart() -> None:
    """One that answers makes calls to it wait, not those to others."""
    run = silenced(LEGACY, PRIVATE)
    run.batch([legacy(4), legacy(14, PRIVATE)])
    run.batch([answer(4)])
    third = LEGACY | {"server.port": "8081"}
    calls = [legacy(5), legacy(15, PRIVATE), legacy(25, third)]
    assert brief(run.batch(calls)) == ["shop > 10.0.0.7:9000/op c CLIENT"]


def test_so_many_silent_hosts_are_remembered() -> None:
    """Of more the oldest is forgotten; one with an endless name is not remembered."""
    names = [f"h{number:05}" for number in range(MOST_HOSTS)]
    hosts = KnownHosts()
    for _ in range(3):
        hosts = hosts.after((), [*names, "x" * 254])
    assert all(map(hosts.is_silent, names))
    assert not hosts.is_silent("x" * 254)
    for _ in range(3):
        hosts = hosts.after((), ["new"])
    assert hosts.is_silent("new")
    assert not hosts.is_silent(names[0])
    assert len(hosts.unanswered) == MOST_HOSTS


@pytest.mark.parametrize(
    ("place", "outside"),
    [
        ("api.stripe.com:443", True),
        ("api.stripe.com", True),
        ("hooks.slack.com:80", True),
        ("93.184.216.34:443", True),
        ("[2606:2800:220:1::1]:443", True),
        ("smtp.mail.de:587", True),
        ("grpc.partner.io:50051", True),
        ("partner.io:50051", True),
        ("93.184.216.34:9000", True),
        ("orders:8080", False),
        ("orders.shop:8080", False),
        ("orders.shop.svc.cluster.local:80", False),
        ("payments.internal:443", False),
        ("localhost:443", False),
        ("10.0.0.7:443", False),
        ("10.0.0.7:50051", False),
        ("orders.shop.svc:50051", False),
        ("[::1]:443", False),
        ("payments.test:443", False),
        ("bank.example:443", True),
        ("api.example.com:50051", True),
        (f"{'a' * 60}.{'b' * 60}.{'c' * 60}.{'d' * 66}.org", True),
        (f"{'a' * 60}.{'b' * 60}.{'c' * 60}.{'d' * 67}.org", False),
        ("far", False),
        ("", False),
    ],
)
def test_which_hosts_are_outside(place: str, outside: bool) -> None:
    """Those with a public name or address; `orders.shop` at a port is a service of Kubernetes."""
    assert is_outside(place) == outside
