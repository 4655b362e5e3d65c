"""Names to fields: which value of a source's row a path stands for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

from batchmill.oal.model import MapKey, Path
from batchmill.oal.syntax import Key, PathNode, Word
from batchmill.sources import Field, FieldType, SourceType, suggest


class Spanned(Protocol):
    """Anything with a place in the script."""

    @property
    def start(self) -> int:
        """Where it begins."""

    @property
    def end(self) -> int:
        """Where it ends."""


Report: TypeAlias = Callable[[Spanned, str], None]
"""Notes a fault: where it is, and what is wrong."""

INT = FieldType("int")
LONG = FieldType("long")


def resolve(source: SourceType, node: PathNode, report: Report) -> Path | None:
    """The path that a node stands for; None where it stands for none, which is reported."""
    known: Mapping[str, Field] = source.fields
    owner = source.name
    kind: FieldType | None = None
    required = False
    for part in node.parts:
        if isinstance(part, Key):
            kind = _in_map(part, owner, kind, report)
            required = False
        else:
            if kind is not None and not known:
                report(part, f"{owner} is {words(kind)} and has no fields; drop .{part.text}")
                return None
            found = known.get(part.text)
            if found is None:
                message = f"{owner} has no field {part.text!r}: {suggest(part.text, tuple(known))}"
                report(part, message)
                return None
            kind, required = found.type, found.required
        if kind is None:
            return None
        known = {each.name: each for each in kind.fields}
        owner = f"{owner}.{part.text}" if isinstance(part, Word) else f'{owner}["{part.text}"]'
    if kind is None:
        return None
    parts = tuple(MapKey(each.text) if isinstance(each, Key) else each.text for each in node.parts)
    return _cast(Path(parts, kind, required=required), node, report)


def words(kind: FieldType) -> str:
    """A type, in words."""
    if kind.kind == "list":
        return "a list of strings" if kind.item and kind.item.kind == "string" else f"a {kind}"
    if kind.kind == "map":
        return 'a map (its values are reached with ["key"])'
    if kind.kind == "struct":
        return f"a group of fields ({', '.join(each.name for each in kind.fields[:8])})"
    if kind.kind == "enum":
        return f"one of the enum {kind.name}"
    return f"an {kind}" if kind.kind == "int" else f"a {kind}"


def _in_map(part: Key, owner: str, kind: FieldType | None, report: Report) -> FieldType | None:
    if kind is None or kind.kind != "map":
        report(part, f"{owner} is {words(kind) if kind else 'a source'}: only a map has keys")
        return None
    return kind.item


def _cast(path: Path, node: PathNode, report: Report) -> Path | None:
    if node.cast is None:
        return path
    to = LONG if node.cast.text.endswith("long") else INT
    if path.type.kind == "string":
        return Path(path.parts, to, cast="long" if to is LONG else "int")
    if path.type.is_whole and "->" not in node.cast.text and to.kind in ("long", path.type.kind):
        return path  # it is that already, and a wider type holds the same numbers
    report(
        node.cast,
        f"a cast reads a whole number from a string, but {path.text} is {words(path.type)}: "
        "drop the cast",
    )
    return None
