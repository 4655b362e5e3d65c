"""Parses PromQL, as far as it is supported: one plain selector, or a sum of numbers.

    batchmill_service_cpm{name="shop", layer=~"GENERAL|MESH", kind!="endpoint"}

Grafana sends ``1+1`` to check that the server responds. Regular expressions are RE2's, as in
Prometheus itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache

import re2

from batchmill.web.responses import BadRequest

LONGEST_REGEX = 16_384
"""Characters of an expression: Grafana joins all chosen values by ``|``."""


class Regex:
    """Matches whole texts in linear time; :class:`BadRequest` if the expression is not valid."""

    def __init__(self, text: str) -> None:
        if len(text) > LONGEST_REGEX:
            raise BadRequest(f"a regular expression has more than {LONGEST_REGEX:,} characters")
        try:
            self._compiled = re2.compile(text, _options())
        except re2.error as error:
            reason = error.args[0].decode("utf-8", "replace")
            raise BadRequest(f"a regular expression is not valid for RE2: {reason}") from None
        except UnicodeEncodeError:
            raise BadRequest("a regular expression is not valid Unicode text") from None

    def matches(self, text: str) -> bool:
        """Whether the whole text matches."""
        return self._compiled.fullmatch(text) is not None


@cache
def _options() -> re2.Options:
    options = re2.Options()
    options.dot_nl = True  # as Prometheus: `.` matches a newline, too
    options.log_errors = False
    return options


LONGEST_QUERY = 32_768
NAME = "__name__"
SUPPORTED = (
    'supported are plain selectors such as batchmill_service_cpm{name="shop"}, with =, !=, =~ '
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
    """A condition on a label; a label that a series lacks is empty."""

    label: str
    operator: str
    value: str
    matches: Callable[[str], bool] = field(compare=False, repr=False)

    @classmethod
    def of(cls, label: str, operator: str, value: str) -> Matcher:
        """Make a matcher; a regular expression is compiled."""
        whole: Callable[[str], bool] = value.__eq__
        if operator in ("=~", "!~"):
            try:
                whole = Regex(value).matches
            except BadRequest as error:
                raise BadRequest(f"{label}{operator}…: {error.reason}") from None
        wanted = operator in ("=", "=~")
        return cls(label, operator, value, lambda text: whole(text) is wanted)


@dataclass(frozen=True, slots=True)
class Selector:
    """Which series are requested: those that all matchers match."""

    matchers: tuple[Matcher, ...]

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether a series with those labels is selected."""
        return all(matcher.matches(labels.get(matcher.label, "")) for matcher in self.matchers)

    def matches_name(self, name: str) -> bool:
        """Whether series of that name may be selected."""
        return all(matcher.matches(name) for matcher in self.matchers if matcher.label == NAME)

    def required_value(self, label: str) -> str | None:
        """The value that an equality matcher requires of a label, or None."""
        for matcher in self.matchers:
            if matcher.label == label and matcher.operator == "=" and matcher.value:
                return matcher.value
        return None


def parse(text: str) -> Selector | float:
    """Parse an expression; :class:`BadRequest` if it is not supported."""
    if len(text) > LONGEST_QUERY:
        raise BadRequest(f"the query has more than {LONGEST_QUERY:,} characters")
    if _NUMBERS.fullmatch(text.strip()):
        return sum(float(part) for part in text.split("+"))
    return parse_selector(text)


def parse_selector(text: str) -> Selector:
    """Parse a selector."""
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
        if all(matcher.matches("") for matcher in matchers):
            raise BadRequest(
                "a selector must have at least one matcher that does not match the empty text"
            )
        return Selector(tuple(matchers))

    def _matchers(self, named: bool) -> list[Matcher]:
        matchers: list[Matcher] = []
        while True:
            self._skip()
            if self._text.startswith("}", self._at):
                self._at += 1
                return matchers
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
            matchers.append(Matcher.of(label, operator, self._string()))
            if len(matchers) > _MOST_MATCHERS:
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
        chars: list[str] = []
        while True:
            char = self._text[self._at : self._at + 1]
            if not char or (char == "\n" and quote != "`"):
                raise self._wrong("a text has no end")
            self._at += 1
            if char == quote:
                return "".join(chars)
            chars.append(self._escaped() if char == "\\" and quote != "`" else char)

    def _escaped(self) -> str:
        char = self._text[self._at : self._at + 1]
        self._at += 1
        if char in _ESCAPES and char:
            return _ESCAPES[char]
        if char in _CODES and char:
            digits = self._text[self._at : self._at + _CODES[char]]
            self._at += _CODES[char]
            good = len(digits) == _CODES[char] and all(
                digit in "0123456789abcdefABCDEF" for digit in digits
            )
            if good and (code := int(digits, 16)) < 0x110000 and not 0xD800 <= code < 0xE000:
                return chr(code)
        raise self._wrong("an escape sequence is not valid")

    def _take(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self._at)
        if not match:
            return ""
        self._at = match.end()
        return match[0]

    def _skip(self) -> None:
        self._take(_SPACE)

    def _wrong(self, what: str) -> BadRequest:
        return BadRequest(f"1:{self._at + 1}: parse error: {what}; {SUPPORTED}")
