"""Paths and conditions, which definitions of metrics are made of.

They do not depend on the language, so that another front end can build them, too. Each is frozen,
hashable, and equal to another exactly when it means the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from batchmill.sources import FieldType

Cast: TypeAlias = Literal["long", "int"]
Operator: TypeAlias = Literal[
    "==", "!=", ">", "<", ">=", "<=", "like", "in", "contain", "not contain"
]
Scalar: TypeAlias = bool | int | str
Literal_: TypeAlias = Scalar | tuple[Scalar, ...] | None
"""What a condition compares with: None stands for ``null``, a tuple for the list after ``in``."""

_ESCAPES = str.maketrans({'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"})


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """A place in a script; lines and columns count from 1."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True, slots=True)
class MapKey:
    """A step into a map: ``["key"]``."""

    key: str


@dataclass(frozen=True, slots=True)
class Path:
    """The path to a value in a row: field names, and keys of maps.

    ``tag["k"]`` has the parts ``("tag", MapKey("k"))``.
    """

    parts: tuple[str | MapKey, ...]
    type: FieldType = field(hash=False)
    """The type of the value, after the cast."""
    cast: Cast | None = None
    """The type that a string is read as; null where it is not such a number, or too big."""
    required: bool = False
    """Whether every valid row has it, so that it is never null."""

    @property
    def text(self) -> str:
        """The canonical form in a script."""
        shown = "".join(
            f"[{quote(part.key)}]" if isinstance(part, MapKey) else f".{part}"
            for part in self.parts
        )
        return (f"(str->{self.cast})" if self.cast else "") + shown[1:]

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Condition:
    """One comparison of a row's value with a literal.

    False where the value is null, unless the literal is null: ``== null`` and ``!= null``.
    An enum's literal is the name of its value.
    """

    path: Path
    op: Operator
    literal: Literal_

    @property
    def text(self) -> str:
        """The canonical form in a script."""
        space = "" if self.op in ("==", "!=", ">", "<", ">=", "<=") else " "
        if isinstance(self.literal, tuple):
            value = "[" + ",".join(map(self._show, self.literal)) + "]"
        else:
            value = self._show(self.literal)
        return f"{self.path.text}{space}{self.op}{space}{value}"

    def __str__(self) -> str:
        return self.text

    def _show(self, value: Scalar | None) -> str:
        if value is None:
            return "null"
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, int):
            return str(value)
        kind = self.path.type
        return f"{kind.name}.{value}" if kind.kind == "enum" else quote(value)


Where: TypeAlias = tuple[Condition, ...]
"""Conditions that must all hold, in canonical order."""


def all_of(conditions: Iterable[Condition]) -> Where:
    """The conditions without repetitions, in canonical order."""
    return tuple(sorted(set(conditions), key=lambda condition: condition.text))


def measured(where: Where, value: Path | None) -> Where:
    """``where`` and that ``value`` is not null; just ``where`` if that follows from it."""
    if value is None or value.required:
        return where
    for condition in where:
        # Every comparison except `== null` is false on null.
        is_null_test = condition.op == "==" and condition.literal is None
        if condition.path == value and not is_null_test:
            return where
    return all_of((*where, Condition(value, "!=", None)))


def quote(text: str) -> str:
    """A string as the language writes it."""
    return f'"{text.translate(_ESCAPES)}"'
