"""Cuts a script into tokens, in time proportional to its length, and walks through them."""

from __future__ import annotations

import bisect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from batchmill.oal.errors import OalError
from batchmill.oal.model import Position

TokenKind: TypeAlias = Literal["name", "int", "string", "mark", "bad", "end"]

LARGEST_INT = 2**63 - 1

# None of these can backtrack: one character class each, or fixed alternatives.
_SPACE = re.compile(r"[ \t\r\n\f\v\ufeff]+")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NUMBER = re.compile(r"[0-9][A-Za-z0-9_]*")
_MARK = re.compile(r"->|==|!=|>=|<=|[()\[\].,;=><*]")
_STRING_RUN = re.compile(r'[^"\\\r\n]*')
_JUNK = re.compile(r'[^\s\w()\[\].,;=><*"/]+|[^\W\x00-\x7f]+')
_LINE_END = re.compile(r"\r\n|\n|\r")

_ESCAPES = {'"': '"', "\\": "\\", "n": "\n", "r": "\r", "t": "\t"}


class Token(NamedTuple):
    """A token of the script; ``value`` is what a string or a number stands for."""

    kind: TokenKind
    text: str
    value: str | int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Word:
    """A name, or the content of a string."""

    text: str
    start: int
    end: int


class ScriptText:
    """The text of a script, with its lines and positions."""

    __slots__ = ("_line", "file", "starts", "text")

    def __init__(self, file: str, text: str) -> None:
        self.file = file
        self.text = text
        self.starts = (0, *(end.end() for end in _LINE_END.finditer(text)))
        # The line that was shown last: the many errors of a very long line share it.
        self._line = (0, "")

    def position(self, offset: int) -> Position:
        """Line and column of a character."""
        line = bisect.bisect_right(self.starts, offset)
        return Position(self.file, line, offset - self.starts[line - 1] + 1)

    def error(self, start: int, end: int, message: str) -> OalError:
        """An error at the characters from ``start`` to ``end``."""
        at = self.position(start)
        line = self._line_at(at.line)
        return OalError(self.file, at.line, at.column, self.text[start:end], message, line)

    def _line_at(self, number: int) -> str:
        if self._line[0] != number:
            first = self.starts[number - 1]
            last = self.starts[number] if number < len(self.starts) else len(self.text)
            self._line = (number, self.text[first:last].rstrip("\r\n"))
        return self._line[1]


class Lexer:
    """Cuts a script into tokens; text that is not a token is reported and becomes ``bad``."""

    def __init__(self, script: ScriptText, errors: list[OalError]) -> None:
        self._script = script
        self._text = script.text
        self._errors = errors
        self._tokens: list[Token] = []
        self._junk_in_statement = False

    def tokens(self) -> list[Token]:
        """All tokens; the last one is ``end``."""
        at, length = 0, len(self._text)
        while at < length:
            at = self._next(at)
        self._add("end", "", length, length)
        return self._tokens

    def _next(self, at: int) -> int:
        text = self._text
        if match := _SPACE.match(text, at):
            return match.end()
        if match := _NAME.match(text, at):
            return self._add("name", match.group(), at, match.end())
        if match := _MARK.match(text, at):
            if match.group() == ";":
                self._junk_in_statement = False
            return self._add("mark", match.group(), at, match.end())
        if match := _NUMBER.match(text, at):
            return self._number(at, match.end())
        if text[at] == '"':
            return self._string(at)
        if text.startswith("//", at):
            end = _LINE_END.search(text, at)
            return end.start() if end else len(text)
        if text.startswith("/*", at):
            return self._comment(at)
        return self._junk(at)

    def _add(self, kind: TokenKind, value: str | int, start: int, end: int) -> int:
        self._tokens.append(Token(kind, self._text[start:end], value, start, end))
        return end

    def _bad(self, start: int, end: int, message: str) -> int:
        self._errors.append(self._script.error(start, end, message))
        return self._add("bad", "", start, end)

    def _number(self, start: int, end: int) -> int:
        digits = self._text[start:end]
        if self._text[end : end + 1] == "." and self._text[end + 1 : end + 2].isdigit():
            fraction = _NUMBER.match(self._text, end + 1)
            end = fraction.end() if fraction else end + 2
            return self._bad(start, end, "numbers are whole: expected digits only")
        if not digits.isdigit():
            message = "this is no number and no name: names begin with a letter"
            return self._bad(start, end, message)
        # Counted before it is converted: converting a million digits would take long.
        significant = digits.lstrip("0") or "0"
        if len(significant) > 19 or int(significant) > LARGEST_INT:
            message = f"the number is too big: expected at most {LARGEST_INT} (64 bits)"
            return self._bad(start, end, message)
        return self._add("int", int(significant), start, end)

    def _string(self, start: int) -> int:
        text = self._text
        pieces: list[str] = []
        at = start + 1
        while True:
            at = self._run(at, pieces)
            if at >= len(text) or text[at] in "\r\n":
                message = 'the string does not end: expected a closing " on the same line'
                return self._bad(start, at, message)
            if text[at] == '"':
                return self._add("string", "".join(pieces), start, at + 1)
            known = _ESCAPES.get(text[at + 1 : at + 2])
            if known is None:
                message = 'unknown escape in a string: expected one of \\" \\\\ \\n \\r \\t'
                self._errors.append(self._script.error(at, at + 2, message))
                pieces.append("\\")
                at += 1
                continue
            pieces.append(known)
            at += 2

    def _run(self, at: int, pieces: list[str]) -> int:
        """Take the plain characters of a string from ``at`` on; where they end."""
        run = _STRING_RUN.match(self._text, at)
        if run is None:
            return at
        pieces.append(run.group())
        return run.end()

    def _comment(self, start: int) -> int:
        end = self._text.find("*/", start + 2)
        if end >= 0:
            return end + 2
        message = "the comment does not end: expected */"
        self._errors.append(self._script.error(start, start + 2, message))
        self._add("bad", "", start, len(self._text))
        return len(self._text)

    def _junk(self, start: int) -> int:
        run = _JUNK.match(self._text, start)
        end = run.end() if run else start + 1
        if self._junk_in_statement:  # one report for each statement is enough
            return self._add("bad", "", start, end)
        self._junk_in_statement = True
        shown = self._text[start:end] if end - start < 20 else self._text[start : start + 17] + "…"
        return self._bad(start, end, f"{shown!r} means nothing here{_hint(shown)}")


