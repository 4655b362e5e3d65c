"""The oracle of the metrics, against figures worked by hand."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from tests.oracle.catalog import Row, load_catalog
from tests.oracle.entities import bucket_of, entity_of
from tests.oracle.functions import Value, truncated
from tests.oracle.generate import random_events, random_spans, write_segments
from tests.oracle.metrics import expected_metrics
from tests.oracle.rows import holds, value_at
from tests.oracle.script import Condition, Field, Step, read_script
from tests.oracle.spans import spans_to_events
from tests.oracle.topn import Runs, expected_topn, normalise

NOON = datetime(2026, 3, 1, 12, 0, 30, tzinfo=UTC)


def service(**fields: Any) -> Row:
    """A row of Service."""
    return {"time": NOON, "name": "a", "layer": "GENERAL", **fields}


def services(field: str, values: Sequence[Any]) -> list[Row]:
    """Rows of Service that differ in one field."""
    return [service(**{field: value}) for value in values]


def values_of(
    formula: str,
    rows: list[Row],
    grain: str = "minute",
    source: str = "Service",
    thresholds: Mapping[str, int] | None = None,
) -> list[Value]:
    """A metric's values of one grain."""
    expected = expected_metrics(f"m = {formula};", {source: rows}, thresholds or {})
    return [value for key, value in expected.items() if key[1] == grain]


def value_of(formula: str, rows: list[Row], **options: Any) -> Value:
    """A metric's only value of one grain."""
    (value,) = values_of(formula, rows, **options)
    return value


def condition(text: str) -> Condition:
    """A condition, read from its text."""
    (metric,) = read_script(f"m = from(Service.*).filter({text}).count();")
    (found,) = metric.filters
    return found


def b64(name: str) -> str:
    """A name as ids hold it."""
    return base64.b64encode(name.encode()).decode()


# The language


def test_a_metric_is_read_whole() -> None:
    """Casts, nested paths, map keys, filters, arguments and the decorator are all there."""
    (metric,) = read_script(
        """
        // one // comment
        m_1 = from((str->long)K8SService.write.l4["a.b"]) /* a; "b" */
            .filter(detectPoint == DetectPoint.CLIENT).filter( (int)tag["x//y"] >= 5)
            .histogram(100 , 20).decorator("K8SServiceDecorator")
        """
    )
    assert (metric.name, metric.source) == ("m_1", "K8SService")
    assert metric.field == Field((Step("write"), Step("l4", "a.b")), "str->long")
    assert metric.filters == (
        Condition(Field((Step("detectPoint"),)), "==", "CLIENT"),
        Condition(Field((Step("tag", "x//y"),), "int"), ">=", 5),
    )
    assert (metric.function, metric.arguments) == ("histogram", (100, 20))
    assert metric.decorator == "K8SServiceDecorator"


def test_arguments_are_conditions_fields_and_literals() -> None:
    """A function's argument is told by its own tokens."""
    rate, average, apdex = read_script(
        """
        a = from(S.*).rate(x in ["p,q", "r"], tags not contain "in");
        b = from(S.*).labelAvg(h.c, (long)v);
        c = from(S.latency).apdex(name, status)
        """
    )
    assert rate.arguments == (
        Condition(Field((Step("x"),)), "in", ("p,q", "r")),
        Condition(Field((Step("tags"),)), "not contain", "in"),
    )
    assert average.arguments == (
        Field((Step("h"), Step("c"))),
        Field((Step("v"),), "long"),
    )
    assert apdex.arguments == (Field((Step("name"),)), Field((Step("status"),)))


def test_a_disabled_metric_is_none() -> None:
    """`disable` removes a metric, whether it stands before or after it."""
    text = "disable(b); a = from(S.*).cpm(); b = from(S.*).cpm(); c = from(S.*).cpm(); disable(c)"
    assert [metric.name for metric in read_script(text)] == ["a"]


def test_a_field_named_like_a_cast_is_a_field() -> None:
    """The brackets of a call are no cast."""
    (metric,) = read_script("m = from(S.*).labelCount(long);")
    assert metric.arguments == (Field((Step("long"),)),)


# Rows


