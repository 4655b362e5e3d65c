"""Event types: their fields with types, and the rule that names the entity of a row."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as _field
from typing import Any, Literal, TypeAlias, get_args

from batchmill.errors import BatchmillError
from batchmill.extras import require_extra

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
"""The roles that an entity rule of each kind maps to fields."""

FIXED_LAYERS = ("=normal", "=virtual")
"""What an entity rule may give in place of a layer's field: the layer of every row."""

TIME_COLUMN = "time"
"""The column of an event's start; a field of that name is stored as ``time_``."""
SPAN_SOURCE = "Span"
"""The folder of OpenTelemetry spans in a spool. Not an event type: several are derived from it."""


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
        return next((field for field in self.fields if field.name == name), None)

    def arrow_type(self) -> Any:
        """The ``pyarrow.DataType`` of its values in a file. Needs pyarrow."""
        import pyarrow as pa

        if self.kind == "struct":
            return pa.struct([(field.name, field.type.arrow_type()) for field in self.fields])
        if self.kind == "list" and self.item is not None:
            return pa.list_(self.item.arrow_type())
        if self.kind == "map" and self.item is not None:
            return pa.map_(pa.string(), self.item.arrow_type())
        numbers = {"int": pa.int32(), "long": pa.int64(), "double": pa.float64()}
        return pa.bool_() if self.kind == "bool" else numbers.get(self.kind, pa.string())

    def can_read(self, actual: Any) -> bool:
        """Whether values of a ``pyarrow.DataType`` can be read as this type. Needs pyarrow."""
        import pyarrow as pa

        is_ = pa.types
        if is_.is_dictionary(actual):
            actual = actual.value_type
        match self.kind:
            case "bool":
                return bool(is_.is_boolean(actual))
            case "int":
                return actual in (pa.int8(), pa.int16(), pa.int32(), pa.uint8(), pa.uint16())
            case "long":
                return bool(is_.is_integer(actual)) and actual != pa.uint64()
            case "double":
                return actual in (pa.float32(), pa.float64())
            case "list":
                is_list = is_.is_list(actual) or is_.is_large_list(actual)
                return is_list and self.item is not None and self.item.can_read(actual.value_type)
            case "map":
                return (
                    bool(is_.is_map(actual))
                    and STRING.can_read(actual.key_type)
                    and self.item is not None
                    and self.item.can_read(actual.item_type)
                )
            case "struct":
                if not is_.is_struct(actual):
                    return False
                types = {member.name: member.type for member in actual}
                return all(
                    field.name not in types or field.type.can_read(types[field.name])
                    for field in self.fields
                )
        return bool(is_.is_string(actual) or is_.is_large_string(actual))


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
    """Whether a row without it is put into quarantine instead of being counted."""
    column: str = ""
    """Its Parquet column: its name, but ``time_`` for a field called ``time``."""
    micros_of: str = ""
    """The field of the same duration in milliseconds, from which a row without this one has it."""

    def __post_init__(self) -> None:
        if not self.column:
            column = f"{self.name}_" if self.name == TIME_COLUMN else self.name
            object.__setattr__(self, "column", column)

    @property
    def always_there(self) -> bool:
        """Whether no valid row is without it."""
        return self.required or bool(self.micros_of)


@dataclass(frozen=True, slots=True)
class Entity:
    """The kind of entity that a row is about, and the fields that name it."""

    kind: EntityKind
    roles: Mapping[str, str] = _field(hash=False)
    """Role to field name; a layer may also be ``=normal`` or ``=virtual``, for every row."""


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
        field: Field | None = None
        for part in parts:
            field = known.get(part)
            if field is None:
                raise UnknownNameError(f"field of {owner}", part, tuple(known))
            known = {member.name: member for member in field.type.fields}
            owner = f"{owner}.{part}"
        if field is None:
            raise UnknownNameError(f"field of {owner}", "", tuple(known))
        return field

    @property
    def required(self) -> tuple[str, ...]:
        """The names of the fields that every row must have."""
        return tuple(name for name, field in self.fields.items() if field.required)

    def arrow_schema(self) -> Any:
        """The ``pyarrow.Schema`` of its files: ``time`` (microseconds, UTC), then the fields.

        All columns are nullable, required fields too: a row without one can be read, and then goes
        to the quarantine. Needs pyarrow.
        """
        require_extra("an Arrow schema", "spool", "pyarrow")
        import pyarrow as pa

        columns = [(field.column, field.type.arrow_type()) for field in self.fields.values()]
        return pa.schema([(TIME_COLUMN, pa.timestamp("us", tz="UTC")), *columns])


def types_within(kind: FieldType) -> Iterator[FieldType]:
    """A type and every type inside it."""
    yield kind
    if kind.item is not None:
        yield from types_within(kind.item)
    for field in kind.fields:
        yield from types_within(field.type)


ENTITY_KINDS: tuple[EntityKind, ...] = get_args(EntityKind)


MOST_NAMES = 12
"""A message lists no more names than this."""


class UnknownNameError(BatchmillError, LookupError):
    """No source, field, enum or the like has this name."""

    what: str
    """What was looked for, such as ``field of Endpoint``."""
    name: str
    known: tuple[str, ...]
    """The names that exist."""

    def __str__(self) -> str:
        return f"no {self.what} is called {self.name!r}: {suggest(self.name, self.known)}"


def suggest(name: str, known: Sequence[str]) -> str:
    """Suggest names for an unknown one: close matches first, then the others, up to a dozen."""
    if not known:
        return "there are none"
    folded = {word.lower(): word for word in known}
    close = [folded[word] for word in difflib.get_close_matches(name.lower()[:80], folded)]
    rest = [word for word in sorted(known) if word not in close]
    room = max(0, MOST_NAMES - len(close))
    shown = ", ".join(rest[:room])
    more = f", and {len(rest) - room} more" if len(rest) > room else ""
    if not close:
        return f"there are {shown}{more}" if len(known) > 1 else f"there is {shown}"
    hint = f"did you mean {' or '.join(close)}?"
    return f"{hint} There are also {shown}{more}" if shown else hint
