"""The catalog of event types, the ids of entities, and the buckets of time."""

from __future__ import annotations

import base64
import pickle
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmill import BatchmillError, ConfigError, sources
from batchmill.sources import Grain, UnknownNameError

moments = st.datetimes(
    datetime(1970, 1, 1), datetime(9999, 12, 30), timezones=st.sampled_from([UTC])
)
names = st.text(st.characters(codec="utf-8"), max_size=200)


def b64(text: str) -> str:
    """base64 of UTF-8."""
    return base64.b64encode(text.encode()).decode()


# The catalog


def test_every_event_type_is_there() -> None:
    """46 event types come with batchmill, with their enums and structs."""
    known = sources.builtin_catalog()
    assert (len(known.sources), len(known.enums), len(known.structs)) == (46, 8, 18)


def test_every_entity_rule_names_fields() -> None:
    """Each role of an entity is a field of its source, or a fixed layer."""
    wrong = [
        (source.name, role, name)
        for source in sources.catalog().sources.values()
        for role, name in source.entity.roles.items()
        if name not in source.fields and name not in ("=normal", "=virtual")
    ]
    assert wrong == []


def test_latency_is_required_wherever_it_is() -> None:
    """A row must have its latency; of endpoint relations, the rpcLatency."""
    for source in sources.builtin_catalog().sources.values():
        wanted = {"latency"} if "latency" in source.fields else set()
        if source.name == "EndpointRelation":
            wanted = {"rpcLatency"}
        assert set(source.required) == wanted


@pytest.mark.parametrize(
    ("source", "path", "notation"),
    [
        ("Service", "latency", "int"),
        ("Service", "tags", "list<string>"),
        ("Service", "tag", "map<string,string>"),
        ("Service", "type", "enum:RequestType"),
        ("Service", "layer", "layer"),
        ("Service", "sideCar", "struct:SideCar"),
        ("K8SService", "write.l4.duration", "long"),
        ("K8SServiceRelation", "componentIds", "list<int>"),
        ("ServiceInstanceJVMCPU", "usePercent", "double"),
    ],
)
def test_a_field_is_found_by_its_path(source: str, path: str, notation: str) -> None:
    """A path leads to a field, however deep, and its type reads as in the catalog."""
    assert str(sources.catalog().source(source).field(path).type) == notation


def test_a_field_called_time_has_another_column() -> None:
    """The column `time` is the event's start, so a field of that name is stored as time_."""
    gc = sources.catalog().source("ServiceInstanceJVMGC")
    assert (gc.fields["time"].column, gc.fields["count"].column) == ("time_", "count")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Servce", "did you mean Service"),
        ("endpoint", "did you mean Endpoint"),
        ("Zz", "there are"),
    ],
)
def test_an_unknown_source_is_answered_with_those_there_are(name: str, said: str) -> None:
    """Close names first, whatever their case, then a bounded list."""
    with pytest.raises(UnknownNameError, match=said) as caught:
        sources.catalog().source(name)
    assert isinstance(caught.value, LookupError)
    assert "more" in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_an_unknown_field_is_answered_with_those_there_are() -> None:
    """The message names the struct that lacks it, and its fields."""
    with pytest.raises(UnknownNameError, match=r"K8SService.write.l4.*did you mean duration"):
        sources.catalog().source("K8SService").field("write.l4.duratoin")


def test_a_catalog_travels() -> None:
    """Spark ships definitions between processes: they pickle, and stay equal."""
    known = sources.catalog()
    assert pickle.loads(pickle.dumps(known)) == known


def test_the_arrow_schema_has_time_and_every_column() -> None:
    """Files of an event type: its start in UTC, then its fields."""
    pa = pytest.importorskip("pyarrow")
    schema = sources.catalog().source("ServiceInstanceJVMGC").arrow_schema()
    assert schema.names == [
        "time",
        "id",
        "name",
        "serviceName",
        "serviceId",
        "phase",
        "time_",
        "count",
    ]
    assert schema.field("time").type == pa.timestamp("us", tz="UTC")
    assert schema.field("time_").type == pa.int64()
    service = sources.catalog().source("Service").arrow_schema()
    assert service.field("tag").type == pa.map_(pa.string(), pa.string())
    assert service.field("latency").type == pa.int32()


# Entity ids


@pytest.mark.parametrize(
    ("layer", "normal"),
    [
        ("GENERAL", True),
        ("MESH", True),
        ("UNDEFINED", False),
        ("VIRTUAL_DATABASE", False),
        ("VIRTUAL", True),
        (None, False),
    ],
)
def test_which_layers_are_normal(layer: str | None, normal: bool) -> None:
    """All are, but UNDEFINED and the VIRTUAL_ ones; no layer at all is as good as UNDEFINED."""
    assert sources.is_normal(layer) is normal


@pytest.mark.parametrize("blank", ["", "  \t", None, " " * 70 + "x"])
def test_a_service_without_a_name_is_called_blank(blank: str | None) -> None:
    """Nameless services share one id; what is left after the cut decides."""
    assert sources.service_id(blank, normal=False) == b64("_blank") + ".0"


def test_an_instance_or_endpoint_without_a_name_has_an_empty_one() -> None:
    """Only services are renamed."""
    service = sources.service_id("shop", normal=True)
    assert sources.instance_id(service, None) == sources.endpoint_id(service, "") == f"{service}_"
    assert sources.split_entity_id("instance", f"{service}_") == ("shop", "")


