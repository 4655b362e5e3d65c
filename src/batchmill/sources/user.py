"""Event types of your own: ``@source`` turns a frozen dataclass into one, by its annotations."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import sys
import threading
import types
import typing
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, TypeVar

from batchmill.errors import ConfigError
from batchmill.sources.registry import Catalog, builtin_catalog
from batchmill.sources.types import (
    BOOL,
    DOUBLE,
    ENTITY_ROLES,
    FIXED_LAYERS,
    LAYER,
    LONG,
    SPAN_SOURCE,
    STRING,
    TIME_COLUMN,
    Entity,
    EntityKind,
    Field,
    FieldType,
    SourceType,
    UnknownNameError,
)

C = TypeVar("C", bound=type)

_RESERVED = "_"
"""What the names of batchmill's own columns begin with."""
_ALLOWED = (
    "str, int, float, bool, list[str], list[int], dict[str, str], an enum.Enum, "
    "a frozen dataclass, or one of these or None"
)
_PLAIN: Mapping[object, FieldType] = {
    str: STRING,
    int: LONG,
    float: DOUBLE,
    bool: BOOL,
    list[str]: FieldType("list", item=STRING),
    list[int]: FieldType("list", item=LONG),
    dict[str, str]: FieldType("map", item=STRING),
}

_lock = threading.Lock()
_added: dict[str, SourceType] = {}
_by_class: dict[type, SourceType] = {}


def catalog() -> Catalog:
    """The built-in event types and everything that :func:`source` added in this process."""
    with _lock:
        return _catalog()


def _catalog() -> Catalog:
    known = builtin_catalog()
    for added in _added.values():
        known = known.with_source(added)
    return known


def source(*, entity: Entity) -> Callable[[C], C]:
    """Make a frozen dataclass an event type; the class itself stays as it is.

    Fields are taken from the annotations: ``str``, ``int`` (a long), ``float``, ``bool``,
    ``list[str]``, ``list[int]``, ``dict[str, str]``, an ``enum.Enum``, another frozen dataclass,
    or one of these or None. A field ``time: datetime`` is the event's start, not a field to
    measure. A number that cannot be None is required of every row.

    >>> @source(entity=service("shop"))
    ... @dataclasses.dataclass(frozen=True)
    ... class Sale:
    ...     time: datetime
    ...     shop: str
    ...     cents: int
    >>> catalog().source("Sale").field("cents").type.kind
    'long'
    """

    def add(cls: C) -> C:
        # Annotations may name classes that are local to the function which defines this one.
        kind = _source_type(cls, entity, sys._getframe(1).f_locals)
        with _lock:
            _catalog().with_source(kind)  # refuses names that are in use
            _added[kind.name] = kind
            _by_class[cls] = kind
        return cls

    return add


def source_classes() -> dict[type, SourceType]:
    """Every class that :func:`source` made an event type, with that type."""
    with _lock:
        return dict(_by_class)


def source_of(cls: type) -> SourceType:
    """The event type that :func:`source` made of a class."""
    try:
        return _by_class[cls]
    except KeyError:
        known = tuple(known_class.__name__ for known_class in _by_class)
        raise UnknownNameError("@source class", cls.__name__, known) from None


def row_of(event: object) -> dict[str, Any]:
    """An event as a row: column to plain value, with its start as ``time`` where it has one."""
    fields = source_of(type(event)).fields.items()
    row = {field.column: plain_value(getattr(event, name)) for name, field in fields}
    start = getattr(event, TIME_COLUMN, None)
    if isinstance(start, datetime):
        row[TIME_COLUMN] = start
    return row


def service(name: str, *, layer: str = "=normal") -> Entity:
    """Rows are about a service: the field with its name, and its layer."""
    return Entity("service", {"service": name, "layer": layer})


