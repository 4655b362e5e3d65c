"""What is wrong with a script: each fault with its place, all of them at once."""

from __future__ import annotations

from batchmill.errors import BatchmillError

_WIDEST = 100
"""A line longer than this is shown around the fault only."""


class OalError(BatchmillError, ValueError):
    """One fault in a script.

    Carries ``file``, ``line`` and ``column`` (from 1), the offending ``text``, the ``message`` with
    what was expected or which names exist, and the ``source_line`` that it stands in.
    """

    def __init__(
        self, file: str, line: int, column: int, text: str, message: str, source_line: str = ""
    ) -> None:
        super().__init__(file, line, column, text, message, source_line)
        self.file = file
        self.line = line
        self.column = column
        self.text = text
        self.message = message
        self.source_line = source_line

    @property
    def place(self) -> str:
        """``file:line:column``, which editors and terminals can follow."""
        return f"{self.file}:{self.line}:{self.column}"

    def __str__(self) -> str:
        head = f"{self.place}: {self.message}"
        if not self.source_line.strip():
            return head
        line, at = self._window()
        # What a terminal could not show takes one column, as it does in `column`.
        line = "".join(char if char.isprintable() else " " for char in line)
        width = max(1, min(len(self.text.split("\n", 1)[0].rstrip()), len(line) - at))
        return f"{head}\n    {line.rstrip()}\n    {' ' * at}{'^' * width}"

    def _window(self) -> tuple[str, int]:
        """The part of the line to show, and where in it the fault is."""
        at = self.column - 1
        if len(self.source_line) <= _WIDEST:
            return self.source_line, at
        start = max(0, at - _WIDEST // 2)
        return self.source_line[start : start + _WIDEST], at - start


class OalErrors(BatchmillError, ValueError):
    """Everything that is wrong with one or more scripts; carries ``errors``, in order of place."""

    def __init__(self, errors: tuple[OalError, ...]) -> None:
        super().__init__(errors)
        self.errors = errors

    def __str__(self) -> str:
        files = len({each.file for each in self.errors})
        count = len(self.errors)
        said = f"{count} error{'s' * (count != 1)} in {files} script{'s' * (files != 1)}"
        return "\n".join([*map(str, self.errors), f"{said}: mend the script and load it again"])


def in_order(errors: list[OalError]) -> OalErrors:
    """All of the errors as one, sorted by file, line and column."""
    ordered = sorted(errors, key=lambda each: (each.file, each.line, each.column, each.message))
    return OalErrors(tuple(ordered))