@pytest.mark.parametrize(
    ("text", "row", "met"),
    [
        ("status == true", {"status": True}, True),
        ("status != true", {"status": None}, False),
        ("status == null", {"status": None}, True),
        ("status != null", {"status": False}, True),
        ("tag == null", {}, True),
        ('tag["k"] == null', {"tag": {}}, True),
        ('tag["k"] != null', {"tag": None}, False),
        ("latency > 10", {"latency": 10}, False),
        ("latency >= 10", {"latency": 10}, True),
        ("latency < 10", {"latency": None}, False),
        ("latency <= 10", {"latency": -1}, True),
        ("latency in [1, 2]", {"latency": 2}, True),
        ('name in ["1", "2"]', {"name": "3"}, False),
        ("type in [RequestType.HTTP, RequestType.RPC]", {"type": "RPC"}, True),
        ('name like "%x"', {"name": "ax"}, True),
        ('name like "%x"', {"name": "xa"}, False),
        ('name like "x%"', {"name": "xa"}, True),
        ('name like "%x%"', {"name": "axa"}, True),
        ('name like "x"', {"name": "x"}, False),
        ('name like "a%b%"', {"name": "a%bc"}, True),
        ('name like "%"', {"name": None}, False),
        ('tags contain "a:1"', {"tags": ["a:1"]}, True),
        ('tags contain "a"', {"tags": ["a:1"]}, False),
        ('tags not contain "a"', {"tags": []}, True),
        ('tags contain "a"', {"tags": None}, False),
        ('tags not contain "a"', {"tags": None}, False),
        ('(str->long)tag["k"] > 5', {"tag": {"k": "6"}}, True),
        ('(str->long)tag["k"] > 5', {"tag": {"k": "six"}}, False),
        ('(str->long)tag["k"] == null', {"tag": {"k": "six"}}, True),
        ("sideCar.internalErrorCode == null", {"sideCar": None}, True),
    ],
)
def test_conditions(text: str, row: Row, met: bool) -> None:
    """A condition holds or not; null is met by `== null` alone."""
    assert holds(row, condition(text)) is met


@pytest.mark.parametrize(
    ("cast", "given", "result"),
    [
        ("str->long", "12", 12),
        ("str->long", "-12", -12),
        ("str->long", "+12", 12),
        ("str->long", "", None),
        ("str->long", " 12", None),
        ("str->long", "1.5", None),
        ("str->long", "1_000", None),
        ("str->long", "٣", None),
        ("str->long", "9223372036854775807", 2**63 - 1),
        ("str->long", "9223372036854775808", None),
        ("str->int", "2147483648", None),
        ("int", -1.9, -1),
        ("long", 7, 7),
        ("long", None, None),
    ],
)
def test_casts(cast: str, given: Any, result: int | None) -> None:
    """A text that is no integer of that width is null; a fraction is cut toward zero."""
    assert value_at({"x": given}, Field((Step("x"),), cast)) == result


def test_a_field_named_time_is_not_the_time_of_the_row() -> None:
    """The path `time` reads the column `time_`."""
    rows = [{"time": NOON, "id": "i", "time_": 5, "phase": "NEW"}]
    source = "ServiceInstanceJVMGC"
    assert value_of(f"from({source}.time).sum()", rows, source=source) == 5


# Entities and buckets


def test_service_ids() -> None:
    """base64 of the name, and 1 where the layer is a normal one."""
    assert entity_of("Service", service(name="a")) == "YQ==.1"
    assert entity_of("Service", service(layer="MESH")) == "YQ==.1"
    assert entity_of("Service", service(layer="UNDEFINED")) == "YQ==.0"
    assert entity_of("Service", service(layer="VIRTUAL_MQ")) == "YQ==.0"
    assert entity_of("Service", service(name="ß")) == "w58=.1"
    assert entity_of("DatabaseAccess", {"name": "a"}) == "YQ==.0"
    assert entity_of("BrowserAppPerf", {"name": "a", "layer": "UNDEFINED"}) == "YQ==.1"


def test_blank_names() -> None:
    """A service without a name is `_blank`, judged once the name is cut; others stay empty."""
    for name in (None, "", "  "):
        assert entity_of("Service", service(name=name)) == "X2JsYW5r.1"
    row = {"name": "", "serviceName": "a", "serviceLayer": "GENERAL"}
    assert entity_of("Endpoint", row) == "YQ==.1_"
    assert entity_of("Service", service(name=" " * 70 + "x")) == "X2JsYW5r.1"


def test_names_are_cut() -> None:
    """Services and instances at 70 characters, endpoints at 150; characters, not bytes."""
    long = "é" * 200
    row = {"name": long, "serviceName": long, "serviceLayer": "GENERAL"}
    cut70, cut150 = b64("é" * 70), b64("é" * 150)
    assert entity_of("Service", service(name=long)) == f"{cut70}.1"
    assert entity_of("ServiceInstance", row) == f"{cut70}.1_{cut70}"
    assert entity_of("Endpoint", row) == f"{cut70}.1_{cut150}"