def instance(service: str, name: str, *, layer: str = "=normal") -> Entity:
    """Rows are about an instance of a service: the fields with the service's name and its own."""
    return Entity("instance", {"service": service, "layer": layer, "name": name})


def endpoint(service: str, name: str, *, layer: str = "=normal") -> Entity:
    """Rows are about an endpoint of a service: the fields with the service's name and its own."""
    return Entity("endpoint", {"service": service, "layer": layer, "name": name})


def service_relation(
    source: str, dest: str, *, source_layer: str = "=normal", dest_layer: str = "=normal"
) -> Entity:
    """Rows are about calls from one service to another: the fields with their names."""
    roles = {"source_service": source, "source_layer": source_layer}
    return Entity("service_relation", roles | {"dest_service": dest, "dest_layer": dest_layer})


def instance_relation(
    source: tuple[str, str],
    dest: tuple[str, str],
    *,
    source_layer: str = "=normal",
    dest_layer: str = "=normal",
) -> Entity:
    """Rows are about calls between instances: for each end its service's field and its own."""
    return _ends("instance_relation", source, dest, source_layer, dest_layer)


def endpoint_relation(
    source: tuple[str, str],
    dest: tuple[str, str],
    *,
    source_layer: str = "=normal",
    dest_layer: str = "=normal",
) -> Entity:
    """Rows are about calls between endpoints: for each end its service's field and its own."""
    return _ends("endpoint_relation", source, dest, source_layer, dest_layer)


def given(field: str) -> Entity:
    """Rows carry the id of their entity: the field that holds it."""
    return Entity("given", {"field": field})


def _ends(
    kind: EntityKind, source: tuple[str, str], dest: tuple[str, str], of: str, to: str
) -> Entity:
    caller = {"source_service": source[0], "source_layer": of, "source_name": source[1]}
    callee = {"dest_service": dest[0], "dest_layer": to, "dest_name": dest[1]}
    return Entity(kind, caller | callee)


def _source_type(cls: type, entity: Entity, scope: Mapping[str, Any]) -> SourceType:
    fields = {field.name: field for field in _fields_of(cls, scope)}
    _check_names(cls, fields)
    if len({field.column for field in fields.values()}) < len(fields):
        raise ConfigError(cls.__name__, "time_", "without that field: it is the column of `time`")
    _check_entity(cls, entity, fields)
    for role, name in entity.roles.items():
        if role.endswith("layer") and name in fields:
            fields[name] = Field(name, LAYER)
    return SourceType(cls.__name__, fields, entity)


def _check_names(cls: type, fields: Mapping[str, Field]) -> None:
    # In any case: a file system may not tell the folders `span` and `Span` apart.
    if cls.__name__.lower() == SPAN_SOURCE.lower():
        raise ConfigError(
            "@source",
            cls.__name__,
            f"another name, such as Shop{SPAN_SOURCE}: rename the class "
            f"({SPAN_SOURCE} is the folder of OpenTelemetry's spans)",
        )
    for name in fields:
        if name.startswith(_RESERVED):
            plain = name.strip("_") or "count"
            allowed = f"a name without a leading underscore, such as {plain}: rename the field"
            raise ConfigError(
                f"{cls.__name__}.{name}", name, f"{allowed} (columns with one are batchmill's own)"
            )


def _check_entity(cls: type, entity: Entity, fields: Mapping[str, Field]) -> None:
    if not isinstance(entity, Entity):
        raise ConfigError("entity", entity, "made with service(), instance(), given() or the like")
    if tuple(entity.roles) != ENTITY_ROLES[entity.kind]:
        roles = ", ".join(ENTITY_ROLES[entity.kind])
        raise ConfigError("entity", dict(entity.roles), f"a rule with the roles {roles}")
    texts = [name for name, field in fields.items() if field.type.kind == "string"]
    for role, name in entity.roles.items():
        fixed = FIXED_LAYERS if role.endswith("layer") else ()
        if name not in texts and name not in fixed:
            allowed = ", ".join((*texts, *fixed)) or "there, but the class has no field of type str"
            raise ConfigError(f"{cls.__name__}: entity {role}", name, f"one of: {allowed}")


