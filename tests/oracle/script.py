"""A reader of correct OAL scripts: tokens, cut into statements, cut into a chain of calls.

It finds no errors. A statement is `name = from(…).filter(…).function(…).decorator(…)`, so each link
is a word and the tokens between its brackets; what those tokens mean depends on the word alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Literal = bool | int | str | None | tuple[bool | int | str, ...]


class Step(NamedTuple):
    """One step of a path: a field's name, and the key if it looks into a map."""

    name: str
    key: str | None = None


@dataclass(frozen=True)
class Field:
    """A path into a row; an empty one is `*`."""

    path: tuple[Step, ...]
    cast: str | None = None


@dataclass(frozen=True)
class Condition:
    field: Field
    operator: str
    literal: Literal


Argument = Condition | Field | bool | int | str


@dataclass(frozen=True)
class Metric:
    name: str
    source: str
    field: Field
    filters: tuple[Condition, ...]
    function: str
    arguments: tuple[Argument, ...]
    decorator: str | None = None


class _Token(NamedTuple):
    kind: str
    text: str


_TOKEN = re.compile(
    r"""
      (?P<skip>   \s+ | //[^\n]* | /\*.*?\*/ )
    | (?P<string> "[^"\n]*" )
    | (?P<cast>   \(\s*(?:str\s*->\s*)?(?:long|int)\s*\) )
    | (?P<number> [0-9]+ )
    | (?P<name>   [A-Za-z_][A-Za-z0-9_]* )
    | (?P<sign>   == | != | >= | <= | [><=.,;()\[\]*] )
    """,
    re.VERBOSE | re.DOTALL,
)
_OPERATORS = {"==", "!=", ">", "<", ">=", "<=", "like", "in", "contain", "not"}
_WORDS: dict[str, bool | None] = {"true": True, "false": False, "null": None}


def read_script(text: str) -> list[Metric]:
    """The metrics of a script in its order, without the disabled ones."""
    metrics: list[Metric] = []
    disabled: set[str] = set()
    for statement in _cut(list(_tokens(text)), ";"):
        if [token.text for token in statement[:2]] == ["disable", "("]:
            disabled.add(statement[2].text)
        elif statement:
            metrics.append(_metric(statement))
    return [metric for metric in metrics if metric.name not in disabled]


def _tokens(text: str) -> Iterator[_Token]:
    at, previous = 0, ""
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise ValueError(f"no token at {text[at : at + 20]!r}")
        kind = str(match.lastgroup)
        at = match.end()
        if kind == "skip":
            continue
        token = _Token(kind, match.group())
        if kind == "cast" and previous not in ("(", ","):
            # `count(int)`: brackets of a call, around a field of that name.
            token = _Token("sign", "(")
            at = match.start() + 1
        previous = token.text
        yield token


def _cut(tokens: Sequence[_Token], separator: str) -> list[list[_Token]]:
    """Cut at every separator that is in no bracket."""
    parts: list[list[_Token]] = [[]]
    depth = 0
    for token in tokens:
        if token.kind == "sign":
            depth += (token.text in "([") - (token.text in ")]")
            if token.text == separator and depth == 0:
                parts.append([])
                continue
        parts[-1].append(token)
    return parts


def _metric(statement: Sequence[_Token]) -> Metric:
    name = statement[0].text
    links = [(link[0].text, link[2:-1]) for link in _cut(statement[2:], ".")]
    (_, origin), *middle = links
    decorator = None
    if middle[-1][0] == "decorator":
        decorator = middle.pop()[1][0].text[1:-1]
    function, arguments = middle.pop()
    field = _field(origin)
    return Metric(
        name=name,
        source=field.path[0].name,
        field=Field(field.path[1:], field.cast),
        filters=tuple(_condition(inside) for _, inside in middle),
        function=function,
        arguments=tuple(_argument(part) for part in _cut(arguments, ",") if part),
        decorator=decorator,
    )


def _field(tokens: Sequence[_Token]) -> Field:
    cast = None
    if tokens[0].kind == "cast":
        cast = re.sub(r"[\s()]", "", tokens[0].text)
        tokens = tokens[1:]
    steps = []
    for part in _cut(tokens, "."):
        if part[0].text != "*":
            # name, or name [ "key" ]
            steps.append(Step(part[0].text, part[2].text[1:-1] if len(part) > 1 else None))
    return Field(tuple(steps), cast)


def _operator_at(tokens: Sequence[_Token]) -> int | None:
    for index in range(1, len(tokens)):
        token = tokens[index]
        after_field = tokens[index - 1].text not in (".", "[") and tokens[index - 1].kind != "cast"
        if token.kind != "string" and token.text in _OPERATORS and after_field:
            return index
    return None


def _condition(tokens: Sequence[_Token]) -> Condition:
    at = _operator_at(tokens)
    if at is None:
        raise ValueError(f"no condition: {' '.join(token.text for token in tokens)}")
    operator, right = tokens[at].text, at + 1
    if operator == "not":
        operator, right = "not contain", at + 2
    return Condition(_field(tokens[:at]), operator, _literal(tokens[right:]))


def _literal(tokens: Sequence[_Token]) -> Literal:
    if tokens[0].text == "[":
        items = [_scalar(part) for part in _cut(tokens[1:-1], ",")]
        return tuple(item for item in items if item is not None)
    return _scalar(tokens)


def _scalar(tokens: Sequence[_Token]) -> bool | int | str | None:
    first = tokens[0]
    if first.kind == "string":
        return first.text[1:-1]
    if first.kind == "number":
        return int(first.text)
    if first.text in _WORDS:
        return _WORDS[first.text]
    # An enum's value: rows hold its name.
    return tokens[-1].text


def _argument(tokens: Sequence[_Token]) -> Argument:
    if _operator_at(tokens) is not None:
        return _condition(tokens)
    if tokens[0].kind == "name" and not (len(tokens) == 1 and tokens[0].text in _WORDS):
        return _field(tokens)
    if tokens[0].kind == "cast":
        return _field(tokens)
    literal = _scalar(tokens)
    if literal is None:
        raise ValueError("null is no argument")
    return literal
