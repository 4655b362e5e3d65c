"""Notices that a file of rules has changed, and reads it again."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from batchmill.alerts.engine import AlertEngine
from batchmill.alerts.rulefile import RuleFile, load_rules
from batchmill.errors import BatchmillError

_Mark: TypeAlias = tuple[int, int, int, int] | None
"""What changes with a file; None: there is none, or it cannot be reached."""


class RuleWatcher:
    """A file of rules that an engine follows: call :meth:`poll` every second or so.

    A changed file is read once two polls in a row find it the same: half of a file that is being
    written may be a valid one with fewer rules. One that cannot be read, or has a mistake, changes
    nothing; the engine reports why, until the file is good again.
    """

    def __init__(self, path: str | Path) -> None:
        """Read the file; raises :class:`AlertRulesError`."""
        self.path = Path(path)
        self._read = self._seen = _mark(self.path)  # first: it may change while it is read
        self.file: RuleFile = load_rules(self.path)
        """What is followed: the file as it was when it was last good."""

    def poll(self, engine: AlertEngine) -> bool:
        """Give the engine the rules of a file that has changed; whether it has."""
        mark, before = _mark(self.path), self._seen
        self._seen = mark
        if mark == self._read or mark != before:
            return False
        self._read = mark
        try:
            self.file = load_rules(self.path)
        except (BatchmillError, OSError) as error:
            engine.refuse_rules(str(error))
        else:
            engine.replace_rules(self.file.rules)
        return True


def _mark(path: Path) -> _Mark:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_size