def _fields_of(cls: type, scope: Mapping[str, Any]) -> tuple[Field, ...]:
    """The fields of an event type; ``scope`` holds the names around the class's definition."""
    if TIME_COLUMN in (hints := _hints(cls, scope)) and _is_time(hints[TIME_COLUMN]):
        del hints[TIME_COLUMN]
    if not hints:
        raise ConfigError("@source", cls, "a class with at least one field")
    return tuple(_field(cls, name, hint, scope, ()) for name, hint in hints.items())


def _hints(cls: type, scope: Mapping[str, Any]) -> dict[str, Any]:
    """The annotation of each field of a frozen dataclass."""
    if not isinstance(cls, type) or not dataclasses.is_dataclass(cls):
        raise ConfigError("@source", cls, "a dataclass: put @dataclass(frozen=True) below it")
    parameters: Any = cls.__dataclass_params__  # type: ignore[attr-defined]
    if not parameters.frozen:
        raise ConfigError(
            "@source", cls, "frozen, since events do not change: @dataclass(frozen=True)"
        )
    try:
        return {field.name: _hint(cls, field, scope) for field in dataclasses.fields(cls)}
    except NameError as error:
        raise ConfigError(
            cls.__name__, str(error), "annotated with names that are defined by then"
        ) from error


def _hint(cls: type, field: dataclasses.Field[Any], scope: Mapping[str, Any]) -> object:
    """The annotation of a field; it may be inherited, also from a class of another module."""
    owner = next(base for base in cls.__mro__ if field.name in inspect.get_annotations(base))
    names = vars(sys.modules[owner.__module__])
    if owner.__module__ == cls.__module__:
        names = {**names, **scope}
    annotated = types.SimpleNamespace(__annotations__={field.name: field.type})
    return typing.get_type_hints(annotated, names)[field.name]


def _field(
    cls: type, name: str, hint: object, scope: Mapping[str, Any], outer: tuple[type, ...]
) -> Field:
    """The field of a class; ``outer`` are the classes that this one is nested in."""
    if not name.isascii():
        raise ConfigError(
            f"{cls.__name__}.{name}", name, "a name of ASCII letters, digits and underscores"
        )
    hint, optional = _without_none(hint)
    kind = _type(hint, scope, (*outer, cls))
    if kind is None:
        raise ConfigError(f"{cls.__name__}.{name}", hint, _ALLOWED)
    required = kind.is_number and not optional and not outer
    return Field(name, kind, required=required, column=name if outer else "")


def _type(hint: object, scope: Mapping[str, Any], outer: tuple[type, ...]) -> FieldType | None:
    for plain, kind in _PLAIN.items():
        if hint == plain:
            return kind
    if not isinstance(hint, type) or hint in outer:
        return None
    if issubclass(hint, enum.Enum):
        return FieldType("enum", hint.__name__, values=tuple(hint.__members__))
    if dataclasses.is_dataclass(hint):
        members = _hints(hint, scope).items()
        fields = tuple(_field(hint, name, inner, scope, outer) for name, inner in members)
        return FieldType("struct", hint.__name__, fields=fields)
    return None


def _without_none(hint: object) -> tuple[object, bool]:
    """A type, and whether None was allowed beside it."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        others = [option for option in typing.get_args(hint) if option is not type(None)]
        if len(others) == 1:
            return others[0], True
    return hint, False


def _is_time(hint: object) -> bool:
    return _without_none(hint)[0] is datetime


def plain_value(value: object) -> object:
    """A field's value as a row has it: an enum by its name, a dataclass as a dict."""
    if isinstance(value, enum.Enum):
        return value.name
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {field.name: plain_value(getattr(value, field.name)) for field in fields}
    return value
