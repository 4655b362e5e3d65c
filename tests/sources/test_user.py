"""Event types of one's own."""

from __future__ import annotations

import dataclasses
import enum
import sys
import types
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Optional

import pytest

from batchmill import ConfigError, sources
from batchmill.sources import Entity, Field, FieldType, SourceType, UnknownNameError
from tests.kit.events import temporary_sources


@pytest.fixture(autouse=True)
def only_here() -> Iterator[None]:
    """What a test registers is gone after it."""
    with temporary_sources():
        yield


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
    assert {name: str(field.type) for name, field in known.fields.items()} == {
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
    assert sources.entity_id(sources.source_of(Sale), row) == "YQ==.1"


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


BASE_MODULE = """
from __future__ import annotations

import dataclasses
import enum
from typing import ClassVar


class Size(enum.Enum):
    SMALL = 1


@dataclasses.dataclass(frozen=True)
class Base:
    known: ClassVar[int] = 0
    shop: str
    size: Size
"""


def test_fields_may_be_inherited_from_a_class_of_another_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its annotations have names of that module."""
    module = types.ModuleType("base_module")
    monkeypatch.setitem(sys.modules, "base_module", module)
    exec(BASE_MODULE, vars(module))

    @sources.source(entity=sources.service("shop"))
    @dataclasses.dataclass(frozen=True)
    class Inherited(module.Base):  # type: ignore[misc, name-defined]
        paint: Colour

    fields = sources.catalog().source("Inherited").fields
    assert fields["size"].type.values == ("SMALL",)
    assert fields["paint"].type.values == ("RED", "BLUE")


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
        with temporary_sources():
            sources.source(entity=rule)(Call)
            made = sources.entity_id(sources.source_of(Call), row)
        assert len(sources.split_entity_id(rule.kind, made)) == count


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
        (made(ID, "Span"), sources.given("id"), "rename the class"),
        (made(ID, "span"), sources.given("id"), "folder of OpenTelemetry"),
        (made([*ID, ("_rows", int)]), sources.given("id"), "such as rows: rename the field"),
        (made([*ID, ("__", int)]), sources.given("id"), "leading underscore"),
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