def test_relation_ids() -> None:
    """Both sides joined by a dash; an endpoint relation has a dash before each endpoint too."""
    row = {
        "sourceServiceName": "a",
        "sourceLayer": "UNDEFINED",
        "sourceServiceLayer": "UNDEFINED",
        "sourceServiceInstanceName": "i",
        "destServiceName": "b",
        "destLayer": "GENERAL",
        "destServiceLayer": "GENERAL",
        "destServiceInstanceName": "j",
    }
    assert entity_of("ServiceRelation", row) == "YQ==.0-Yg==.1"
    assert entity_of("ServiceInstanceRelation", row) == "YQ==.0_aQ==-Yg==.1_ag=="
    row = {
        "serviceName": "a",
        "serviceLayer": "GENERAL",
        "endpoint": "i",
        "childServiceName": "b",
        "childServiceLayer": "GENERAL",
        "childEndpoint": "j",
    }
    assert entity_of("EndpointRelation", row) == "YQ==.1-aQ==-Yg==.1-ag=="


def test_given_ids() -> None:
    """Some sources bring their id."""
    assert entity_of("ServiceInstanceJVMCPU", {"id": "x y"}) == "x y"


def test_buckets_are_in_utc() -> None:
    """Half past midnight in Berlin's summer is still yesterday."""
    late = datetime(2026, 7, 1, 0, 30, tzinfo=timezone(timedelta(hours=2)))
    assert bucket_of(late, "minute") == 202606302230
    assert bucket_of(late, "hour") == 2026063022
    assert bucket_of(late, "day") == 20260630


def test_late_rows_go_to_their_own_bucket() -> None:
    """A row that comes last but happened first counts where it happened."""
    rows = [service(), service(time=NOON - timedelta(days=6)), service()]
    expected = expected_metrics("m = from(Service.*).count();", {"Service": rows})
    assert expected["m", "day", 20260301, "YQ==.1"] == 2
    assert expected["m", "day", 20260223, "YQ==.1"] == 1


# Functions


def test_truncation() -> None:
    """Integer division goes toward zero."""
    assert [truncated(n, 2) for n in (7, -7, 6, -6, 0)] == [3, -3, 3, -3, 0]


@pytest.mark.parametrize(
    ("formula", "values", "result"),
    [
        ("longAvg()", [5, 2, None], 3),
        ("longAvg()", [-5, -2], -3),
        ("doubleAvg()", [5, 2], 3.5),
        # In doubles added one by one the 1 is lost: 1e16 + 1 = 1e16.
        ("doubleAvg()", [1e16, 1.0, -1e16], 1 / 3),
        ("sum()", [1e16, 1.0, -1e16, None], 1.0),
        ("sum()", [2**62, 2**62, -1], 2**63 - 1),
        ("max()", [-3, -1], 0),
        ("max()", [-3, 4, None], 4),
        ("maxDouble()", [-0.5], 0.0),
        ("maxDouble()", [0.25, 1.5], 1.5),
        ("min()", [-3, 4, None], -3),
        ("minDouble()", [0.25, 1.5], 0.25),
        ("count()", [1, None, 3], 3),
        ("percent(latency > 1)", [1, 2, 3], 6666),
        ("percent(latency != 1)", [1, None, 3], 3333),
        ("rate(latency > 1, latency > 2)", [1, 2, 3], 20000),
        ("rate(latency > 1, latency > 9)", [1, 2, 3], 0),
    ],
)
def test_plain_functions(formula: str, values: list[Any], result: Value) -> None:
    """One number per bucket, nulls left out where the value is measured."""
    value = value_of(f"from(Service.latency).{formula}", services("latency", values))
    assert (value, type(value)) == (result, type(result))


def test_cpm_is_per_minute_of_the_bucket() -> None:
    """61 calls of one minute: 61 a minute, 61 / 60 = 1, 61 / 1440 = 0."""
    rows = [service()] * 61
    formula = "from(Service.*).cpm()"
    assert [value_of(formula, rows, grain=g) for g in ("minute", "hour", "day")] == [61, 1, 0]


def test_an_hour_is_no_average_of_averages() -> None:
    """10 in one minute, 1, 1, 1 in the next: 13 / 4 = 3, and not (10 + 1) / 2 = 5."""
    rows = services("latency", [10]) + services("latency", [1, 1, 1])
    rows[0]["time"] = NOON + timedelta(minutes=1)
    formula = "from(Service.latency).longAvg()"
    assert sorted(map(str, values_of(formula, rows))) == ["1", "10"]
    assert value_of(formula, rows, grain="hour") == 3


def test_apdex() -> None:
    """At T satisfied, up to 4T tolerated; failed ones count, and so do those of no status."""
    figures = [(500, True), (501, True), (2000, True), (2001, True), (1, False), (1, None)]
    rows = [service(latency=latency, status=status) for latency, status in figures]
    # 1 satisfied, 2 tolerated of 6: (10000 + 20000 / 2) / 6 = 3333.3
    assert value_of("from(Service.latency).apdex(name, status)", rows) == 3333


