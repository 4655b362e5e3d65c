"""Errors in scripts: each with its place, and all of them together."""

from __future__ import annotations

from batchmill.errors import BatchmillError
from batchmill.wording import count_of

_WIDEST = 100
"""Of a longer line only the part around the error is shown."""


class OalError(BatchmillError, ValueError):
    """One error in a script."""

    file: str
    line: int
    column: int
    """From 1, as the line."""
    text: str
    """The offending text."""
    message: str
    """What is wrong, and what was expected or which names exist."""
    source_line: str = ""
    """The line it is in."""

    @property
    def place(self) -> str:
        """``file:line:column``, which editors and terminals can follow."""
        return f"{self.file}:{self.line}:{self.column}"

    def __str__(self) -> str:
        head = f"{self.place}: {self.message}"
        if not self.source_line.strip():
            return head
        line, at = self._window()
        # A character that a terminal cannot show takes one column, as it does in `column`.
        line = "".join(char if char.isprintable() else " " for char in line)
        width = max(1, min(len(self.text.split("\n", 1)[0].rstrip()), len(line) - at))
        return f"{head}\n    {line.rstrip()}\n    {' ' * at}{'^' * width}"

    def _window(self) -> tuple[str, int]:
        """The part of the line to show, and where in it the error is."""
        at = self.column - 1
        if len(self.source_line) <= _WIDEST:
            return self.source_line, at
        start = max(0, at - _WIDEST // 2)
        return self.source_line[start : start + _WIDEST], at - start


class OalErrors(BatchmillError, ValueError):
    """Everything that is wrong with one or more scripts."""

    errors: tuple[OalError, ...]
    """In order of place."""

    def __str__(self) -> str:
        files = count_of(len({error.file for error in self.errors}), "script")
        total = f"{count_of(len(self.errors), 'error')} in {files}"
        return "\n".join([*map(str, self.errors), f"{total}: correct the script and load it again"])


def in_order(errors: list[OalError]) -> OalErrors:
    """All errors as one, sorted by file, line and column."""
    ordered = sorted(
        errors, key=lambda error: (error.file, error.line, error.column, error.message)
    )
    return OalErrors(tuple(ordered))
