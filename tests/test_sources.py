from __future__ import annotations

import base64
import dataclasses
import enum
import pickle
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from typing import Any, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmill import BatchmillError, ConfigError, sources
from batchmill.sources import Entity, Field, FieldType, Grain, SourceType, UnknownNameError
from batchmill.sources import _user as user

moments = st.datetimes(
    datetime(1970, 1, 1), datetime(9999, 12, 30), timezones=st.sampled_from([UTC])
)
names = st.text(st.characters(codec="utf-8"), max_size=200)


@pytest.fixture(autouse=True)
def only_here() -> Iterator[None]:
    """What a test registers is gone after it."""
    added, classes = dict(user._added), dict(user._by_class)
    yield
    user._added.clear()
    user._added.update(added)
    user._by_class.clear()
    user._by_class.update(classes)


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
        (each.name, role, name)
        for each in sources.catalog().sources.values()
        for role, name in each.entity.roles.items()
        if name not in each.fields and name not in ("=normal", "=virtual")
    ]
    assert wrong == []


def test_latency_is_required_wherever_it_is() -> None:
    """A row must have its latency; of endpoint relations, the rpcLatency."""
    for each in sources.builtin_catalog().sources.values():
        wanted = {"latency"} if "latency" in each.fields else set()
        if each.name == "EndpointRelation":
            wanted = {"rpcLatency"}
        assert set(each.required) == wanted


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


# Event types of one's own


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass(frozen=True)
class Parcel:
    grams: int
    sender: str | None = None


@dataclasses.dataclass(frozen=True)
class Sale:
    time: datetime
    shop: str
    layer: str
    cents: int
    rate: Optional[float]  # noqa: UP045 - the old spelling must work too
    paid: bool
    colour: Colour
    words: list[str]
    numbers: list[int]
    extra: dict[str, str]
    parcel: Parcel | None = None


def test_a_frozen_dataclass_becomes_an_event_type() -> None:
    """Its annotations are its fields; `time` is the start and none of them."""
    made = sources.source(entity=sources.service("shop", layer="layer"))(Sale)
    assert made is Sale
    known = sources.catalog().source("Sale")
    assert {name: str(each.type) for name, each in known.fields.items()} == {
        "shop": "string",
        "layer": "layer",
        "cents": "long",
        "rate": "double",
        "paid": "bool",
        "colour": "enum:Colour",
        "words": "list<string>",
        "numbers": "list<long>",
        "extra": "map<string,string>",
        "parcel": "struct:Parcel",
    }
    assert known.required == ("cents",)
    assert known.field("parcel.grams").type.kind == "long"
    assert sources.catalog().enum("Colour") == ("RED", "BLUE")
    assert sources.source_of(Sale) is known


def test_an_event_becomes_a_row() -> None:
    """Enums by name, nested dataclasses as dicts, the start as `time`."""
    sources.source(entity=sources.service("shop", layer="layer"))(Sale)
    start = datetime(2024, 2, 29, tzinfo=UTC)
    sale = Sale(start, "a", "MESH", 5, None, True, Colour.RED, ["x"], [1], {"k": "v"}, Parcel(9))
    row = sources.row_of(sale)
    assert row["time"] == start
    assert row["colour"] == "RED"
    assert row["parcel"] == {"grams": 9, "sender": None}
    assert sources.entity_id(sources.source_of(Sale), row) == b64("a") + ".1"


def test_registering_the_same_again_is_no_clash() -> None:
    """A module that is imported twice, or a cell that is run again, does no harm."""
    add = sources.source(entity=sources.given("shop"))
    assert add(Sale) is add(Sale)


def test_a_local_class_may_use_local_names() -> None:
    """Annotations are read where the class is defined."""

    class Size(enum.Enum):
        SMALL = 1

    @sources.source(entity=sources.given("id"))
    @dataclasses.dataclass(frozen=True)
    class Local:
        id: str
        size: Size

    assert sources.source_of(Local).field("size").type.values == ("SMALL",)


def test_all_entity_helpers_make_complete_rules() -> None:
    """Each kind of entity can be had for a type of one's own."""

    @dataclasses.dataclass(frozen=True)
    class Call:
        a: str
        b: str
        c: str
        d: str

    row = {"a": "a", "b": "b", "c": "c", "d": "d"}
    rules = {
        sources.service("a"): 1,
        sources.instance("a", "b"): 2,
        sources.endpoint("a", "b"): 2,
        sources.service_relation("a", "c", dest_layer="=virtual"): 2,
        sources.instance_relation(("a", "b"), ("c", "d")): 4,
        sources.endpoint_relation(("a", "b"), ("c", "d")): 4,
        sources.given("a"): 1,
    }
    assert {rule.kind for rule in rules} == set(sources.ENTITY_KINDS)
    for rule, count in rules.items():
        sources.source(entity=rule)(Call)
        made = sources.entity_id(sources.source_of(Call), row)
        assert len(sources.split_entity_id(rule.kind, made)) == count
        user._added.clear()


def made(fields: list[tuple[str, Any]], name: str = "Made", frozen: bool = True) -> type:
    """A dataclass with these fields."""
    return dataclasses.make_dataclass(name, fields, frozen=frozen)


ID = [("id", str)]


@pytest.mark.parametrize(
    ("cls", "entity", "said"),
    [
        (made(ID, frozen=False), sources.given("id"), "frozen"),
        (int, sources.given("id"), "dataclass"),
        (made([*ID, ("x", bytes)]), sources.given("id"), "Made.x"),
        (made([*ID, ("x", int | str)]), sources.given("id"), "list"),
        (made([*ID, ("x", list[float])]), sources.given("id"), "Made.x"),
        (made([*ID, ("größe", int)]), sources.given("id"), "ASCII"),
        (made([*ID, ("time", int), ("time_", int)]), sources.given("id"), "time_"),
        (made([("time", datetime)]), sources.given("id"), "at least one field"),
        (made([*ID, ("x", "Nowhere")]), sources.given("id"), "Nowhere"),
        (made(ID), sources.given("idd"), "one of: id"),
        (made(ID), sources.service("id", layer="=odd"), "=normal"),
        (made([*ID, ("n", int)]), sources.given("n"), "one of: id"),
        (made(ID), Entity("service", {"service": "id"}), "layer"),
        (made(ID), "id", "service"),
        (made(ID, "Service"), sources.given("id"), "no other event type"),
        (
            made([*ID, ("e", enum.Enum("GCPhase", ["X"]))]),
            sources.given("id"),
            "no other enum",
        ),
        (
            made([*ID, ("e", made(ID, "SideCar"))]),
            sources.given("id"),
            "no other struct",
        ),
    ],
)
def test_a_class_that_cannot_be_an_event_type_is_refused(cls: type, entity: Any, said: str) -> None:
    """The error says what is wrong and what would be right; the catalog stays as it was."""
    before = sources.catalog()
    with pytest.raises(ConfigError, match=said):
        sources.source(entity=entity)(cls)
    assert sources.catalog() == before


def test_a_class_nobody_registered_has_no_event_type() -> None:
    """The error names the class."""
    with pytest.raises(UnknownNameError, match="Parcel"):
        sources.source_of(Parcel)


def test_a_catalog_can_be_extended_without_registering() -> None:
    """with_source gives a new catalog, and leaves the old one alone."""
    mine = SourceType("Mine", {"id": Field("id", FieldType("string"))}, sources.given("id"))
    known = sources.builtin_catalog()
    assert known.with_source(mine).source("Mine") is mine
    assert "Mine" not in known.sources