def test_apdex_threshold_of_a_service() -> None:
    """T is the service's own where it has one: 100 is satisfied, 400 tolerated, 401 neither."""
    rows = [service(latency=latency, status=True) for latency in (100, 400, 401)]
    formula = "from(Service.latency).apdex(name, status)"
    # 1 satisfied, 1 tolerated of 3: (10000 + 5000) / 3
    assert value_of(formula, rows, thresholds={"a": 100, "b": 1}) == 5000


def test_percentile_roofs_round_half_up() -> None:
    """Six values: roofs 3, 4.5 → 5, 5.4 → 5, 5.7 → 6, 5.94 → 6."""
    rows = services("latency", [6, 1, 5, 2, 4, 3, None])
    assert value_of("from(Service.latency).percentile2(1)", rows) == {
        "{p=50}": 3,
        "{p=75}": 5,
        "{p=90}": 5,
        "{p=95}": 6,
        "{p=99}": 6,
    }


def test_percentile_of_one_value() -> None:
    """The roof of 0.5 is 1, and so one value is every percentile; below the precision it is 0."""
    rows = services("latency", [9])
    old = value_of("from(Service.latency).percentile(10)", rows)
    assert old == {"0": 0, "1": 0, "2": 0, "3": 0, "4": 0}
    new = value_of("from(Service.latency).percentile2(2)", rows)
    assert isinstance(new, dict)
    assert set(new.values()) == {8}


def test_percentile_gives_floors() -> None:
    """Buckets 0, 1, 2, 3 of ten; roofs 2, 3, 3.6 → 4, 3.8 → 4, 3.96 → 4."""
    rows = services("latency", [30, 29, 14, 5])
    old = value_of("from(Service.latency).percentile(10)", rows)
    assert old == {"0": 10, "1": 20, "2": 30, "3": 30, "4": 30}


def test_percentile_of_negative_values_truncates() -> None:
    """-15 / 10 is -1, as in Java, and its floor reads -10."""
    value = value_of("from(Service.latency).percentile2(10)", services("latency", [-15]))
    assert isinstance(value, dict)
    assert set(value.values()) == {-10}


def test_histogram_has_its_empty_buckets_and_an_open_last_one() -> None:
    """Keys are lower edges; what is beyond falls into the last, what is below 0 into the first."""
    rows = services("latency", [0, 99, 100, 350, 10**6, -5, None])
    value = value_of("from(Service.latency).histogram(100, 3)", rows)
    assert value == {"0": 3, "100": 1, "200": 0, "300": 2}


def test_label_count() -> None:
    """Each label with its count; a row without the label is none."""
    rows = services("httpResponseStatusCode", [200, 404, 200, None])
    value = value_of("from(Service.*).labelCount(httpResponseStatusCode)", rows)
    assert value == {"{n=200}": 2, "{n=404}": 1}


def test_label_count_keeps_the_most_frequent() -> None:
    """Beyond the cap the highest counts stay, and of equal ones the smaller name."""
    rows = services("tlsMode", ["c", "b", "a", "b"])
    assert value_of("from(Service.*).labelCount(tlsMode, 2)", rows) == {"{n=b}": 2, "{n=a}": 1}


def test_label_avg() -> None:
    """1 where 0 < sum < count; otherwise the quotient, toward zero."""
    figures: dict[str, list[int | None]] = {
        "a": [0, 1, 0],
        "b": [5, 2],
        "c": [0, 0],
        "d": [-7, 0],
        "e": [None],
    }
    rows = [
        service(tlsMode=label, latency=value) for label in figures for value in figures[label]
    ] + [service(latency=100)]
    value = value_of("from(Service.*).labelAvg(tlsMode, latency)", rows)
    assert value == {"{n=a}": 1, "{n=b}": 3, "{n=c}": 0, "{n=d}": -3}


def test_label_avg_is_capped_at_50() -> None:
    """Of 51 labels with one row each, but the last with two, the last but one goes."""
    labels = [f"l{number:02}" for number in range(51)] + ["l50"]
    rows = [service(tlsMode=label, latency=7) for label in labels]
    value = value_of("from(Service.*).labelAvg(tlsMode, latency)", rows)
    assert isinstance(value, dict)
    assert set(value) == {f"{{n={label}}}" for label in labels} - {"{n=l49}"}


@pytest.mark.parametrize(
    "formula",
    [
        "from(Service.latency).longAvg()",
        "from(Service.latency).percentile2(1)",
        "from(Service.latency).histogram(1, 2)",
        "from(Service.*).labelCount(tlsMode)",
        "from(Service.*).labelAvg(tlsMode, latency)",
        "from(Service.*).filter(latency == 1).cpm()",
    ],
)
def test_nothing_measured_is_no_value(formula: str) -> None:
    """Where no row passes, or none has the value, there is no value and not 0."""
    assert values_of(formula, [service(latency=None)]) == []


