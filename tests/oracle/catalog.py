"""The catalog of sources, as a copy beside this module: tests run without the shared folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

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