def test_long_names_are_cut() -> None:
    """At 70 characters, of endpoints at 150: characters, not bytes."""
    service = sources.service_id("ü" * 99, normal=True)
    assert service == b64("ü" * 70) + ".1"
    assert sources.instance_id(service, "i" * 99) == f"{service}_{b64('i' * 70)}"
    assert sources.endpoint_id(service, "e" * 199) == f"{service}_{b64('e' * 150)}"


SHOP, CART = b64("shop") + ".1", b64("cart") + ".0"
IDS: list[tuple[str, dict[str, Any], str, tuple[str, ...]]] = [
    ("Service", {"name": "shop", "layer": "GENERAL"}, SHOP, ("shop",)),
    ("DatabaseAccess", {"name": "cart"}, CART, ("cart",)),
    ("BrowserAppPerf", {"name": "shop"}, SHOP, ("shop",)),
    (
        "ServiceInstance",
        {"serviceName": "shop", "serviceLayer": "MESH", "name": "pod_1"},
        f"{SHOP}_{b64('pod_1')}",
        ("shop", "pod_1"),
    ),
    (
        "Endpoint",
        {"serviceName": "shop", "serviceLayer": "MESH", "name": "/a-b"},
        f"{SHOP}_{b64('/a-b')}",
        ("shop", "/a-b"),
    ),
    (
        "ServiceRelation",
        {"sourceServiceName": "shop", "sourceLayer": "MESH", "destServiceName": "cart"},
        f"{SHOP}-{CART}",
        ("shop", "cart"),
    ),
    (
        "ServiceInstanceRelation",
        {
            "sourceServiceName": "shop",
            "sourceServiceLayer": "MESH",
            "sourceServiceInstanceName": "a",
            "destServiceName": "cart",
            "destServiceLayer": "UNDEFINED",
            "destServiceInstanceName": "b",
        },
        f"{SHOP}_{b64('a')}-{CART}_{b64('b')}",
        ("shop", "a", "cart", "b"),
    ),
    (
        "EndpointRelation",
        {
            "serviceName": "shop",
            "serviceLayer": "MESH",
            "endpoint": "/a",
            "childServiceName": "cart",
            "childServiceLayer": "VIRTUAL_MQ",
            "childEndpoint": "/b",
        },
        f"{SHOP}-{b64('/a')}-{CART}-{b64('/b')}",
        ("shop", "/a", "cart", "/b"),
    ),
    ("ServiceInstanceJVMCPU", {"id": "given-id"}, "given-id", ("given-id",)),
]


@pytest.mark.parametrize(("source", "row", "expected", "names"), IDS, ids=[row[0] for row in IDS])
def test_the_id_of_an_entity(
    source: str, row: dict[str, Any], expected: str, names: tuple[str, ...]
) -> None:
    """Each kind of entity has its id, and the id its names back."""
    kind = sources.catalog().source(source)
    assert sources.entity_id(kind, row) == expected
    assert sources.split_entity_id(kind.entity.kind, expected) == names


@given(names, names, st.booleans(), names, names)
def test_names_come_back_out_of_an_id(a: str, b: str, normal: bool, c: str, d: str) -> None:
    """Whatever the names are, an id can be taken apart into them, as they were cut."""
    layer = "GENERAL" if normal else "UNDEFINED"
    row = {"serviceName": a, "serviceLayer": layer, "endpoint": b}
    row |= {"childServiceName": c, "childServiceLayer": layer, "childEndpoint": d}
    made = sources.entity_id(sources.catalog().source("EndpointRelation"), row)
    services = [name[:70] if name[:70].strip() else "_blank" for name in (a, c)]
    expected = (services[0], b[:150], services[1], d[:150])
    assert sources.split_entity_id("endpoint_relation", made) == expected


@pytest.mark.parametrize(
    "text", ["", "x", "c2hvcA==.2", "c2hvcA==", "c2hvcA==.1-", "!.1", "/w==.1"]
)
def test_what_is_no_id_is_refused(text: str) -> None:
    """A text that no entity can have as its id names itself in the error."""
    with pytest.raises(sources.EntityIdError) as caught:
        sources.split_entity_id("service", text)
    assert (caught.value.id, caught.value.kind) == (text, "service")
    assert isinstance(caught.value, BatchmillError)


# Time buckets


def test_buckets_are_in_utc() -> None:
    """The wall clock of the sender does not matter, its offset does."""
    moment = datetime(2024, 3, 1, 0, 30, 59, tzinfo=timezone(timedelta(hours=2)))
    assert sources.minute_bucket(moment) == 202402292230
    assert sources.hour_bucket(moment) == 2024022922
    assert sources.day_bucket(moment) == 20240229


def test_a_moment_without_a_zone_is_utc() -> None:
    """Never the machine's own time zone."""
    assert sources.minute_bucket(datetime(2024, 2, 29, 22, 30)) == 202402292230


@given(moments, st.sampled_from(Grain))
def test_a_moment_lies_in_its_bucket(moment: datetime, grain: Grain) -> None:
    """Start <= moment < end, and the bucket tells its grain."""
    bucket = grain.bucket(moment)
    assert sources.bucket_start(bucket) <= moment < sources.bucket_end(bucket)
    assert Grain.of(bucket) is grain
    length = sources.bucket_end(bucket) - sources.bucket_start(bucket)
    assert length == timedelta(minutes=grain.minutes)


@pytest.mark.parametrize("bucket", [0, -20240229, 2024, 20241301, 202402292260, 20230229])
def test_what_is_no_bucket_is_refused(bucket: int) -> None:
    """A number that is no moment of the calendar names itself in the error."""
    with pytest.raises(ConfigError, match=str(bucket)):
        sources.bucket_start(bucket)
