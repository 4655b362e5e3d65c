"""What became of the events and statements of a process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class EmbeddedStats:
    """What became of what was emitted.

    ``accepted`` is the sum of ``committed``, ``expired``, ``invalid`` (all reasons), ``failed`` and
    ``waiting``; so it is for statements. What was dropped or is unused was not accepted.
    """

    accepted: int = 0
    """Events that were accepted."""
    committed: int = 0
    """Events whose states are in the store."""
    expired: int = 0
    """Events that are older than the store keeps."""
    invalid: Mapping[str, int] = field(default_factory=dict)
    """Events that no metric can count, by reason."""
    failed: int = 0
    """Events that were lost, to an error that is in the log, or because the store took no more."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Events that were not accepted, by reason: ``full``, or ``stopped`` when it was closed."""
    unused: int = 0
    """Events of types that no metric reads."""
    late: int = 0
    """Committed events that came late; they went to their own buckets."""
    statements_accepted: int = 0
    """Statements that were accepted."""
    statements: int = 0
    """Statements that were committed: counted, and the slowest of them kept."""
    statements_invalid: int = 0
    """Statements that are too far ahead of the clock."""
    statements_failed: int = 0
    """Statements that were lost."""
    statements_dropped: Mapping[str, int] = field(default_factory=dict)
    """Statements that were not accepted, by reason."""
    commits: int = 0
    """Transactions."""
    retries: int = 0
    """Commits that failed and were tried again."""

    @property
    def waiting(self) -> int:
        """Events that were accepted and are not in the store yet."""
        done = self.committed + self.expired + sum(self.invalid.values()) + self.failed
        return self.accepted - done

    @property
    def statements_waiting(self) -> int:
        """Statements that were accepted and are not in the store yet."""
        done = self.statements + self.statements_invalid + self.statements_failed
        return self.statements_accepted - done
