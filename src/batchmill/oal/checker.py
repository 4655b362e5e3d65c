"""Checks statements against the catalog: names, types and arguments. Turns them into metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, cast

from batchmill.oal.errors import OalError
from batchmill.oal.functions import FUNCTIONS, Arg, Function, Param
from batchmill.oal.lexer import ScriptText, Word
from batchmill.oal.metric import Metric
from batchmill.oal.model import Condition, MapKey, Operator, Path, Scalar
from batchmill.oal.parser import (
    ArgNode,
    Comparison,
    Definition,
    Key,
    ListNode,
    LiteralNode,
    PathNode,
)
from batchmill.sources import Catalog, Field, FieldType, SourceType, suggest
from batchmill.wording import count_of

_INT, _LONG = FieldType("int"), FieldType("long")
_MEASURED = {"whole": "a whole number", "number": "a number"}
_PARAMS = {
    "condition": "a condition such as status == true",
    "text": "a field that is a string",
    "label": "a field that is a string, an enum, a bool or a whole number",
    "bool": "a field that is true or false",
    "whole": "a field that is a whole number",
    "count": "a whole number from 1 up",
}
"""What an argument must be, for messages."""
_PARAM_TYPES = {
    "text": ("string",),
    "label": ("string", "layer", "enum", "bool", "int", "long"),
    "bool": ("bool",),
    "whole": ("int", "long"),
}
"""The types of the fields that an argument may be."""
_LITERALS = {
    "bool": "true or false",
    "int": "a number",
    "string": "a string",
    "enum": "an enum value",
    "null": "null",
}


class Node(Protocol):
    """Anything with a place in the script."""

    @property
    def start(self) -> int:
        """Where it begins."""

    @property
    def end(self) -> int:
        """Where it ends."""


class Checker:
    """Checks the definitions of one script; what is wrong goes to ``errors``.

    Each method returns None for what is wrong, after reporting it.
    """

    def __init__(self, script: ScriptText, catalog: Catalog, errors: list[OalError]) -> None:
        self._script = script
        self._catalog = catalog
        self._errors = errors

    def metric(self, node: Definition) -> Metric | None:
        """The metric that a statement defines; None if it does not, with every reason reported."""
        before = len(self._errors)
        source = self._catalog.sources.get(node.source.text)
        if source is None:
            known = suggest(node.source.text, tuple(self._catalog.sources))
            self.report(node.source, f"unknown source {node.source.text!r}: {known}")
        function = FUNCTIONS.get(node.function.text)
        if function is None:
            hint = _known_functions(node.function.text)
            self.report(node.function, f"unknown function {node.function.text!r}: {hint}")
        else:
            self._check_arg_count(function, node)
        if source is None:
            return None
        value = self._value(source, node.value, function)
        filters = [self._condition(source, comparison) for comparison in node.filters]
        if function is None or not function.takes(len(node.args)):
            return None
        params = zip(function.params, node.args, strict=False)
        args = [self._argument(source, param, arg) for param, arg in params]
        if node.decorator is not None and not node.decorator.text.strip():
            self.report(node.decorator, "expected the name of a decorator, but it is blank")
        if len(self._errors) > before:
            return None
        return Metric(
            name=node.name.text,
            source=node.source.text,
            value=value,
            filters=tuple(condition for condition in filters if condition is not None),
            function=node.function.text,
            args=tuple(arg for arg in args if arg is not None),
            decorator=node.decorator.text if node.decorator else None,
            where=self._script.position(node.name.start),
        )

    def report(self, at: Node, message: str) -> None:
        """Note an error."""
        self._errors.append(self._script.error(at.start, at.end, message))

    def _value(self, source: SourceType, node: PathNode, function: Function | None) -> Path | None:
        value = self._path(source, node) if node.parts else None
        if function is not None and not (value is None and node.parts):
            self._check_measurable(function, source, value, node)
        return value

    def _check_measurable(
        self, function: Function, source: SourceType, value: Path | None, node: PathNode
    ) -> None:
        """Report a value in ``from(...)`` that the function cannot measure."""
        if function.measures == "anything":
            return
        wanted = f"{function.name}() measures {_MEASURED[function.measures]}"
        if value is None:
            names = [field.name for field in source.fields.values() if field.type.is_number][:8]
            fields = f": one of {', '.join(names)}" if names else ""
            self.report(node, f"{wanted}: expected a field instead of *{fields}")
            return
        if value.type.is_number if function.measures == "number" else value.type.is_whole:
            return
        hint = ""
        if value.type.kind == "string":
            hint = f"; read a number from it with from((str->long){source.name}.{value.text})"
        elif value.type.kind == "double" and function.instead:
            hint = f"; use {function.instead}()"
        self.report(node, f"{wanted}, but {value.text} is {_in_words(value.type)}{hint}")

    def _check_arg_count(self, function: Function, node: Definition) -> None:
        if function.takes(len(node.args)):
            return
        names = ", ".join(f"[{p.name}]" if p.optional else p.name for p in function.params)
        call = Word(node.function.text, node.function.start, node.call_end)
        given = f"{count_of(len(node.args), 'argument')} given to {function.name}()"
        expected = f"{function.name}({names})" if names else f"none: {function.name}()"
        self.report(call, f"{given}, expected {expected}")

    def _argument(self, source: SourceType, param: Param, node: ArgNode) -> Arg | None:
        if param.kind == "condition" and isinstance(node, Comparison):
            return self._condition(source, node)
        if param.kind == "count" and isinstance(node, LiteralNode) and node.kind == "int":
            return self._count(param, node)
        why = ""
        if param.kind in _PARAM_TYPES and isinstance(node, PathNode):
            path = self._path(source, node)
            if path is None or path.type.kind in _PARAM_TYPES[param.kind]:
                return path
            why = f", but {path.text} is {_in_words(path.type)}"
        self.report(node, f"the argument {param.name}: expected {_PARAMS[param.kind]}{why}")
        return None

    def _count(self, param: Param, node: LiteralNode) -> int | None:
        value = cast("int", node.value)
        if 1 <= value <= param.most:
            return value
        most = f" to {param.most}" if param.most < 2**63 - 1 else " up"
        self.report(node, f"{param.name} must be a whole number from 1{most}, not {value}")
        return None

    def _condition(self, source: SourceType, node: Comparison) -> Condition | None:
        path = self._path(source, node.path)
        if path is None:
            return None
        op = cast("Operator", node.op.text)
        right = node.right
        if isinstance(right, LiteralNode) and right.kind == "null":
            return Condition(path, op, None)
        if not self._is_comparable(path, node):
            return None
        if isinstance(right, ListNode):
            values = [self._literal(path, item) for item in right.items]
            known = {value for value in values if value is not None}
            if not known or None in values:
                return None
            ordered = sorted(known, key=lambda value: (str(type(value)), value))
            return Condition(path, op, tuple(ordered))
        value = self._literal(path, right)
        return None if value is None else Condition(path, op, value)

    def _is_comparable(self, path: Path, node: Comparison) -> bool:
        """Whether values of the path's type can be compared by that operator."""
        kind, op = path.type, node.op.text
        if op in (">", "<", ">=", "<="):
            fits, wanted = kind.is_number, "a number"
        elif op == "like":
            fits, wanted = kind.kind == "string", "a string"
        elif op in ("contain", "not contain"):
            of_strings = kind.item is not None and kind.item.kind == "string"
            fits, wanted = kind.kind == "list" and of_strings, "a list of strings"
        else:
            fits, wanted = kind.kind not in ("list", "map", "struct"), "a single value"
        if not fits:
            hint = ""
            if kind.kind == "string" and wanted == "a number":
                hint = f"; read a number from it with (str->long){path.text}"
            elif kind.kind == "list" and wanted == "a single value":
                hint = "; ask for a member with contain"
            message = f"{op} needs {wanted}, but {path.text} is {_in_words(kind)}{hint}"
            self.report(node.op, message)
        return fits

    def _literal(self, path: Path, node: LiteralNode) -> Scalar | None:
        """The value that a literal stands for when it is compared with that path."""
        kind = path.type
        if node.kind == "enum":
            return self._enum_value(path, node)
        if kind.kind == "enum":
            names = ", ".join(f"{kind.name}.{name}" for name in kind.values[:12])
            expected, fits = f"one of {names}", False
        elif kind.kind == "layer":
            expected, fits = 'a layer such as "GENERAL" or Layer.GENERAL', node.kind == "string"
        elif kind.kind == "bool":
            expected, fits = "true or false", node.kind == "bool"
        elif kind.is_number:
            expected, fits = "a whole number", node.kind == "int"
        else:
            expected, fits = "a string in double quotes", node.kind == "string"
            if node.kind == "int":
                expected += f", or a cast in front: (str->long){path.text}"
        if fits:
            return cast("Scalar", node.value)
        self._report_literal(node, path, expected)
        return None

    def _enum_value(self, path: Path, node: LiteralNode) -> str | None:
        enum, value = cast("tuple[Word, Word]", node.value)
        kind = path.type
        if kind.kind == "layer" and enum.text == "Layer":
            return value.text
        if kind.kind != "enum":
            expected = {"bool": "true or false", "layer": "Layer.NAME", "string": "a string"}
            self._report_literal(node, path, expected.get(kind.kind, "a whole number"))
        elif enum.text != kind.name:
            hint = "" if enum.text in self._catalog.enums else f" (there is no enum {enum.text!r})"
            message = f"{path.text} is {_in_words(kind)}: expected {kind.name}.NAME{hint}"
            self.report(enum, message)
        elif value.text not in kind.values:
            known = suggest(value.text, kind.values)
            self.report(value, f"the enum {kind.name} has no value {value.text!r}: {known}")
        else:
            return value.text
        return None

    def _report_literal(self, node: LiteralNode, path: Path, expected: str) -> None:
        is_what = f"{path.text} is {_in_words(path.type)}"
        self.report(node, f"{is_what}: expected {expected}, but found {_LITERALS[node.kind]}")

    def _path(self, source: SourceType, node: PathNode) -> Path | None:
        """The value of a source's row that a path stands for."""
        members = source.fields
        owner = source.name
        kind: FieldType | None = None
        required = False
        for part in node.parts:
            if isinstance(part, Key):
                kind, required = self._map_item(part, owner, kind), False
                owner = f'{owner}["{part.text}"]'
            else:
                field = self._field(part, owner, kind, members)
                kind, required = (
                    (None, False) if field is None else (field.type, field.always_there)
                )
                owner = f"{owner}.{part.text}"
            if kind is None:
                return None
            members = {member.name: member for member in kind.fields}
        if kind is None:
            return None
        parts = tuple(
            MapKey(part.text) if isinstance(part, Key) else part.text for part in node.parts
        )
        return self._cast(Path(parts, kind, required=required), node)

    def _field(
        self, part: Word, owner: str, kind: FieldType | None, members: Mapping[str, Field]
    ) -> Field | None:
        if kind is not None and not members:
            message = f"{owner} is {_in_words(kind)} and has no fields; drop .{part.text}"
            self.report(part, message)
            return None
        field = members.get(part.text)
        if field is None:
            known = suggest(part.text, tuple(members))
            self.report(part, f"{owner} has no field {part.text!r}: {known}")
        return field

    def _map_item(self, part: Key, owner: str, kind: FieldType | None) -> FieldType | None:
        if kind is None or kind.kind != "map":
            is_what = _in_words(kind) if kind else "a source"
            self.report(part, f"{owner} is {is_what}: only a map has keys")
            return None
        return kind.item

    def _cast(self, path: Path, node: PathNode) -> Path | None:
        if node.cast is None:
            return path
        to = _LONG if node.cast.text.endswith("long") else _INT
        if path.type.kind == "string":
            return Path(path.parts, to, cast="long" if to is _LONG else "int")
        is_plain = "->" not in node.cast.text
        if path.type.is_whole and is_plain and to.kind in ("long", path.type.kind):
            return path  # it is that already, and a wider type holds the same numbers
        self.report(
            node.cast,
            f"a cast reads a whole number from a string, but {path.text} is "
            f"{_in_words(path.type)}: drop the cast",
        )
        return None


def _in_words(kind: FieldType) -> str:
    """A type, for messages."""
    if kind.kind == "list":
        return "a list of strings" if kind.item and kind.item.kind == "string" else f"a {kind}"
    if kind.kind == "map":
        return 'a map (its values are reached with ["key"])'
    if kind.kind == "struct":
        return f"a group of fields ({', '.join(field.name for field in kind.fields[:8])})"
    if kind.kind == "enum":
        return f"one of the enum {kind.name}"
    return f"an {kind}" if kind.kind == "int" else f"a {kind}"


def _known_functions(name: str) -> str:
    # There are few enough functions to name them all, the likely ones first.
    likely = suggest(name, tuple(FUNCTIONS)).partition("?")
    hint = f"{likely[0]}? " if likely[1] else ""
    return f"{hint}The functions are {', '.join(FUNCTIONS)}"