def test_filters_are_anded() -> None:
    """Every filter of a chain must hold."""
    rows = [service(latency=latency) for latency in (1, 5, 9)]
    assert value_of("from(Service.*).filter(latency > 1).filter(latency < 9).count()", rows) == 1


def test_a_cast_in_from() -> None:
    """Texts are measured as the numbers that they are, others not at all."""
    rows = services("tag", [{"t": "7"}, {"t": "x"}, {"t": "-2"}, {}, None])
    assert value_of('from((str->long)Service.tag["t"]).longAvg()', rows) == 2


# Spans


def span(span_id: str, kind: str, svc: str | None = "a", **fields: Any) -> Row:
    """A span of 10 ms, unless told."""
    elapsed = timedelta(milliseconds=fields.pop("ms", 10))
    base = {
        "trace_id": "t",
        "span_id": span_id,
        "parent_span_id": None,
        "name": f"n{span_id}",
        "kind": kind,
        "time": NOON,
        "status": "UNSET",
        "service": svc,
        "resource": {},
        "attributes": {},
    } | fields
    return {"end_time": base["time"] + elapsed, **base}


def rows_of(spans: list[Row], source: str, *fields: str) -> list[tuple[Any, ...]]:
    """These fields of the rows of a source that spans give."""
    rows = spans_to_events(spans).events.get(source, [])
    return [tuple(row[field] for field in fields) for row in rows]


RELATION = (
    "sourceServiceName",
    "sourceLayer",
    "destServiceName",
    "destLayer",
    "endpoint",
    "detectPoint",
)


def test_a_server_span() -> None:
    """It gives a Service, its instance and its endpoint, and a relation from the user."""
    attributes = {"http.status_code": "503", "a": "1"}
    resource = {"host.name": "h"}
    spans = [span("1", "SERVER", attributes=attributes, resource=resource, status="ERROR", ms=1.9)]
    outcome = ("latency", "status", "httpResponseStatusCode", "type", "tags", "time")
    expected = (1, False, 503, "HTTP", ["a:1", "http.status_code:503"], NOON)
    assert rows_of(spans, "Service", "name", *outcome) == [("a", *expected)]
    assert rows_of(spans, "ServiceInstance", "name", *outcome) == [("h", *expected)]
    assert rows_of(spans, "Endpoint", "name", *outcome) == [("n1", *expected)]
    user = ("User", "UNDEFINED", "a", "GENERAL", "n1", "SERVER")
    assert rows_of(spans, "ServiceRelation", *RELATION) == [user]
    assert rows_of(spans, "EndpointRelation", "endpoint") == []


def test_a_clock_that_goes_back_gives_no_latency() -> None:
    """Latency is never below 0."""
    assert rows_of([span("1", "SERVER", ms=-5)], "Service", "latency") == [(0,)]


def test_a_span_of_no_service() -> None:
    """No service name, or a blank one, is unknown_service; its instance bears the name too."""
    spans = [span("1", "SERVER", None), span("2", "SERVER", " ")]
    names = rows_of(spans, "Service", "name", "serviceInstanceName")
    assert names == [("unknown_service", "unknown_service")] * 2


def test_a_call_is_seen_from_both_sides() -> None:
    """The client's span finds the child, the server's span the parent."""
    spans = [
        span("1", "CLIENT", attributes={"peer.service": "p"}),
        span("2", "SERVER", "b", parent_span_id="1", ms=4),
    ]
    assert rows_of(spans, "ServiceRelation", *RELATION, "latency") == [
        ("a", "GENERAL", "b", "GENERAL", "n2", "CLIENT", 10),
        ("a", "GENERAL", "b", "GENERAL", "n2", "SERVER", 4),
    ]
    endpoints = ("serviceName", "endpoint", "childServiceName", "childEndpoint", "rpcLatency")
    assert rows_of(spans, "EndpointRelation", *endpoints) == [("a", "n1", "b", "n2", 4)]


