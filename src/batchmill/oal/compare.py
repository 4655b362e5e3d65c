"""Comparisons that make sense: whether a field can be compared like this, and with that."""

from __future__ import annotations

from typing import cast

from batchmill.oal.model import Condition, Operator, Path, Scalar
from batchmill.oal.resolve import Report, resolve, words
from batchmill.oal.syntax import Comparison, ListNode, LiteralNode, Word
from batchmill.sources import Catalog, SourceType, suggest

_FOUND = {
    "bool": "true or false",
    "int": "a number",
    "string": "a string",
    "enum": "an enum value",
    "null": "null",
}


def condition(
    catalog: Catalog, source: SourceType, node: Comparison, report: Report
) -> Condition | None:
    """The condition that a comparison stands for; None where it makes no sense, as reported."""
    path = resolve(source, node.path, report)
    if path is None:
        return None
    op = cast("Operator", node.op.text)
    right = node.right
    if isinstance(right, LiteralNode) and right.kind == "null":
        return Condition(path, op, None)
    if not _fits(path, node, report):
        return None
    if isinstance(right, ListNode):
        values = [_value(catalog, path, each, report) for each in right.items]
        known = {each for each in values if each is not None}
        if len(known) == 0 or None in values:
            return None
        return Condition(path, op, tuple(sorted(known, key=lambda each: (str(type(each)), each))))
    value = _value(catalog, path, right, report)
    return None if value is None else Condition(path, op, value)


def _fits(path: Path, node: Comparison, report: Report) -> bool:
    """Whether values of that type can be compared by that operator."""
    kind, op = path.type, node.op.text
    if op in (">", "<", ">=", "<="):
        fine, wanted = kind.is_number, "a number"
    elif op == "like":
        fine, wanted = kind.kind == "string", "a string"
    elif op in ("contain", "not contain"):
        of_strings = kind.item is not None and kind.item.kind == "string"
        fine, wanted = kind.kind == "list" and of_strings, "a list of strings"
    else:
        fine, wanted = kind.kind not in ("list", "map", "struct"), "a single value"
    if not fine:
        hint = ""
        if kind.kind == "string" and wanted == "a number":
            hint = f"; read a number from it with (str->long){path.text}"
        elif kind.kind == "list" and wanted == "a single value":
            hint = "; ask for a member with contain"
        report(node.op, f"{op} needs {wanted}, but {path.text} is {words(kind)}{hint}")
    return fine


def _value(catalog: Catalog, path: Path, node: LiteralNode, report: Report) -> Scalar | None:
    """What a literal stands for beside that path."""
    kind = path.type
    if node.kind == "enum":
        return _enum_value(catalog, path, node, report)
    if kind.kind == "enum":
        shown = ", ".join(f"{kind.name}.{each}" for each in kind.values[:12])
        expected, fine = f"one of {shown}", False
    elif kind.kind == "layer":
        expected, fine = 'a layer such as "GENERAL" or Layer.GENERAL', node.kind == "string"
    elif kind.kind == "bool":
        expected, fine = "true or false", node.kind == "bool"
    elif kind.is_number:
        expected, fine = "a whole number", node.kind == "int"
    else:
        expected, fine = "a string in double quotes", node.kind == "string"
        if node.kind == "int":
            expected += f", or a cast in front: (str->long){path.text}"
    if fine:
        return cast("Scalar", node.value)
    report(
        node, f"{path.text} is {words(kind)}: expected {expected}, but found {_FOUND[node.kind]}"
    )
    return None


def _enum_value(catalog: Catalog, path: Path, node: LiteralNode, report: Report) -> str | None:
    enum, value = cast("tuple[Word, Word]", node.value)
    kind = path.type
    if kind.kind == "layer" and enum.text == "Layer":
        return value.text
    if kind.kind != "enum":
        expected = {"bool": "true or false", "layer": "Layer.NAME", "string": "a string"}.get(
            kind.kind, "a whole number"
        )
        message = f"{path.text} is {words(kind)}: expected {expected}, but found an enum value"
        report(node, message)
        return None
    if enum.text != kind.name:
        there = "" if enum.text in catalog.enums else f" (there is no enum {enum.text!r})"
        report(enum, f"{path.text} is {words(kind)}: expected {kind.name}.NAME{there}")
        return None
    if value.text not in kind.values:
        known = suggest(value.text, kind.values)
        report(value, f"the enum {kind.name} has no value {value.text!r}: {known}")
        return None
    return value.text
