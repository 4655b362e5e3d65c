"""Reads regular expressions, and builds the states that their matching goes through."""

from __future__ import annotations

from collections.abc import Callable

from batchmill.web.errors import BadQuestion

MOST_STATES = 20_000
_MOST_REPEATS = 1_000
_MOST_DEPTH = 50

Test = Callable[[str], bool]


def _digit(char: str) -> bool:
    return "0" <= char <= "9"


def _word(char: str) -> bool:
    return char.isascii() and (char.isalnum() or char == "_")


def _space(char: str) -> bool:
    return char in "\t\n\f\r "


def _not(test: Test) -> Test:
    return lambda char: not test(char)


def _any(char: str) -> bool:
    return True


_CLASSES: dict[str, Test] = {
    "d": _digit,
    "D": _not(_digit),
    "w": _word,
    "W": _not(_word),
    "s": _space,
    "S": _not(_space),
}
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}


class States:
    """States, numbered: each with a test that leads to another, or with ways that are free."""

    def __init__(self, folded: bool) -> None:
        self._folded = folded
        self.edges: list[tuple[Test, int] | None] = []
        self.free: list[list[int]] = []

    def state(self, test: Test | None = None, to: int = -1, *free: int) -> int:
        """A new state: with a test that leads on, or ways that are free."""
        if len(self.edges) >= MOST_STATES:
            raise BadQuestion("a regular expression is too large")
        self.edges.append(None if test is None else (test, to))
        self.free.append(list(free))
        return len(self.edges) - 1

    def join(self, one: int, other: int) -> None:
        """Add a free way from one to the other."""
        self.free[one].append(other)

    def one(self, char: str) -> Test:
        """The test for one character."""
        if not self._folded:
            return char.__eq__
        low = char.lower()
        return low.__eq__

    def between(self, first: str, last: str) -> Test:
        """The test for a range of characters."""
        if not self._folded:
            return lambda char: first <= char <= last
        return lambda char: first <= char <= last or first <= char.upper() <= last


Piece = tuple[int, int]
"""Where a part of the expression begins and ends."""