def test_every_foreign_child_is_a_destination() -> None:
    """All that answer, whenever they started; those of the own service and other traces do not."""
    later = NOON + timedelta(microseconds=1)
    spans = [
        span("1", "PRODUCER", attributes={"peer.service": "p"}, ms=7),
        span("2", "SERVER", "a", parent_span_id="1"),
        span("3", "SERVER", "late", parent_span_id="1", time=later),
        span("4", "CONSUMER", "b", parent_span_id="1"),
        span("5", "CONSUMER", "b", parent_span_id="1"),
        span("6", "INTERNAL", "c", parent_span_id="1"),
        span("7", "SERVER", "other trace", parent_span_id="1", trace_id="u"),
    ]
    fields = ("detectPoint", "destServiceName", "endpoint", "latency", "time")
    relations = rows_of(spans, "ServiceRelation", *fields)
    assert [row for row in relations if row[0] == "CLIENT"] == [
        ("CLIENT", "late", "n3", 7, NOON),
        ("CLIENT", "b", "n4", 7, NOON),
        ("CLIENT", "b", "n5", 7, NOON),
    ]


def test_spans_delivered_twice() -> None:
    """A pair counts as often as its child was delivered, a call without one as often as itself."""
    call, alone = (span(each, "CLIENT", attributes={"peer.service": "p"}) for each in "13")
    child = span("2", "SERVER", "b", parent_span_id="1")
    spans = [call, child, alone, call, child, alone, span("4", "CLIENT"), span("4", "CLIENT")]
    relations = rows_of(spans, "ServiceRelation", "detectPoint", "destServiceName")
    assert Counter(relations) == {("CLIENT", "b"): 2, ("SERVER", "b"): 2, ("CLIENT", "p"): 2}
    assert spans_to_events(spans).counters["unresolved_destination"] == 2


@pytest.mark.parametrize(
    ("attributes", "name", "layer"),
    [
        ({"peer.service": "p", "server.address": "s"}, "p", "GENERAL"),
        ({"server.address": "s", "server.port": "1"}, "s", "UNDEFINED"),
        ({"peer.service": "p", "db.system": "mysql"}, "p", "VIRTUAL_DATABASE"),
        ({"server.address": "s", "db.system.name": "redis"}, "s", "VIRTUAL_CACHE"),
        ({"server.address": "s", "messaging.system": "kafka"}, "s", "VIRTUAL_MQ"),
        ({"server.address": "s", "gen_ai.system": "x"}, "s", "VIRTUAL_GENAI"),
    ],
)
def test_destinations_by_attribute(attributes: dict[str, str], name: str, layer: str) -> None:
    """Without a child the attributes name the destination, and the kind of work its layer."""
    spans = [span("1", "CLIENT", attributes=attributes)]
    relation = ("a", "GENERAL", name, layer, "n1", "CLIENT")
    assert rows_of(spans, "ServiceRelation", *RELATION) == [relation]
    assert rows_of(spans, "ServiceInstanceRelation", "destServiceInstanceName") == [(name,)]


def test_what_cannot_be_resolved_is_counted() -> None:
    """A parent that never came, a call to nobody known; a caller of the same service is neither."""
    spans = [
        span("1", "SERVER", parent_span_id="lost"),
        span("2", "CLIENT", parent_span_id="1"),
        span("3", "SERVER", parent_span_id="2"),
        span("4", "INTERNAL"),
    ]
    events, counters = spans_to_events(spans)
    assert set(events) == {"Service", "ServiceInstance", "Endpoint"}
    assert counters == {"unresolved_parent": 1, "unresolved_destination": 1, "unresolved": 2}


@pytest.mark.parametrize(
    ("attributes", "name"),
    [
        ({"peer.service": "p", "server.address": "s"}, "p"),
        ({"server.address": "s", "server.port": "1", "db.name": "d"}, "s:1"),
        ({"server.address": "s"}, "s"),
        ({"db.namespace": "n", "db.name": "d"}, "n"),
        ({"db.name": "d"}, "d"),
        ({}, "mysql"),
    ],
)
def test_database_names(attributes: dict[str, str], name: str) -> None:
    """A database is named by the peer, its address, its own name, or its system."""
    spans = [span("1", "CLIENT", attributes={"db.system": "mysql", **attributes})]
    assert rows_of(spans, "DatabaseAccess", "name", "latency", "status") == [(name, 10, True)]


@pytest.mark.parametrize(
    ("attributes", "operation"),
    [
        ({"db.operation.name": "get", "db.statement": "SET k"}, "Read"),
        ({"db.operation": "HSET"}, "Write"),
        ({"db.query.text": "  lrange l 0 1"}, "Read"),
        ({"db.statement": "PING"}, "Others"),
        ({}, "Write"),
    ],
)
def test_cache_operations(attributes: dict[str, str], operation: str) -> None:
    """The command's first word tells, in capitals; the span's name is the last resort."""
    cache = {"db.system": "redis", **attributes}
    spans = [span("1", "CLIENT", attributes=cache, name="del k")]
    assert rows_of(spans, "CacheAccess", "name", "operation") == [("redis", operation)]
    assert rows_of(spans, "DatabaseAccess") == []


