"""Entity ids: built from names, and split into names again.

A service's id is ``base64(name).1``, or ``.0`` where its layer is not normal; ids of instances,
endpoints and relations are built from it. base64 has no dot, dash or underscore, so an id can
always be split again.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from batchmill.errors import BatchmillError
from batchmill.sources.types import EntityKind, SourceType

SERVICE_NAME_LIMIT = 70
"""Characters of a service's name that count; the rest is cut off."""
INSTANCE_NAME_LIMIT = 70
"""Characters of an instance's name that count."""
ENDPOINT_NAME_LIMIT = 150
"""Characters of an endpoint's name that count."""
BLANK_NAME = "_blank"
"""The name of a service whose own is null or, after cutting, nothing but blanks."""


class EntityIdError(BatchmillError, ValueError):
    """A text is not an entity id of that kind."""

    kind: str
    id: str
    template = (
        "{id!r} is not an entity id of kind {kind!r}: "
        "pass the id as the store holds it, and the kind of its source's entity"
    )


def is_normal(layer: str | None) -> bool:
    """Whether services of that layer report themselves, instead of being known from callers only.

    >>> is_normal("GENERAL"), is_normal("VIRTUAL_DATABASE"), is_normal(None)
    (True, False, False)
    """
    return layer is not None and layer != "UNDEFINED" and not layer.startswith("VIRTUAL_")


def service_id(name: str | None, normal: bool) -> str:
    """The id of a service.

    >>> service_id("shop", True)
    'c2hvcA==.1'
    """
    kept = (name or "")[:SERVICE_NAME_LIMIT]
    return f"{_encode(kept if kept.strip() else BLANK_NAME, SERVICE_NAME_LIMIT)}.{int(normal)}"


def instance_id(service: str, name: str | None) -> str:
    """The id of an instance of the service with that id."""
    return f"{service}_{_encode(name, INSTANCE_NAME_LIMIT)}"


def endpoint_id(service: str, name: str | None) -> str:
    """The id of an endpoint of the service with that id."""
    return f"{service}_{_encode(name, ENDPOINT_NAME_LIMIT)}"


def entity_id(source: SourceType, row: Mapping[str, Any]) -> str:
    """The id of the entity that a row of ``source`` is about; ``row`` is keyed by field name.

    Spark computes the same, column by column; tests compare the two.
    """
    kind, roles = source.entity.kind, source.entity.roles
    if kind == "given":
        given = row.get(roles["field"])
        return "" if given is None else str(given)
    if kind == "service":
        return _service(roles, row)
    if kind == "instance":
        return instance_id(_service(roles, row), row.get(roles["name"]))
    if kind == "endpoint":
        return endpoint_id(_service(roles, row), row.get(roles["name"]))
    caller, callee = _service(roles, row, "source_"), _service(roles, row, "dest_")
    if kind == "service_relation":
        return f"{caller}-{callee}"
    of, to = row.get(roles["source_name"]), row.get(roles["dest_name"])
    if kind == "instance_relation":
        return f"{instance_id(caller, of)}-{instance_id(callee, to)}"
    of, to = _encode(of, ENDPOINT_NAME_LIMIT), _encode(to, ENDPOINT_NAME_LIMIT)
    return f"{caller}-{of}-{callee}-{to}"


def split_entity_id(kind: EntityKind, id: str) -> tuple[str, ...]:  # noqa: A002
    """The names in an entity id, in order.

    A service's name; an instance's or an endpoint's service and own name; for a relation the names
    of the caller, then those of the callee.

    >>> split_entity_id("service", "c2hvcA==.1")
    ('shop',)
    """
    if kind == "given":
        return (id,)
    try:
        if kind == "endpoint_relation":
            caller, of, callee, to = id.split("-")
            return (_service_name(caller), _decode(of), _service_name(callee), _decode(to))
        ends = id.split("-")
        if len(ends) != (2 if kind.endswith("_relation") else 1):
            raise EntityIdError(kind, id)
        if kind in ("service", "service_relation"):
            return tuple(_service_name(end) for end in ends)
        names: list[str] = []
        for end in ends:
            service, name = end.split("_")
            names += (_service_name(service), _decode(name))
        return tuple(names)
    except (ValueError, binascii.Error):
        raise EntityIdError(kind, id) from None


def _service(roles: Mapping[str, str], row: Mapping[str, Any], prefix: str = "") -> str:
    layer = roles[f"{prefix}layer"]
    normal = layer == "=normal" if layer.startswith("=") else is_normal(row.get(layer))
    return service_id(row.get(roles[f"{prefix}service"]), normal)


def _service_name(id: str) -> str:  # noqa: A002
    name, normal = id.split(".")
    if normal not in ("0", "1"):
        raise ValueError(id)
    return _decode(name)


def _encode(name: str | None, limit: int) -> str:
    # A lone surrogate has no UTF-8: it becomes a question mark.
    return base64.b64encode((name or "")[:limit].encode("utf-8", "replace")).decode("ascii")


def _decode(text: str) -> str:
    return base64.b64decode(text, validate=True).decode("utf-8")
