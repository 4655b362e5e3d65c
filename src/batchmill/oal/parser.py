"""Parses tokens into a syntax tree, a statement at a time; after an error it goes on with the next.

Every node of the tree knows its characters in the script, so that errors can point at them. Nothing
in the language nests without limit, so the parser does not recurse.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from batchmill.oal.errors import OalError
from batchmill.oal.lexer import Cursor, Lexer, ScriptText, StatementError, Token, Word, word


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


CASTS = ("str->long", "long", "str->int", "int")

_OPERATORS = "==, !=, >, <, >=, <=, like, in, contain or not contain"
_VALUE = (
    "true, false, a whole number, a string in double quotes, "
    "an enum value such as DetectPoint.SERVER, or null"
)


def parse_statements(script: ScriptText, errors: list[OalError]) -> list[Statement]:
    """The statements of a script that can be parsed; errors in the others go to ``errors``."""
    return _Parser(script, Lexer(script, errors).tokens(), errors).statements()


class _Parser(Cursor):
    def statements(self) -> list[Statement]:
        statements: list[Statement] = []
        while self.here.kind != "end":
            if self.take_mark(";"):  # an empty statement
                continue
            try:
                statement = self._statement()
                self._end_of_statement()
            except StatementError:
                self._recover()
            else:
                statements.append(statement)
        return statements

    def _statement(self) -> Statement:
        if self.here.text == "disable" and self.ahead(1).text == "(":
            self.at += 2
            disabled = self.name("the name of the metric to disable")
            self.mark(")")
            return Disabling(disabled)
        return self._definition()

    def _definition(self) -> Definition:
        name = self.name("the name of a metric, or disable(...)")
        self.mark("=")
        self.keyword("from")
        self.mark("(")
        source, value = self._measured()
        self.mark(")")
        filters: list[Comparison] = []
        self.mark(".")
        while self.here.text == "filter" and self.ahead(1).text == "(":
            self.at += 2
            filters.append(self._comparison())
            self.mark(")")
            self.mark(".")
        function = self.name("filter or an aggregation function")
        self.mark("(")
        args = self._args()
        call_end = self.mark(")").end
        decorator = self._decorator()
        return Definition(name, source, value, tuple(filters), function, args, call_end, decorator)

    def _measured(self) -> tuple[Word, PathNode]:
        """The source and the path in ``from(...)``."""
        to = self._cast()
        source = self.name("the name of a source")
        self.mark(".")
        start = self.here.start
        if star := self.take_mark("*"):
            if to is not None:
                raise self.fail(star, "a field to cast, or no cast in front of *")
            return source, PathNode(None, (), start, star.end)
        parts = self._parts("a field of the source, or *")
        return source, PathNode(to, parts, start, parts[-1].end)

    def _decorator(self) -> Word | None:
        if not self.take_mark("."):
            return None
        self.keyword("decorator")
        self.mark("(")
        decorator = self.string("the decorator's name, in double quotes")
        self.mark(")")
        return decorator

    def _args(self) -> tuple[ArgNode, ...]:
        args: list[ArgNode] = []
        if self.is_mark(")"):
            return ()
        while True:
            args.append(self._arg())
            if not self.take_mark(","):
                return tuple(args)

    def _arg(self) -> ArgNode:
        token = self.here
        alone = self.ahead(1).kind == "mark" and self.ahead(1).text in (",", ")")
        if token.kind in ("int", "string") or (token.text in ("true", "false") and alone):
            return self._literal()
        path = self._path()
        if self.is_mark(",", ")"):
            return path
        return self._compared(path)

    def _comparison(self) -> Comparison:
        return self._compared(self._path())

    def _compared(self, path: PathNode) -> Comparison:
        token = self.here
        op = word(token)
        if self.is_mark("==", "!="):
            self.at += 1
            return Comparison(path, op, self._literal())
        if self.is_mark(">", "<", ">=", "<="):
            self.at += 1
            return Comparison(path, op, self._of_kind("int", "a whole number"))
        if token.kind == "name" and token.text in ("like", "contain"):
            self.at += 1
            return Comparison(path, op, self._of_kind("string", "a string in double quotes"))
        if token.kind == "name" and token.text == "not" and self.ahead(1).text == "contain":
            op = Word("not contain", token.start, self.ahead(1).end)
            self.at += 2
            return Comparison(path, op, self._of_kind("string", "a string in double quotes"))
        if token.kind == "name" and token.text == "in":
            self.at += 1
            return Comparison(path, op, self._list())
        hint = " (one = is for naming a metric)" if token.text == "=" else ""
        raise self.fail(token, f"a comparison: {_OPERATORS}{hint}")

    def _list(self) -> ListNode:
        start = self.mark("[").start
        items = [self._item()]
        while self.take_mark(","):
            items.append(self._item())
            if items[-1].kind != items[0].kind:
                last = self.tokens[self.at - 1]
                raise self.fail(last, f"another {_KINDS[items[0].kind]}: a list holds one kind")
        return ListNode(tuple(items), start, self.mark("]").end)

    def _item(self) -> LiteralNode:
        if self.here.kind == "name" and self.here.text == "null":
            raise self.fail(self.here, "a value; null is tested with == null")
        return self._literal()

    def _of_kind(self, kind: str, expected: str) -> LiteralNode:
        if self.here.kind != kind:
            raise self.fail(self.here, expected)
        return self._literal()

    def _literal(self) -> LiteralNode:
        token = self.here
        following = self.ahead(1)
        if token.kind == "name" and following.text == "." and self.ahead(2).kind == "name":
            value = self.ahead(2)
            self.at += 3
            pair = (word(token), word(value))
            return LiteralNode("enum", pair, token.start, value.end)
        if token.kind == "name" and token.text in _CONSTANTS:
            self.at += 1
            constant = _CONSTANTS[token.text]
            return LiteralNode(constant.kind, constant.value, token.start, token.end)
        if token.kind == "int":
            self.at += 1
            return LiteralNode("int", token.value, token.start, token.end)
        if token.kind == "string":
            self.at += 1
            return LiteralNode("string", token.value, token.start, token.end)
        raise self.fail(token, _VALUE)

    def _path(self) -> PathNode:
        start = self.here.start
        to = self._cast()
        parts = self._parts("a field")
        return PathNode(to, parts, start, parts[-1].end)

    def _parts(self, expected: str) -> tuple[Word, ...]:
        parts: list[Word] = [self.name(expected)]
        while True:
            if bracket := self.take_mark("["):
                key = self.string("the key of a map, in double quotes")
                parts.append(Key(key.text, bracket.start, self.mark("]").end))
            elif self.take_mark("."):
                parts.append(self.name("a field"))
            else:
                return tuple(parts)

    def _cast(self) -> Word | None:
        opening = self.take_mark("(")
        if opening is None:
            return None
        expected = "a cast: (str->long), (long), (str->int) or (int)"
        name = self.name(expected).text
        if self.take_mark("->"):
            name += "->" + self.name(expected).text
        closing = self.here
        if name not in CASTS:
            whole = Token("name", name, name, opening.end, closing.start)
            raise self.fail(whole, expected)
        self.mark(")")
        return Word(name, opening.start, closing.end)

    def _end_of_statement(self) -> None:
        if self.here.kind != "end" and not self.take_mark(";"):
            raise self.fail(self.here, "; after the statement")

    def _recover(self) -> None:
        """Go on after the next semicolon, or where a definition evidently begins.

        It begins with a name, which the next statement takes: so the parser always advances.
        """
        while self.here.kind != "end" and not self.take_mark(";"):
            begins = self.ahead(1).text == "=" and self.ahead(2).text == "from"
            if begins and self.here.kind == "name":
                return
            self.at += 1


_CONSTANTS = {
    "true": LiteralNode("bool", True, 0, 0),
    "false": LiteralNode("bool", False, 0, 0),
    "null": LiteralNode("null", None, 0, 0),
}
_KINDS = {
    "bool": "true or false",
    "int": "whole number",
    "string": "string",
    "enum": "enum value",
    "null": "null",
}