def test_messaging() -> None:
    """Producing takes no transmission; consuming does."""
    queue = {"messaging.system": "kafka", "messaging.destination.name": "d"}
    spans = [
        span("1", "PRODUCER", attributes=queue),
        span("2", "CONSUMER", attributes={"messaging.system": "kafka", "server.address": "s"}),
        span("3", "SERVER", attributes=queue),
    ]
    access = ("operation", "transmissionLatency")
    produced, consumed = ("Produce", 0), ("Consume", 10)
    assert rows_of(spans, "MQAccess", "name", *access) == [("kafka", *produced), ("s", *consumed)]
    assert rows_of(spans, "MQEndpointAccess", "serviceName", "endpoint", *access) == [
        ("kafka", "d", *produced),
        ("s", "n2", *consumed),
    ]


def test_gen_ai() -> None:
    """Provider and model by their newer keys first; tokens that are no number are none."""
    attributes = {
        "gen_ai.system": "old",
        "gen_ai.request.model": "m",
        "gen_ai.usage.input_tokens": "12",
        "gen_ai.usage.output_tokens": "many",
        "db.system": "mysql",
    }
    spans = [span("1", "CLIENT", attributes=attributes)]
    tokens = ("inputTokens", "outputTokens", "totalEstimatedCost")
    assert rows_of(spans, "GenAIProviderAccess", "name", *tokens) == [("old", 12, 0, 0)]
    model = ("serviceName", "modelName", "timeToFirstToken", *tokens)
    assert rows_of(spans, "GenAIModelAccess", *model) == [("old", "m", None, 12, 0, 0)]
    assert len(rows_of(spans, "DatabaseAccess", "name")) == 1


@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        (["gen_ai.operation.name", "db.system", "messaging.system", "http.route"], "GenAI"),
        (["db.system.name", "messaging.system", "http.route"], "DATABASE"),
        (["messaging.system", "http.url"], "MQ"),
        (["url.full"], "HTTP"),
        (["rpc.system"], "RPC"),
    ],
)
def test_request_types(keys: list[str], kind: str) -> None:
    """Of several kinds of work the first of GenAI, DATABASE, MQ, HTTP is the type."""
    spans = [span("1", "SERVER", attributes=dict.fromkeys(keys, "x"))]
    assert rows_of(spans, "Service", "type") == [(kind,)]


# TopN


def query(span_id: str, ms: int, text: str = "select 1", system: str = "mysql", **more: Any) -> Row:
    """A client span that runs a statement."""
    attributes = {"db.system": system, "db.statement": text}
    return span(span_id, "CLIENT", ms=ms, attributes=attributes, **more)


def test_slow_is_strictly_above_the_threshold() -> None:
    """mysql has the default of 200, mongodb 100; each slow one is in two streams."""
    spans = [query("1", 200), query("2", 201), query("3", 101, system="mongodb")]
    found = expected_topn(spans)
    minute = {key[0::3]: top for key, top in found.items() if key[1] == "minute"}
    kept = {key: [record.latency for record in top.records] for key, top in minute.items()}
    assert kept == {
        ("top_n_database_statement", f"{b64('mysql')}.0"): [201],
        ("top_n_database_statement", f"{b64('mongodb')}.0"): [101],
        ("top_n_service_database_statement", "YQ==.1"): [201, 101],
    }


def test_cache_commands() -> None:
    """Reads and writes have streams of their own, others none; redis is slow above 10."""
    spans = [
        query("1", 11, "GET k", "redis"),
        query("2", 11, "SET k", "memcached"),
        query("3", 21, "SET k", "memcached"),
        query("4", 99, "PING", "redis"),
    ]
    found = expected_topn(spans)
    assert {(key[0], key[3]) for key in found} == {
        ("top_n_cache_read_command", f"{b64('redis')}.0"),
        ("top_n_cache_write_command", f"{b64('memcached')}.0"),
    }


def test_equal_latencies() -> None:
    """The earlier start wins, then the smaller trace id, then the smaller span id."""
    later = NOON + timedelta(seconds=1)
    spans = [
        query("1", 300, "late", time=later, trace_id="a"),
        query("3", 300, "second span", trace_id="b"),
        query("2", 300, "first span", trace_id="b"),
        query("4", 300, "first trace", trace_id="a"),
        query("5", 301, "slowest", time=later),
    ]
    top = expected_topn(spans, n=4)[
        "top_n_database_statement", "day", 20260301, f"{b64('mysql')}.0"
    ]
    texts = [record.statement for record in top.records]
    assert texts == ["slowest", "first trace", "first span", "second span"]


