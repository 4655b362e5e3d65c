"""The oracle's language, conditions, entities and buckets, against figures worked by hand."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from tests.oracle.catalog import Row, bucket_of, entity_of
from tests.oracle.kit import NOON, b64, condition, service, value_of
from tests.oracle.metrics import expected_metrics
from tests.oracle.rows import holds, value_at
from tests.oracle.script import Condition, Field, Step, read_script

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
