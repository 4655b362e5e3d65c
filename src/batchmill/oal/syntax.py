"""The syntax tree: what the parser gives to the checker.

Every node knows its characters in the script, so that errors can point at them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias


@dataclass(frozen=True, slots=True)
class Word:
    """A name, or the content of a string."""

    text: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Key(Word):
    """A step into a map: ``["key"]``."""


@dataclass(frozen=True, slots=True)
class PathNode:
    """A path to a value; without parts it is ``*``."""

    cast: Word | None
    """``long`` or ``int``; with ``str->`` in its text where the script has that."""
    parts: tuple[Word, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class LiteralNode:
    """A value in the script; that of an enum is the pair of both names."""

    kind: Literal["bool", "int", "string", "enum", "null"]
    value: bool | int | str | tuple[Word, Word] | None
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ListNode:
    """The list after ``in``."""

    items: tuple[LiteralNode, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """A path compared with a literal or a list."""

    path: PathNode
    op: Word
    right: LiteralNode | ListNode

    @property
    def start(self) -> int:
        """Where it begins."""
        return self.path.start

    @property
    def end(self) -> int:
        """Where it ends."""
        return self.right.end


ArgNode: TypeAlias = Comparison | PathNode | LiteralNode


@dataclass(frozen=True, slots=True)
class Definition:
    """A statement that defines a metric."""

    name: Word
    source: Word
    value: PathNode
    filters: tuple[Comparison, ...]
    function: Word
    args: tuple[ArgNode, ...]
    call_end: int
    """Where the function's closing parenthesis ends."""
    decorator: Word | None


@dataclass(frozen=True, slots=True)
class Disabling:
    """A statement that removes a metric."""

    name: Word


Statement: TypeAlias = Definition | Disabling