class Parser:
    """Builds the states of an expression."""

    def __init__(self, text: str, into: States) -> None:
        self._text = text
        self._at = 0
        self._into = into
        self._depth = 0

    def whole(self) -> Piece:
        """Where all of it begins and ends."""
        if self._peek() == "^":
            self._at += 1
        found = self._either()
        if self._at < len(self._text):
            raise self._wrong("a ) without its (")
        return found

    def _either(self) -> Piece:
        self._depth += 1
        if self._depth > _MOST_DEPTH:
            raise self._wrong("too many groups in groups")
        branches = [self._sequence()]
        while self._peek() == "|":
            self._at += 1
            branches.append(self._sequence())
        self._depth -= 1
        if len(branches) == 1:
            return branches[0]
        start, end = self._into.state(), self._into.state()
        for first, last in branches:
            self._into.join(start, first)
            self._into.join(last, end)
        return start, end

    def _sequence(self) -> Piece:
        start = end = self._into.state()
        while (char := self._peek()) not in ("", "|", ")"):
            if char == "$" and self._at == len(self._text) - 1:
                self._at += 1
                break
            first, last = self._repeated()
            self._into.join(end, first)
            end = last
        return start, end

    def _repeated(self) -> Piece:
        begin = self._at
        piece = self._atom()
        least, most = self._repeat()
        if (least, most) == (1, 1):
            return piece
        behind = self._at
        pieces = [piece]
        for _ in range(max(least, most or 0, 1) - 1):
            self._at = begin  # another copy of the same
            pieces.append(self._atom())
        self._at = behind
        return self._joined(pieces, least, most)

    def _joined(self, pieces: list[Piece], least: int, most: int | None) -> Piece:
        start, end = self._into.state(), self._into.state()
        here = start
        for number, (first, last) in enumerate(pieces):
            if number >= least:
                self._into.join(here, end)
            if most == 0:
                break
            self._into.join(here, first)
            here = last
            if most is None and number == len(pieces) - 1:
                self._into.join(last, first)
        self._into.join(here, end)
        return start, end

    def _repeat(self) -> tuple[int, int | None]:
        char = self._peek()
        if char not in ("*", "+", "?", "{"):
            return 1, 1
        found: tuple[int, int | None]
        if char == "{":
            found = self._counts()
        else:
            self._at += 1
            found = {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
        if self._peek() == "?":  # the lazy form matches the same whole texts
            self._at += 1
        if self._peek() in ("*", "+", "?", "{"):
            raise self._wrong("a repeat of a repeat")
        return found

    def _counts(self) -> tuple[int, int | None]:
        end = self._text.find("}", self._at)
        first, comma, last = self._text[self._at + 1 : max(end, 0)].partition(",")
        numbers = [each for each in (first, last) if each]
        good = end > 0 and bool(first) and all(_is_count(each) for each in numbers)
        if not good:
            raise self._wrong("a { that begins no repeat such as {2,3}")
        self._at = end + 1
        least = int(first)
        most = least if not comma else int(last) if last else None
        if most is not None and most < least:
            raise self._wrong("a repeat that ends before it begins")
        return least, most

    def _atom(self) -> Piece:
        char = self._next()
        if char == "(":
            return self._group()
        if char in "*+?{":
            raise self._wrong("a repeat of nothing")
        if char in "^$":
            raise self._wrong("an anchor inside; a match is always of the whole text")
        if char == "[":
            test = self._class()
        elif char == ".":
            test = _any
        elif char == "\\":
            escaped = self._escaped()
            test = self._into.one(escaped) if isinstance(escaped, str) else escaped
        else:
            test = self._into.one(char)
        end = self._into.state()
        return self._into.state(test, end), end

    def _group(self) -> Piece:
        if self._text.startswith("?:", self._at):
            self._at += 2
        elif self._peek() == "?":
            raise self._wrong("a group of a kind that is not understood")
        found = self._either()
        if self._peek() != ")":
            raise self._wrong("a ( without its )")
        self._at += 1
        return found

    def _class(self) -> Test:
        negated = self._peek() == "^"
        self._at += negated
        tests: list[Test] = []
        while (char := self._next()) != "]" or not tests:
            if char == "[" and self._peek() == ":":
                raise self._wrong("a class by name")
            item = self._escaped() if char == "\\" else char
            if not isinstance(item, str):
                tests.append(item)
                continue
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                last = self._next()
                end = self._escaped() if last == "\\" else last
                if not isinstance(end, str) or end < item:
                    raise self._wrong("a range that is none")
                tests.append(self._into.between(item, end))
            else:
                tests.append(self._into.one(item))
        found = tuple(tests)
        if negated:
            return lambda char: not any(test(char) for test in found)
        return lambda char: any(test(char) for test in found)

    def _escaped(self) -> str | Test:
        char = self._next()
        if char in _CLASSES:
            return _CLASSES[char]
        if char in _CONTROLS:
            return _CONTROLS[char]
        if char == "x":
            return self._code()
        if char.isalnum():
            raise self._wrong(f"\\{char}, which is not understood")
        return char

    def _code(self) -> str:
        if self._peek() == "{":
            end = self._text.find("}", self._at)
            digits, behind = self._text[self._at + 1 : max(end, 0)], end + 1
        else:
            digits, behind = self._text[self._at : self._at + 2], self._at + 2
        if not digits or len(digits) > 6 or any(c not in "0123456789abcdefABCDEF" for c in digits):
            raise self._wrong("a \\x without its number")
        if int(digits, 16) > 0x10FFFF:
            raise self._wrong("a \\x beyond all characters")
        self._at = behind
        return chr(int(digits, 16))

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _next(self) -> str:
        char = self._peek()
        if not char:
            raise self._wrong("an end that comes too soon")
        self._at += 1
        return char

    def _wrong(self, what: str) -> BadQuestion:
        return BadQuestion(
            f"a regular expression has {what}, about its character {self._at}: understood are "
            "characters, classes, groups, | and the repeats * + ? {m,n}"
        )


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 5 and int(text) <= _MOST_REPEATS
