"""What an event type is made of: fields and their types, and the rule that names its entity."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as _field
from typing import Any, Literal, TypeAlias, get_args

from batchmill.sources.errors import UnknownNameError

Kind: TypeAlias = Literal[
    "string", "int", "long", "double", "bool", "layer", "enum", "list", "map", "struct"
]
EntityKind: TypeAlias = Literal[
    "service",
    "instance",
    "endpoint",
    "service_relation",
    "instance_relation",
    "endpoint_relation",
    "given",
]

ENTITY_ROLES: Mapping[EntityKind, tuple[str, ...]] = {
    "service": ("service", "layer"),
    "instance": ("service", "layer", "name"),
    "endpoint": ("service", "layer", "name"),
    "service_relation": ("source_service", "source_layer", "dest_service", "dest_layer"),
    "instance_relation": (
        *("source_service", "source_layer", "source_name"),
        *("dest_service", "dest_layer", "dest_name"),
    ),
    "endpoint_relation": (
        *("source_service", "source_layer", "source_name"),
        *("dest_service", "dest_layer", "dest_name"),
    ),
    "given": ("field",),
}
"""The roles that a rule of each kind fills with fields."""

FIXED_LAYERS = ("=normal", "=virtual")
"""What may stand for a layer's field where every row's layer is alike."""

TIME_COLUMN = "time"
"""The column of an event's start; a field of that name is stored as ``time_``."""


@dataclass(frozen=True, slots=True)
class FieldType:
    """The type of a field. ``str()`` gives the catalog's notation, such as ``list<string>``."""

    kind: Kind
    name: str = ""
    """The name of an enum or a struct."""
    values: tuple[str, ...] = ()
    """The value names of an enum."""
    fields: tuple[Field, ...] = ()
    """The fields of a struct."""
    item: FieldType | None = None
    """What a list holds; of a map, what its values are (its keys are strings)."""

    def __str__(self) -> str:
        if self.kind == "list":
            return f"list<{self.item}>"
        if self.kind == "map":
            return f"map<string,{self.item}>"
        return f"{self.kind}:{self.name}" if self.name else self.kind

    @property
    def is_whole(self) -> bool:
        """Whether it is a whole number."""
        return self.kind in ("int", "long")

    @property
    def is_number(self) -> bool:
        """Whether it is a number, whole or not."""
        return self.kind in ("int", "long", "double")

    def member(self, name: str) -> Field | None:
        """The field of that name in a struct, if there is one."""
        return next((each for each in self.fields if each.name == name), None)


STRING = FieldType("string")
INT = FieldType("int")
LONG = FieldType("long")
DOUBLE = FieldType("double")
BOOL = FieldType("bool")
LAYER = FieldType("layer")


@dataclass(frozen=True, slots=True)
class Field:
    """One field of an event type, or of a struct in it."""

    name: str
    type: FieldType
    required: bool = False
    """Whether a row without it is no row: it is set aside instead of being counted."""
    column: str = ""
    """Its Parquet column: its name, but ``time_`` for a field called ``time``."""

    def __post_init__(self) -> None:
        if not self.column:
            column = f"{self.name}_" if self.name == TIME_COLUMN else self.name
            object.__setattr__(self, "column", column)


@dataclass(frozen=True, slots=True)
class Entity:
    """Which fields name the entity that a row is about, and what kind of entity that is."""

    kind: EntityKind
    roles: Mapping[str, str] = _field(hash=False)
    """Role to field name; a layer may also be ``=normal`` or ``=virtual`` for every row."""


@dataclass(frozen=True, slots=True)
class SourceType:
    """An event type: its fields by name, and the rule for the entity of a row."""

    name: str
    fields: Mapping[str, Field] = _field(hash=False)
    entity: Entity

    def field(self, path: str | Sequence[str]) -> Field:
        """The field at a path, such as ``"write.l4.duration"``.

        Raises :class:`UnknownNameError` naming the fields there are.
        """
        parts = path.split(".") if isinstance(path, str) else list(path)
        known: Mapping[str, Field] = self.fields
        owner = self.name
        found: Field | None = None
        for part in parts:
            found = known.get(part)
            if found is None:
                raise UnknownNameError(f"field of {owner}", part, tuple(known))
            known = {each.name: each for each in found.type.fields}
            owner = f"{owner}.{part}"
        if found is None:
            raise UnknownNameError(f"field of {owner}", "", tuple(known))
        return found

    @property
    def required(self) -> tuple[str, ...]:
        """The names of the fields that every row must have."""
        return tuple(name for name, each in self.fields.items() if each.required)

    def arrow_schema(self) -> Any:
        """The ``pyarrow.Schema`` of its files: ``time``, then the fields. Needs pyarrow."""
        from batchmill.sources.arrow import schema

        return schema(self)


def types_within(kind: FieldType) -> Iterator[FieldType]:
    """A type and every type inside it."""
    yield kind
    if kind.item is not None:
        yield from types_within(kind.item)
    for each in kind.fields:
        yield from types_within(each.type)


ENTITY_KINDS: tuple[EntityKind, ...] = get_args(EntityKind)
