"""What a row says: values at a path, casts, and whether a condition holds."""

from __future__ import annotations

import re
from typing import Any

from tests.oracle.catalog import Row, column_of
from tests.oracle.script import Condition, Field

_INTEGER = re.compile(r"[+-]?[0-9]+")
_BITS = {"int": 32, "long": 64}


def parse_integer(text: str | None, bits: int = 64) -> int | None:
    """The integer that a text is, or None: no spaces, no fraction, nothing out of range."""
    if text is None or _INTEGER.fullmatch(text) is None:
        return None
    return _within(int(text), bits)


def value_at(row: Row, field: Field) -> Any:
    """The value at a field's path, cast; None where anything on the way is null or absent."""
    value: Any = row
    for depth, step in enumerate(field.path):
        name = column_of(step.name) if depth == 0 else step.name
        value = _micros(row) if name == "latencyMicros" else value.get(name)
        if step.key is not None and value is not None:
            value = value.get(step.key)
        if value is None:
            return None
    return _cast(value, field.cast)


def _micros(row: Row) -> int | None:
    """The latency in microseconds, from milliseconds where the row has none of its own."""
    micros: int | None = row.get("latencyMicros")
    if micros is not None:
        return micros
    ms = row.get("latency", row.get("rpcLatency"))
    return None if ms is None else ms * 1000


def holds(row: Row, condition: Condition) -> bool:
    """Whether a row meets a condition. Null meets `== null` and nothing else."""
    value = value_at(row, condition.field)
    literal, operator = condition.literal, condition.operator
    if literal is None:
        return (value is None) == (operator == "==")
    if value is None:
        return False
    match operator:
        case "==":
            return _same(value, literal)
        case "!=":
            return not _same(value, literal)
        case "in":
            return any(_same(value, item) for item in _items(literal))
        case "like":
            return _like(value, str(literal))
        case "contain":
            return literal in value
        case "not contain":
            return literal not in value
        case _:
            return _ordered(value, operator, literal)


def passes(row: Row, conditions: tuple[Condition, ...]) -> bool:
    """Whether a row meets every condition."""
    return all(holds(row, condition) for condition in conditions)


def _cast(value: Any, cast: str | None) -> Any:
    if cast is None:
        return value
    bits = _BITS[cast.removeprefix("str->")]
    if isinstance(value, str):
        return parse_integer(value, bits)
    return _within(int(value), bits)


def _within(number: int, bits: int) -> int | None:
    return number if -(1 << bits - 1) <= number < 1 << bits - 1 else None


def _same(value: Any, literal: Any) -> bool:
    # True == 1 in Python, not in the language.
    return isinstance(value, bool) == isinstance(literal, bool) and bool(value == literal)


def _items(literal: Any) -> tuple[Any, ...]:
    return literal if isinstance(literal, tuple) else (literal,)


def _like(value: str, pattern: str) -> bool:
    starts, ends = pattern.startswith("%"), pattern.endswith("%")
    if starts and ends:
        return pattern[1:-1] in value
    if starts:
        return value.endswith(pattern[1:])
    return ends and value.startswith(pattern[:-1])


def _ordered(value: Any, operator: str, literal: Any) -> bool:
    match operator:
        case ">":
            return bool(value > literal)
        case "<":
            return bool(value < literal)
        case ">=":
            return bool(value >= literal)
        case "<=":
            return bool(value <= literal)
    raise ValueError(f"no such operator: {operator}")
