"""The fields of a user's frozen dataclass, read from its annotations."""

from __future__ import annotations

import dataclasses
import enum
import sys
import types
import typing
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from batchmill.errors import ConfigError
from batchmill.sources.types import BOOL, DOUBLE, LONG, STRING, TIME_COLUMN, Field, FieldType

ALLOWED = (
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


def fields_of(cls: type, names: Mapping[str, Any]) -> tuple[Field, ...]:
    """The fields of an event type; ``names`` are those around the class's definition."""
    if TIME_COLUMN in (hints := _hints(cls, names)) and _is_time(hints[TIME_COLUMN]):
        del hints[TIME_COLUMN]
    if not hints:
        raise ConfigError("@source", cls, "a class with at least one field")
    return tuple(_field(cls, name, hint, names, ()) for name, hint in hints.items())


def _hints(cls: type, names: Mapping[str, Any]) -> dict[str, Any]:
    """The annotation of each field of a frozen dataclass."""
    if not isinstance(cls, type) or not dataclasses.is_dataclass(cls):
        raise ConfigError("@source", cls, "a dataclass: put @dataclass(frozen=True) below it")
    parameters: Any = cls.__dataclass_params__  # type: ignore[attr-defined]
    if not parameters.frozen:
        raise ConfigError(
            "@source", cls, "frozen, since events do not change: @dataclass(frozen=True)"
        )
    scope = {**vars(sys.modules[cls.__module__]), **names}
    try:
        hints = typing.get_type_hints(cls, scope)
    except NameError as error:
        raise ConfigError(
            cls.__name__, str(error), "annotated with names that are defined by then"
        ) from error
    return {each.name: hints[each.name] for each in dataclasses.fields(cls)}


def _field(
    cls: type, name: str, hint: object, names: Mapping[str, Any], outer: tuple[type, ...]
) -> Field:
    if not name.isascii():
        raise ConfigError(
            f"{cls.__name__}.{name}", name, "a name of ASCII letters, digits and underscores"
        )
    hint, optional = _without_none(hint)
    kind = _type(hint, names, (*outer, cls))
    if kind is None:
        raise ConfigError(f"{cls.__name__}.{name}", hint, ALLOWED)
    required = kind.is_number and not optional and not outer
    return Field(name, kind, required=required, column=name if outer else "")


def _type(hint: object, names: Mapping[str, Any], outer: tuple[type, ...]) -> FieldType | None:
    for known, kind in _PLAIN.items():
        if hint == known:
            return kind
    if not isinstance(hint, type) or hint in outer:
        return None
    if issubclass(hint, enum.Enum):
        return FieldType("enum", hint.__name__, values=tuple(hint.__members__))
    if dataclasses.is_dataclass(hint):
        members = _hints(hint, names).items()
        fields = tuple(_field(hint, name, each, names, outer) for name, each in members)
        return FieldType("struct", hint.__name__, fields=fields)
    return None


def _without_none(hint: object) -> tuple[object, bool]:
    """A type, and whether None was allowed beside it."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        others = [each for each in typing.get_args(hint) if each is not type(None)]
        if len(others) == 1:
            return others[0], True
    return hint, False


def _is_time(hint: object) -> bool:
    return _without_none(hint)[0] is datetime
