"""Counters of the events and statements of a process, and their instruments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from batchmill.telemetry import ComponentKind, Snapshot, counter, up_down


@dataclass(frozen=True, slots=True)
class EmbeddedStats(Snapshot):
    """Emitted events and statements, by what was done with them.

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


def _dropped(counts: Mapping[str, int]) -> dict[str, int]:
    return {"full": 0, "stopped": 0, **counts}


WORKERS: ComponentKind[EmbeddedStats] = ComponentKind(
    "workers",
    (
        up_down("waiting_events", "{event}", "Events not in the store yet.", lambda s: s.waiting),
        counter("accepted_events", "{event}", "Events accepted.", lambda s: s.accepted),
        counter("committed_events", "{event}", "Events in the store.", lambda s: s.committed),
        counter("late_events", "{event}", "Committed events that came late.", lambda s: s.late),
        counter("expired_events", "{event}", "Events too old to keep.", lambda s: s.expired),
        counter(
            "invalid_events",
            "{event}",
            "Events that no metric can count; a series begins with the first.",
            lambda s: s.invalid,
            "reason",
        ),
        counter("failed_events", "{event}", "Accepted events that were lost.", lambda s: s.failed),
        counter(
            "dropped_events",
            "{event}",
            "Events that were not accepted: full, stopped.",
            lambda s: _dropped(s.dropped),
            "reason",
        ),
        counter("unused_events", "{event}", "Events that no metric reads.", lambda s: s.unused),
        up_down(
            "waiting_statements",
            "{statement}",
            "Statements not in the store yet.",
            lambda s: s.statements_waiting,
        ),
        counter(
            "accepted_statements",
            "{statement}",
            "Statements accepted.",
            lambda s: s.statements_accepted,
        ),
        counter(
            "committed_statements", "{statement}", "Statements committed.", lambda s: s.statements
        ),
        counter(
            "invalid_statements",
            "{statement}",
            "Statements too far ahead of the clock.",
            lambda s: s.statements_invalid,
        ),
        counter(
            "failed_statements",
            "{statement}",
            "Accepted statements that were lost.",
            lambda s: s.statements_failed,
        ),
        counter(
            "dropped_statements",
            "{statement}",
            "Statements that were not accepted: full, stopped.",
            lambda s: _dropped(s.statements_dropped),
            "reason",
        ),
        counter("commits", "{commit}", "Transactions.", lambda s: s.commits),
        counter("retries", "{commit}", "Commits that were tried again.", lambda s: s.retries),
    ),
    label="workers",
)