def test_runs_of_kept_statements() -> None:
    """All executions of a kept text count, slow or not; those of other texts do not."""
    spans = [
        query("1", 900, "select 1"),
        query("2", 300, "select  2"),
        query("3", 400, "delete"),
        query("4", 100, "select 3"),
    ]
    top = expected_topn(spans, n=1)[
        "top_n_database_statement", "hour", 2026030112, f"{b64('mysql')}.0"
    ]
    assert [record.latency for record in top.records] == [900]
    assert top.runs == {"select ?": Runs(3, 1300)}


def test_statements_are_cut() -> None:
    """A statement has at most 2000 characters; without one the span's name stands in."""
    spans = [query("1", 300, "ü" * 2001), query("2", 299, " ")]
    (top,) = (
        top
        for key, top in expected_topn(spans).items()
        if key[:2] == ("top_n_service_database_statement", "day")
    )
    assert [record.statement for record in top.records] == ["ü" * 2000, "n2"]


@pytest.mark.parametrize(
    ("statement", "text"),
    [
        ("SELECT  *\n FROM t2 where a = 12 ", "SELECT * FROM t2 where a = ?"),
        ("a = 'x''y' and b = '' and c=1.50", "a = ? and b = ? and c=?"),
        ("x IN (1, 'b',3) and y in ( ? )", "x IN (?) and y in (?)"),
        ("x in(1,2) and f(1, 2)", "x in (?) and f(?, ?)"),
        ("t_2024.c1 = -5", "t_2024.c1 = -?"),
    ],
)
def test_normalised_statements(statement: str, text: str) -> None:
    """Literals are question marks, lists of them one; letter case and names stay."""
    assert normalise(statement) == text


# Generators


def test_random_data_is_the_same_for_the_same_seed() -> None:
    """A seed is all that the data depends on."""
    assert random_spans(1, 300) == random_spans(1, 300)
    assert random_spans(1, 300) != random_spans(2, 300)
    assert random_events(1, ["Service"], 50) == random_events(1, ["Service"], 50)
    assert (
        random_events(1, ["Service"], 50)["Service"]
        == random_events(1, ["Endpoint", "Service"], 50)["Service"]
    )


def test_random_spans_have_it_all() -> None:
    """Every kind of row, every kind of destination, and everything that cannot be resolved."""
    spans = random_spans(3, 3000)
    assert len(spans) == 3000
    assert len({(row["trace_id"], row["span_id"]) for row in spans}) == 3000
    events, counters = spans_to_events(spans)
    assert len(events) == 12
    layers = {row["destLayer"] for row in events["ServiceRelation"]}
    assert len(layers) == 6
    assert all(counters.values())
    assert len({key[0] for key in expected_topn(spans)}) == 4
    assert {row["operation"] for row in events["CacheAccess"]} == {"Read", "Write", "Others"}


def test_random_events_of_every_source_have_entities() -> None:
    """Any source of the catalog can be had, over several days, with nulls but not of latency."""
    catalog = load_catalog()
    events = random_events(5, catalog.fields, 60)
    for source, rows in events.items():
        assert len(rows) == 60
        assert len({entity_of(source, row) for row in rows}) > 1
        assert len({bucket_of(row["time"], "day") for row in rows}) > 1
        assert [row["time"] for row in rows] != sorted(row["time"] for row in rows)
        assert all(row.get("latency", 0) is not None for row in rows)
    assert any(row["status"] is None for row in events["Service"])


def test_segments_hold_what_was_written(tmp_path: Path) -> None:
    """Rows come back from Parquet as they were, in whichever file."""
    pytest.importorskip("pyarrow")
    from tests.oracle.segments import read_segments

    events = random_events(7, load_catalog().fields, 20) | {"Span": random_spans(7, 100)}
    paths = write_segments(events, tmp_path, 3, 1)
    assert len(paths) == 3 * len(events)
    assert paths[0] == tmp_path / sorted(events)[0] / "0.parquet"
    back = read_segments(tmp_path)
    assert set(back) == set(events)
    for source, rows in events.items():
        assert Counter(map(_text, rows)) == Counter(map(_text, back[source]))


def _text(row: Row) -> str:
    times = {key: value.isoformat() for key, value in row.items() if isinstance(value, datetime)}
    return repr(sorted((row | times).items()))


def test_metrics_do_not_depend_on_the_order_of_rows() -> None:
    """The same rows the other way round give the same values."""
    script = """
        a = from(Service.latency).percentile2(1);
        b = from(Service.*).labelCount(tag["region"], 1);
        c = from(Service.latency).filter(status == true).doubleAvg();
        d = from(Service.latency).apdex(name, status);
    """
    rows = random_events(11, ["Service"], 400)["Service"]
    there = expected_metrics(script, {"Service": rows})
    assert there == expected_metrics(script, {"Service": rows[::-1]})
    assert {key[0] for key in there} == {"a", "b", "c", "d"}
