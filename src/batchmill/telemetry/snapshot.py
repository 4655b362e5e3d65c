"""Snapshots of counters, and how they are written as JSON."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence, Set
from typing import Any


class Snapshot:
    """What a component counted up to one moment; a frozen dataclass inherits this."""

    __slots__ = ()

    def as_json(self) -> dict[str, Any]:
        """All fields and properties as plain data, for ``json.dumps``.

        Classes are written with their module, members of enums by their value; a key of several
        parts has dots between them. A number that JSON does not have (infinity) is None.
        """
        return _object(self)


def _object(value: Any) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(value)]
    names += [
        name
        for kind in type(value).__mro__
        for name, member in vars(kind).items()
        if isinstance(member, property) and not name.startswith("_")
    ]
    return {name: _plain(getattr(value, name)) for name in names}


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.name.lower() if isinstance(value, int) else _plain(value.value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if dataclasses.is_dataclass(value):
        return _object(value)
    if isinstance(value, Mapping):
        return {_key(key): _plain(part) for key, part in value.items()}
    if isinstance(value, Sequence | Set):
        return [_plain(part) for part in value]
    return str(value)


def _key(key: Any) -> str:
    return ".".join(map(_key, key)) if isinstance(key, tuple) else str(_plain(key))
