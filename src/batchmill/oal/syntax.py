"""What a script says before anybody asks whether it makes sense: the parser's tree.

Every node knows the characters it stands for, so that a later complaint can point at them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias


@dataclass(frozen=True, slots=True)
class Word:
    """A name, or what a string says."""

    text: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Key:
    """A step into a map: ``["key"]``."""

    text: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class PathNode:
    """A way to a value; no parts stand for ``*``."""

    cast: Word | None
    """``long`` or ``int``; with ``str->`` in its text where the script has that."""
    parts: tuple[Word | Key, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class LiteralNode:
    """A value that stands in the script; an enum's is the pair of both names."""

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
    """A path compared with something."""

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
