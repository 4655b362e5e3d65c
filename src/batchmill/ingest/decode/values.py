"""The value of an attribute as text: a text as it is, anything else as its JSON."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterable
from enum import Enum, auto
from typing import Any


class Kind(Enum):
    """What an `AnyValue` holds."""

    EMPTY = auto()
    TEXT = auto()
    BOOL = auto()
    INT = auto()
    DOUBLE = auto()
    BYTES = auto()
    ARRAY = auto()
    """Comes as an iterable of values."""
    MAP = auto()
    """Comes as an iterable of pairs of key and value."""


Opened = tuple[Kind, Any]
Open = Callable[[Any], Opened]
"""What a value holds, be it a protobuf message or an object of JSON."""


class TooDeep(Exception):
    """A value is nested past the limit."""


def text_of(value: Any, opened: Open, longest: int, deepest: int) -> str | None:
    """``value`` as text, None if it is nested too deep.

    It may come out longer than ``longest``, and is then not whole: no more is written than it
    takes to see that.
    """
    kind, held = opened(value)
    if kind is Kind.TEXT:
        return str(held)
    if kind is Kind.EMPTY:
        return ""
    if kind is not Kind.ARRAY and kind is not Kind.MAP:
        return plain(kind, held)
    parts: list[str] = []
    try:
        _write(kind, held, opened, parts.append, longest + 1, deepest)
    except TooDeep:
        return None
    return "".join(parts)


def plain(kind: Kind, held: Any) -> str:
    """A single value, but no text, as text."""
    if kind is Kind.BOOL:
        return "true" if held else "false"
    if kind is Kind.INT:
        return str(held)
    if kind is Kind.BYTES:
        return base64.b64encode(held).decode()
    if math.isfinite(held):
        return repr(held)
    return "NaN" if math.isnan(held) else "Infinity" if held > 0 else "-Infinity"


def _write(
    kind: Kind, held: Any, opened: Open, put: Callable[[str], None], room: int, depth: int
) -> int:
    """Write the JSON of what was opened while there is room; return the room left."""
    if kind is Kind.ARRAY or kind is Kind.MAP:
        if depth == 0:
            raise TooDeep
        return _write_many(kind, held, opened, put, room, depth - 1)
    if kind is Kind.TEXT:
        text = _quoted(held, room)
    elif kind is Kind.EMPTY:
        text = "null"
    elif kind is Kind.BYTES:
        text = f'"{plain(kind, held[:room])}"'
    else:
        text = plain(kind, held)
        if kind is Kind.DOUBLE and not math.isfinite(held):
            text = f'"{text}"'  # JSON has no such numbers
    put(text)
    return room - len(text)


def _write_many(
    kind: Kind, held: Iterable[Any], opened: Open, put: Callable[[str], None], room: int, depth: int
) -> int:
    start, end = "[]" if kind is Kind.ARRAY else "{}"
    put(start)
    room -= 1
    comma = ""
    for each in held:
        if room <= 0:
            return room
        if kind is Kind.MAP:
            key, value = each
            before = f"{comma}{_quoted(key, room)}:"
        else:
            before, value = comma, each
        put(before)
        room = _write(*opened(value), opened, put, room - len(before), depth)
        comma = ","
    put(end)
    return room - 1


def _quoted(text: str, room: int) -> str:
    return json.dumps(text[: max(room, 0)], ensure_ascii=False)
