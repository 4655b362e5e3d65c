"""Entity ids and time buckets."""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from typing import Literal

from tests.oracle.catalog import Row, load_catalog

Grain = Literal["minute", "hour", "day"]

# Minutes of a bucket, and how its number is written.
GRAINS: dict[Grain, tuple[int, str]] = {
    "minute": (1, "%Y%m%d%H%M"),
    "hour": (60, "%Y%m%d%H"),
    "day": (1440, "%Y%m%d"),
}

SERVICE_NAME_LIMIT = 70
INSTANCE_NAME_LIMIT = 70
ENDPOINT_NAME_LIMIT = 150

# Layers of a rule that are no field of the row.
_FIXED_LAYERS = {"=virtual": "VIRTUAL_", "=normal": "GENERAL"}


def bucket_of(time: datetime, grain: Grain) -> int:
    """The bucket that a moment falls into, in UTC whatever its zone."""
    if time.tzinfo is None:
        raise ValueError(f"a time without a zone: {time}")
    moment = time.astimezone(UTC)
    return int(moment.strftime(GRAINS[grain][1]))


def encode(name: str | None, limit: int) -> str:
    """The name as ids hold it: cut, then base64 of UTF-8."""
    return base64.b64encode((name or "")[:limit].encode("utf-8")).decode("ascii")


def is_normal(layer: str | None) -> bool:
    """Whether services of this layer are real ones; a missing layer is an undefined one."""
    return layer is not None and layer != "UNDEFINED" and not layer.startswith("VIRTUAL_")


def service_id(name: str | None, layer: str | None) -> str:
    """The id of a service; a name that is blank once it is cut is `_blank`."""
    kept = (name or "")[:SERVICE_NAME_LIMIT]
    return (
        f"{encode(kept if kept.strip() else '_blank', SERVICE_NAME_LIMIT)}.{int(is_normal(layer))}"
    )


def instance_id(service: str | None, layer: str | None, name: str | None) -> str:
    """The id of a service's instance."""
    return f"{service_id(service, layer)}_{encode(name, INSTANCE_NAME_LIMIT)}"


def endpoint_id(service: str | None, layer: str | None, name: str | None) -> str:
    """The id of a service's endpoint."""
    return f"{service_id(service, layer)}_{encode(name, ENDPOINT_NAME_LIMIT)}"


def entity_of(source: str, row: Row) -> str:
    """The entity id of a row, by the catalog's rule for its source."""
    rule = load_catalog().entities[source]
    kind = rule["kind"]
    if kind == "given":
        given = row.get(rule["field"])
        if given is None:
            raise ValueError(f"a {source} without {rule['field']}: nothing says whose it is")
        return str(given)
    if kind in ("service", "instance", "endpoint"):
        return _side(kind, rule, row, "")
    side = kind.removesuffix("_relation")
    return "-".join(_side(side, rule, row, prefix, "-") for prefix in ("source_", "dest_"))


def _side(kind: str, rule: dict[str, str], row: Row, prefix: str, joint: str = "_") -> str:
    """The id of one entity; `joint` sets the endpoint's name off, which differs in relations."""
    layer = rule[prefix + "layer"]
    service = row.get(rule[prefix + "service"])
    layer_name = _FIXED_LAYERS[layer] if layer in _FIXED_LAYERS else row.get(layer)
    if kind == "service":
        return service_id(service, layer_name)
    name = row.get(rule[prefix + "name"])
    if kind == "instance":
        return instance_id(service, layer_name, name)
    return f"{service_id(service, layer_name)}{joint}{encode(name, ENDPOINT_NAME_LIMIT)}"
