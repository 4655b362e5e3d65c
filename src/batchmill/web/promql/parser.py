"""PromQL, as far as it is understood: one plain selector, or a sum of numbers.

    batchmill_service_cpm{name="shop", layer=~"GENERAL|MESH", kind!="endpoint"}

Grafana asks ``1+1`` to see whether anybody is there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from batchmill.web.errors import BadQuestion
from batchmill.web.promql.regex import Regex

LONGEST = 32_768
NAME = "__name__"
UNDERSTOOD = (
    'understood are plain selectors such as batchmill_service_cpm{name="shop"}, with =, !=, =~ '
    "and !~: functions, operators, ranges, offset and @ are not"
)
_SPACE = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_METRIC = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_OPERATOR = re.compile(r"=~|!~|!=|=")
_NUMBERS = re.compile(r"[0-9]{1,15}(?:\.[0-9]{1,15})?(?:\s*\+\s*[0-9]{1,15}(?:\.[0-9]{1,15})?)*")
_ESCAPES = {
    "a": "\a",
    "b": "\b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "v": "\v",
    "\\": "\\",
    "'": "'",
    '"': '"',
}
_CODES = {"x": 2, "u": 4, "U": 8}
_MOST_MATCHERS = 50


@dataclass(frozen=True, slots=True)
class Matcher:
    """A condition on a label; one that a series has not is empty."""

    label: str
    operator: str
    value: str
    matches: Callable[[str], bool] = field(compare=False, repr=False)

    @classmethod
    def of(cls, label: str, operator: str, value: str) -> Matcher:
        """From its three parts."""
        whole: Callable[[str], bool] = value.__eq__
        if operator in ("=~", "!~"):
            try:
                whole = Regex(value).matches
            except BadQuestion as error:
                raise BadQuestion(f"{label}{operator}…: {error.reason}") from None
        wanted = operator in ("=", "=~")
        return cls(label, operator, value, lambda text: whole(text) is wanted)


@dataclass(frozen=True, slots=True)
class Selector:
    """Which series are wanted: those that all matchers match."""

    matchers: tuple[Matcher, ...]

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether a series with those labels is one."""
        return all(each.matches(labels.get(each.label, "")) for each in self.matchers)

    def named(self, name: str) -> bool:
        """Whether a series of that name may be one."""
        return all(each.matches(name) for each in self.matchers if each.label == NAME)

    def equal(self, label: str) -> str | None:
        """What a label must be, if there is one such value."""
        for each in self.matchers:
            if each.label == label and each.operator == "=" and each.value:
                return each.value
        return None


def parse(text: str) -> Selector | float:
    """What an expression asks for; :class:`BadQuestion` if it is not understood."""
    if len(text) > LONGEST:
        raise BadQuestion(f"the query has more than {LONGEST:,} characters")
    if _NUMBERS.fullmatch(text.strip()):
        return sum(float(each) for each in text.split("+"))
    return parse_selector(text)


def parse_selector(text: str) -> Selector:
    """The selector that a text is."""
    return _Parser(text).selector()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def selector(self) -> Selector:
        matchers: list[Matcher] = []
        self._skip()
        name = self._take(_METRIC)
        if name:
            matchers.append(Matcher.of(NAME, "=", name))
        self._skip()
        if self._text.startswith("{", self._at):
            self._at += 1
            matchers += self._matchers(bool(name))
        elif not name:
            raise self._wrong("a selector begins with a name or with {")
        self._skip()
        if self._at < len(self._text):
            raise self._wrong("there is more behind the selector")
        if all(each.matches("") for each in matchers):
            raise BadQuestion(
                "a selector must have at least one matcher that does not match the empty text"
            )
        return Selector(tuple(matchers))

    def _matchers(self, named: bool) -> list[Matcher]:
        found: list[Matcher] = []
        while True:
            self._skip()
            if self._text.startswith("}", self._at):
                self._at += 1
                return found
            label = self._take(_LABEL)
            if not label:
                raise self._wrong("a label's name, or } is expected")
            if label == NAME and named:
                raise self._wrong("the name is given already")
            self._skip()
            operator = self._take(_OPERATOR)
            if not operator:
                raise self._wrong("one of =, !=, =~ and !~ is expected")
            self._skip()
            found.append(Matcher.of(label, operator, self._string()))
            if len(found) > _MOST_MATCHERS:
                raise self._wrong(f"more than {_MOST_MATCHERS} matchers")
            self._skip()
            if self._text.startswith(",", self._at):
                self._at += 1
            elif not self._text.startswith("}", self._at):
                raise self._wrong(", or } is expected")

    def _string(self) -> str:
        quote = self._text[self._at : self._at + 1]
        if quote not in ('"', "'", "`") or not quote:
            raise self._wrong("a text in quotes is expected")
        self._at += 1
        found: list[str] = []
        while True:
            char = self._text[self._at : self._at + 1]
            if not char or (char == "\n" and quote != "`"):
                raise self._wrong("a text has no end")
            self._at += 1
            if char == quote:
                return "".join(found)
            found.append(self._escaped() if char == "\\" and quote != "`" else char)

    def _escaped(self) -> str:
        char = self._text[self._at : self._at + 1]
        self._at += 1
        if char in _ESCAPES and char:
            return _ESCAPES[char]
        if char in _CODES and char:
            digits = self._text[self._at : self._at + _CODES[char]]
            self._at += _CODES[char]
            good = len(digits) == _CODES[char] and all(
                each in "0123456789abcdefABCDEF" for each in digits
            )
            if good and (code := int(digits, 16)) < 0x110000 and not 0xD800 <= code < 0xE000:
                return chr(code)
        raise self._wrong("an escape is not understood")

    def _take(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self._text, self._at)
        if not found:
            return ""
        self._at = found.end()
        return found[0]

    def _skip(self) -> None:
        self._take(_SPACE)

    def _wrong(self, what: str) -> BadQuestion:
        return BadQuestion(f"1:{self._at + 1}: parse error: {what}; {UNDERSTOOD}")