def _hint(junk: str) -> str:
    if junk[0] == "'" or junk[0] in "\u201c\u201d\u2018\u2019":
        return ': strings stand in double quotes, "like this"'
    if junk[0] in "-+":
        return ": numbers are whole and have no sign"
    if junk[0] in "&|":
        return ": chain several .filter(...) for AND; there is no OR"
    if junk[0] == "!":
        return ": expected != or `not contain`"
    if junk[0] == "#":
        return ": comments are // to the end of the line, or /* ... */"
    return ": expected names, whole numbers, strings in double quotes, or one of ( ) [ ] . , ; = *"


class StatementError(Exception):
    """The statement cannot be read any further; the error has been noted."""


class Cursor:
    """A position in a list of tokens; it never passes the last one, ``end``."""

    def __init__(self, script: ScriptText, tokens: Sequence[Token], errors: list[OalError]) -> None:
        self.script = script
        self.tokens = tokens
        self.errors = errors
        self.at = 0

    @property
    def here(self) -> Token:
        """The next token."""
        return self.tokens[self.at]

    def ahead(self, steps: int) -> Token:
        """The token that many steps further, or the end."""
        return self.tokens[min(self.at + steps, len(self.tokens) - 1)]

    def is_mark(self, *marks: str) -> bool:
        """Whether the next token is one of these marks."""
        return self.here.kind == "mark" and self.here.text in marks

    def take_mark(self, mark: str) -> Token | None:
        """That mark, if it comes next."""
        if not self.is_mark(mark):
            return None
        self.at += 1
        return self.tokens[self.at - 1]

    def mark(self, mark: str) -> Token:
        """That mark, which must come next."""
        token = self.take_mark(mark)
        if token is None:
            raise self.fail(self.here, mark)
        return token

    def name(self, expected: str) -> Word:
        """A name, which must come next."""
        token = self.here
        if token.kind != "name":
            raise self.fail(token, expected)
        self.at += 1
        return word(token)

    def keyword(self, keyword: str) -> None:
        """That word, which must come next."""
        if self.here.text != keyword:
            raise self.fail(self.here, keyword)
        self.at += 1

    def string(self, expected: str) -> Word:
        """A string, which must come next; the word holds its content."""
        token = self.here
        if token.kind != "string":
            raise self.fail(token, expected)
        self.at += 1
        return Word(str(token.value), token.start, token.end)

    def fail(self, token: Token, expected: str) -> StatementError:
        """Note that something else was expected; returns the error to raise."""
        if token.kind != "bad":  # the lexer has reported it
            what = f"found {token.text[:40]!r}" if token.kind != "end" else "the script ends here"
            message = f"expected {expected}, but {what}"
            self.errors.append(self.script.error(token.start, token.end, message))
        return StatementError()


def word(token: Token) -> Word:
    """A token that is a name."""
    return Word(token.text, token.start, token.end)
