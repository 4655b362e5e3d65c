"""The catalog of event types, and the built-in one that is read from ``catalog.json``."""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from batchmill.errors import ConfigError
from batchmill.sources.types import (
    BOOL,
    DOUBLE,
    INT,
    LAYER,
    LONG,
    STRING,
    Entity,
    Field,
    FieldType,
    SourceType,
    UnknownNameError,
    types_within,
)

T = TypeVar("T")

_PLAIN: Mapping[str, FieldType] = {
    str(kind): kind
    for kind in (
        *(STRING, INT, LONG, DOUBLE, BOOL, LAYER),
        FieldType("list", item=STRING),
        FieldType("list", item=INT),
        FieldType("list", item=LONG),
        FieldType("map", item=STRING),
    )
}


@dataclass(frozen=True)
class Catalog:
    """Every event type that metrics can be taken from, with the enums and structs of its fields.

    >>> builtin_catalog().source("Endpoint").field("sideCar.internalErrorCode").type.kind
    'string'
    """

    sources: Mapping[str, SourceType] = field(hash=False)
    enums: Mapping[str, tuple[str, ...]] = field(hash=False)
    structs: Mapping[str, FieldType] = field(hash=False)

    def source(self, name: str) -> SourceType:
        """The event type of that name; :class:`UnknownNameError` lists those that exist."""
        return _look_up("source", name, self.sources)

    def enum(self, name: str) -> tuple[str, ...]:
        """The value names of an enum."""
        return _look_up("enum", name, self.enums)

    def struct(self, name: str) -> FieldType:
        """The struct of that name."""
        return _look_up("struct", name, self.structs)

    def with_source(self, added: SourceType) -> Catalog:
        """A catalog with one more event type, and the enums and structs in it.

        A name that already means something else is refused; the same definition again is fine.
        """
        sources, enums, structs = dict(self.sources), dict(self.enums), dict(self.structs)
        if sources.setdefault(added.name, added) != added:
            raise ConfigError("source", added.name, "a name that no other event type has")
        for member in added.fields.values():
            for kind in types_within(member.type):
                if kind.kind == "enum" and enums.setdefault(kind.name, kind.values) != kind.values:
                    raise ConfigError("enum", kind.name, "a name that no other enum has")
                if kind.kind == "struct" and structs.setdefault(kind.name, kind) != kind:
                    raise ConfigError("struct", kind.name, "a name that no other struct has")
        return Catalog(sources, enums, structs)


@functools.cache
def builtin_catalog() -> Catalog:
    """The event types that come with batchmill."""
    text = (
        importlib.resources.files("batchmill.sources").joinpath("catalog.json").read_text("utf-8")
    )
    return read_catalog(json.loads(text))


def read_catalog(facts: Mapping[str, Any]) -> Catalog:
    """The catalog that the content of a ``catalog.json`` describes."""
    reader = _Reader(facts)
    return Catalog(
        {name: reader.source(name) for name in facts["sources"]},
        reader.enums,
        {name: reader.struct(name) for name in facts["structs"]},
    )


class _Reader:
    """Turns the catalog's notation into types; each struct is built once."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self._sources: Mapping[str, Any] = facts["sources"]
        self._structs: Mapping[str, Mapping[str, str]] = facts["structs"]
        self._built: dict[str, FieldType] = {}
        self.enums = {name: tuple(values) for name, values in facts["enums"].items()}

    def source(self, name: str) -> SourceType:
        facts = self._sources[name]
        rule = dict(facts["entity"])
        entity = Entity(rule.pop("kind"), rule)
        required = frozenset(facts.get("required", ()))
        micros: Mapping[str, str] = facts.get("micros", {})
        fields = {
            field: Field(
                field,
                self.type(notation),
                required=field in required,
                micros_of=micros.get(field, ""),
            )
            for field, notation in facts["fields"].items()
        }
        return SourceType(name, fields, entity)

    def struct(self, name: str) -> FieldType:
        if name not in self._built:
            members = _look_up("struct", name, self._structs).items()
            # A member of a struct keeps its name: only a column of the file can clash with `time`.
            fields = tuple(Field(key, self.type(text), column=key) for key, text in members)
            self._built[name] = FieldType("struct", name, fields=fields)
        return self._built[name]

    def type(self, notation: str) -> FieldType:
        kind, _, name = notation.partition(":")
        if kind == "struct":
            return self.struct(name)
        if kind == "enum":
            return FieldType("enum", name, values=_look_up("enum", name, self.enums))
        return _look_up("field type", notation, _PLAIN)


def _look_up(what: str, name: str, known: Mapping[str, T]) -> T:
    try:
        return known[name]
    except KeyError:
        raise UnknownNameError(what, name, tuple(known)) from None
