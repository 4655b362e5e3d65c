"""Errors of alert rules."""

from __future__ import annotations

from batchmill.errors import BatchmillError


class AlertRulesError(BatchmillError, ValueError):
    """A file with alert rules cannot be used."""

    path: str
    problems: tuple[str, ...]
    """Each names the rule, the field and what is allowed."""
    exit_code = 2

    def __str__(self) -> str:
        return "\n".join(f"{self.path}: {problem}" for problem in self.problems)
