"""Event types of one's own: a frozen dataclass becomes a source that metrics can be taken from."""

from __future__ import annotations

import dataclasses
import enum
import sys
import threading
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, TypeVar

from batchmill.errors import ConfigError
from batchmill.sources.annotations import fields_of
from batchmill.sources.errors import UnknownNameError
from batchmill.sources.registry import Catalog, builtin_catalog
from batchmill.sources.types import (
    ENTITY_ROLES,
    FIXED_LAYERS,
    LAYER,
    TIME_COLUMN,
    Entity,
    EntityKind,
    Field,
    SourceType,
)

C = TypeVar("C", bound=type)

SPANS = "Span"
"""The folder of OpenTelemetry spans, which are no event type: no source can have that name."""
OWN = "_"
"""What the names of batchmill's own columns begin with."""
WHY_OWN = "columns with one are batchmill's own"

_lock = threading.Lock()
_added: dict[str, SourceType] = {}
_by_class: dict[type, SourceType] = {}


def catalog() -> Catalog:
    """The built-in event types and everything that :func:`source` added in this process."""
    with _lock:
        added = list(_added.values())
    known = builtin_catalog()
    for each in added:
        known = known.with_source(each)
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
        made = _source_type(cls, entity, sys._getframe(1).f_locals)
        with _lock:
            known = builtin_catalog()
            for each in _added.values():
                known = known.with_source(each)
            known.with_source(made)
            _added[made.name] = made
            _by_class[cls] = made
        return cls

    return add


def source_of(cls: type) -> SourceType:
    """The event type that :func:`source` made of a class."""
    try:
        return _by_class[cls]
    except KeyError:
        known = tuple(each.__name__ for each in _by_class)
        raise UnknownNameError("@source class", cls.__name__, known) from None


def row_of(event: object) -> dict[str, Any]:
    """An event as a row: column to plain value, with its start as ``time`` where it has one."""
    made = source_of(type(event))
    row = {each.column: _plain(getattr(event, name)) for name, each in made.fields.items()}
    start = getattr(event, TIME_COLUMN, None)
    if isinstance(start, datetime):
        row[TIME_COLUMN] = start
    return row


def service(name: str, *, layer: str = "=normal") -> Entity:
    """Rows are about a service: the fields with its name and its layer."""
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


def _source_type(cls: type, entity: Entity, names: Mapping[str, Any]) -> SourceType:
    fields = {each.name: each for each in fields_of(cls, names)}
    _check_names(cls, fields)
    if len({each.column for each in fields.values()}) < len(fields):
        raise ConfigError(cls.__name__, "time_", "without that field: it is the column of `time`")
    _check_entity(cls, entity, fields)
    for role, name in entity.roles.items():
        if role.endswith("layer") and name in fields:
            fields[name] = Field(name, LAYER)
    return SourceType(cls.__name__, fields, entity)


def _check_names(cls: type, fields: Mapping[str, Field]) -> None:
    # In any case, since a file system may not tell the folders `span` and `Span` apart.
    if cls.__name__.lower() == SPANS.lower():
        allowed = f"called otherwise, such as Shop{SPANS}: {SPANS} is the folder of OpenTelemetry's"
        raise ConfigError("@source", cls.__name__, f"{allowed} spans; rename the class")
    for name in fields:
        if name.startswith(OWN):
            plain = name.strip("_") or "count"
            allowed = f"a name without a leading underscore, such as {plain}: rename the field"
            raise ConfigError(f"{cls.__name__}.{name}", name, f"{allowed} ({WHY_OWN})")


def _check_entity(cls: type, entity: Entity, fields: Mapping[str, Field]) -> None:
    if not isinstance(entity, Entity):
        raise ConfigError("entity", entity, "made with service(), instance(), given() or the like")
    if tuple(entity.roles) != ENTITY_ROLES[entity.kind]:
        wanted = ", ".join(ENTITY_ROLES[entity.kind])
        raise ConfigError("entity", dict(entity.roles), f"a rule with the roles {wanted}")
    texts = [name for name, each in fields.items() if each.type.kind == "string"]
    for role, name in entity.roles.items():
        fixed = FIXED_LAYERS if role.endswith("layer") else ()
        if name not in texts and name not in fixed:
            allowed = ", ".join((*texts, *fixed)) or "there, but the class has no field of type str"
            raise ConfigError(f"{cls.__name__}: entity {role}", name, f"one of: {allowed}")


def _plain(value: object) -> object:
    if isinstance(value, enum.Enum):
        return value.name
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {each.name: _plain(getattr(value, each.name)) for each in fields}
    return value
