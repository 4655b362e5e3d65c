"""The catalog of sources, as a copy beside this module; entity ids and time buckets."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Literal

# A row of a source: structs are dicts, maps are dicts, lists are lists, null is None. "time" is the
# event's own start time, a datetime with a zone.
Row = dict[str, Any]

# The column of a source's field that is named like the event's time.
TIME_FIELD_COLUMN = "time_"

_FILE = Path(__file__).with_name("catalog.json")


@dataclass(frozen=True)
class Catalog:
    entities: dict[str, dict[str, str]]
    fields: dict[str, dict[str, str]]
    enums: dict[str, list[str]]
    structs: dict[str, dict[str, str]]


@cache
def load_catalog() -> Catalog:
    """The catalog, read once."""
    raw = json.loads(_FILE.read_text(encoding="utf-8"))
    return Catalog(
        entities={name: source["entity"] for name, source in raw["sources"].items()},
        fields={name: source["fields"] for name, source in raw["sources"].items()},
        enums=raw["enums"],
        structs=raw["structs"],
    )


def column_of(field: str) -> str:
    """Where a source's field is found in a row."""
    return TIME_FIELD_COLUMN if field == "time" else field


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
