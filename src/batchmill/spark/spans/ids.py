"""Entity ids as Spark SQL: the same ids that ``batchmill.sources.entity_id`` makes in Python.

Every function answers SQL text, so that a whole projection is parsed in one call to the JVM, and
what is passed in is SQL text as well. Characters are code points, on both sides.
"""

from __future__ import annotations

from collections.abc import Mapping

from batchmill.sources import (
    BLANK_NAME,
    ENDPOINT_NAME_LIMIT,
    INSTANCE_NAME_LIMIT,
    SERVICE_NAME_LIMIT,
    Entity,
)
from batchmill.spark.l1.sql import literal
from batchmill.spark.l1.sql import name as quote

WHITESPACE = (
    "\t\n\x0b\x0c\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005"
    "\u2006\u2007\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000"
)
"""What ``str.strip()`` takes off: a text of nothing else is blank."""


def is_blank(text: str) -> str:
    """Whether a text has nothing but white space; null for null."""
    # Trimming one end will do, and it stops at the first character that stays.
    return f"(LTRIM({literal(WHITESPACE)}, {text}) = '')"


def is_normal(layer: str) -> str:
    """Whether services of that layer are observed themselves; a missing layer is UNDEFINED."""
    return f"COALESCE({layer} <> 'UNDEFINED' AND NOT STARTSWITH({layer}, 'VIRTUAL_'), false)"


def service_id(name: str, normal: str) -> str:
    """The id of a service; ``normal`` is SQL of a boolean that is never null."""
    blank = f"COALESCE({is_blank(name)}, true)"
    encoded = f"IF({blank}, {_base64(literal(BLANK_NAME))}, {_encode(name, SERVICE_NAME_LIMIT)})"
    return f"CONCAT({encoded}, IF({normal}, '.1', '.0'))"


def instance_id(service: str, name: str) -> str:
    """The id of an instance of the service with that id."""
    return f"CONCAT({service}, '_', {_encode(name, INSTANCE_NAME_LIMIT)})"


def endpoint_id(service: str, name: str) -> str:
    """The id of an endpoint of the service with that id."""
    return f"CONCAT({service}, '_', {_encode(name, ENDPOINT_NAME_LIMIT)})"


def entity_id(entity: Entity) -> str:
    """The id of the entity that a row is about, over the columns that the source's rule names.

    Its text is never null: what is missing counts as blank, as it does in Python.
    """
    kind, roles = entity.kind, entity.roles
    if kind == "given":
        return f"COALESCE(CAST({quote(roles['field'])} AS STRING), '')"
    if kind == "service":
        return _service(roles)
    if kind == "instance":
        return instance_id(_service(roles), quote(roles["name"]))
    if kind == "endpoint":
        return endpoint_id(_service(roles), quote(roles["name"]))
    caller, callee = _service(roles, "source_"), _service(roles, "dest_")
    if kind == "service_relation":
        return f"CONCAT({caller}, '-', {callee})"
    of, to = quote(roles["source_name"]), quote(roles["dest_name"])
    if kind == "instance_relation":
        return f"CONCAT({instance_id(caller, of)}, '-', {instance_id(callee, to)})"
    of, to = _encode(of, ENDPOINT_NAME_LIMIT), _encode(to, ENDPOINT_NAME_LIMIT)
    return f"CONCAT({caller}, '-', {of}, '-', {callee}, '-', {to})"


def _service(roles: Mapping[str, str], prefix: str = "") -> str:
    layer = roles[f"{prefix}layer"]
    if layer.startswith("="):
        normal = "true" if layer == "=normal" else "false"
    else:
        normal = is_normal(quote(layer))
    return service_id(quote(roles[f"{prefix}service"]), normal)


def _encode(name: str, limit: int) -> str:
    # SUBSTRING counts code points, and so does Python.
    return _base64(f"SUBSTRING(COALESCE({name}, ''), 1, {limit})")


def _base64(text: str) -> str:
    # BASE64 breaks its lines after 76 characters if spark.sql.chunkBase64String.enabled says so.
    return f"TRANSLATE(BASE64(CAST({text} AS BINARY)), '\r\n', '')"
