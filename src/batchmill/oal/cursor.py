"""A place in a row of tokens: what the parser looks at, takes, and complains about."""

from __future__ import annotations

from collections.abc import Sequence

from batchmill.oal.errors import OalError
from batchmill.oal.lexer import ScriptText, Token
from batchmill.oal.syntax import Word


class Fault(Exception):
    """The statement cannot be read any further; what is wrong has been noted."""


class Cursor:
    """Goes through tokens from left to right; the last one, ``end``, is never passed."""

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
        """A string, which must come next; the word says what it holds."""
        token = self.here
        if token.kind != "string":
            raise self.fail(token, expected)
        self.at += 1
        return Word(str(token.value), token.start, token.end)

    def fail(self, token: Token, expected: str) -> Fault:
        """Note that something else was expected; the fault to raise."""
        if token.kind != "bad":  # the lexer has said what is wrong there
            found = f"found {token.text[:40]!r}" if token.kind != "end" else "the script ends here"
            message = f"expected {expected}, but {found}"
            self.errors.append(self.script.error(token.start, token.end, message))
        return Fault()


def word(token: Token) -> Word:
    """A token that is a name."""
    return Word(token.text, token.start, token.end)
