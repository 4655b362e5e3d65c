"""What a store keeps: by the TTL and the time that it trusts; removal, and the repair of a clock.

Days before the cutoff expire. It lies ``ttl_days`` before the newest minute, or before the trusted
time (:mod:`batchmill.store.clock`) if that is earlier. So no newest minute can make others expire
that a clock does not confirm. There is no trusted time while a store has nothing but past events,
of last year for example, which so expire by their own time. It begins with the first commit that
has rows of the present: with the newest minute before that, so that this step is confirmed, too.

Rows before the cutoff are left out at once. What is in the tables is removed little by little: a
commit removes at most one day more than it has rows of. In the table ``meta``:

``newest_minute``
    The newest minute that the clock of a commit's writer made believable: readers end there.
``last_minute``
    The newest minute in the tables, be it from the future.
``cutoff``
    All before this day was removed. It goes back with the trusted time: else nothing would expire
    until that day comes. What processes have cached of entities is then not valid any more.
``clock``
    The trusted time, the latest that it ever was, what is known of the clock of the last commit's
    writer, the last day that ``cutoff`` ever was, and how often it went back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace

from batchmill.sources import Grain, bucket_start
from batchmill.store.buckets import bucket_of, cutoff_day, day_start, newer
from batchmill.store.clock import (
    AHEAD_S,
    STEP_S,
    ClockReading,
    ClockState,
    Observation,
    WriterClock,
    minute_of,
    observe,
)
from batchmill.store.results import ClockRepair
from batchmill.store.sql.session import Condition, Session, marks, quote, table_name

_KEYS = ("newest_minute", "last_minute", "cutoff", "clock")


@dataclass(frozen=True, slots=True)
class Retention:
    """What the table ``meta`` says about time; None: there is nothing yet."""

    newest: int | None
    last_minute: int | None
    removed: int
    """All before this day was removed."""
    trusted_s: float | None
    writer: WriterClock | None
    """The clock of the last commit's writer."""
    highest: int = 0
    """The last day that ``removed`` ever was."""
    turns: int = 0
    """How often ``removed`` went back."""
    furthest_s: float | None = None
    """The latest that ``trusted_s`` ever was."""

    @classmethod
    def read(cls, session: Session) -> Retention:
        """As it is now."""
        query = f"SELECT key, value FROM meta WHERE key IN ({marks(_KEYS)})"
        meta: dict[str, str] = dict(session.rows(query, _KEYS))
        newest, last_minute, removed, clock = (meta[key] for key in _KEYS)
        known = json.loads(clock) if clock else {}
        return cls(
            int(newest) if newest else None,
            int(last_minute) if last_minute else None,
            int(removed),
            known.get("trusted_s"),
            WriterClock(known["seen_s"], known["steady_s"]) if known else None,
            known.get("highest", int(removed)),
            known.get("turns", 0),
            known.get("furthest_s"),
        )

    @property
    def state(self) -> ClockState:
        """The same for an operator."""
        seen_s = None if self.writer is None else self.writer.seen_s
        return ClockState(self.trusted_s, seen_s, self.last_minute, self.furthest_s)

    def after(
        self,
        newest_minute: int | None,
        reading: ClockReading,
        last: WriterClock | None,
        elapsed_s: float | None,
    ) -> tuple[Retention, Observation]:
        """After a commit with rows up to ``newest_minute``, and what it makes of the clock.

        ``last`` and ``elapsed_s`` are for :func:`~batchmill.store.clock.observe`.
        """
        wall_s = reading.wall_s
        trusted_s = self.trusted_s
        if trusted_s is None and self.newest is not None:
            # Nobody knows if the first clock is right: no more than earlier rows say is trusted.
            trusted_s = min(wall_s, bucket_start(self.newest).timestamp())
        observed = observe(trusted_s, last or self.writer, wall_s, elapsed_s if last else None)
        newest = self._newest(newest_minute, wall_s)
        is_present = newest is not None and newest >= minute_of(wall_s - AHEAD_S)
        kept_s = observed.trusted_s if is_present or self.trusted_s is not None else None
        known = (self.furthest_s, self.trusted_s, kept_s)
        kept = replace(
            self,
            newest=newest,
            last_minute=newer(self.last_minute, newest_minute),
            trusted_s=kept_s,
            writer=observed.writer,
            furthest_s=max((one for one in known if one is not None), default=None),
        )
        return kept, observed

    def _newest(self, newest_minute: int | None, wall_s: float) -> int | None:
        """The newest believable minute; one from the future only where there is no other."""
        latest = minute_of(wall_s + AHEAD_S)
        minutes = [minute for minute in (self.newest, newest_minute) if minute is not None]
        believed = [minute for minute in minutes if minute <= latest]
        return max(believed) if believed else min(minutes, default=None)

    def cutoff(self, ttl_days: int, wall_s: float | None = None) -> int:
        """The oldest day that is kept; with ``wall_s``, also by an earlier clock."""
        newest, trusted_s = self.newest, self.trusted_s
        if newest is None:
            return 0
        if trusted_s is not None:
            if wall_s is not None and wall_s < trusted_s - STEP_S:
                trusted_s = wall_s
            newest = min(newest, minute_of(trusted_s))
        return cutoff_day(newest, ttl_days)

    def when_removed(self, cutoff: int) -> Retention:
        """After the removal of what lies before a day."""
        return replace(self, removed=cutoff, highest=max(self.highest, cutoff))

    def turned_back(self) -> Retention:
        """With nothing known as removed, if that is a day still to come by the trusted time."""
        if self.trusted_s is None or self.removed <= minute_of(self.trusted_s) // 10_000:
            return self
        return replace(self, removed=0, turns=self.turns + 1)

    def write(self, session: Session, before: Retention) -> None:
        """Store what differs from ``before``."""
        for key, value in self._values().items():
            if value != before._values()[key]:
                session.run("UPDATE meta SET value = ? WHERE key = ?", (value, key))

    def _values(self) -> dict[str, str]:
        clock = ""
        if (writer := self.writer) is not None:
            clock = json.dumps(
                {
                    "trusted_s": self.trusted_s and round(self.trusted_s, 3),
                    "seen_s": round(writer.seen_s, 3),
                    "steady_s": round(writer.steady_s, 3),
                    "highest": self.highest,
                    "turns": self.turns,
                    "furthest_s": self.furthest_s and round(self.furthest_s, 3),
                }
            )
        values = (self.newest, self.last_minute, self.removed, clock)
        texts = ("" if value is None else str(value) for value in values)
        return dict(zip(_KEYS, texts, strict=True))


def remove_expired(session: Session, cutoff: int, days: int) -> tuple[int, int]:
    """Remove the oldest ``days`` days that have rows and lie before ``cutoff``.

    How many rows of metrics and TopN that were, and the oldest day that is left. Entities are
    removed with their last row: their last day is never before that of a row.
    """
    expired = _expired_days(session, cutoff, days + 1)
    if len(expired) > days:
        cutoff = expired[days]
    session.run("DELETE FROM entity WHERE last_day < ?", (cutoff,))
    # After that: a part that is being committed may just have kept one of them.
    session.run(
        "DELETE FROM entity_layer WHERE NOT EXISTS "
        "(SELECT 1 FROM entity WHERE key = entity_layer.entity)"
    )
    removed = 0
    for grain, table, of_grain in _tables(session):
        where = of_grain & Condition("bucket < ?", (day_start(grain, cutoff),))
        removed += session.run(f"DELETE FROM {table} WHERE {where.sql}", where.params)
    return removed, cutoff


def _expired_days(session: Session, cutoff: int, limit: int) -> list[int]:
    """The oldest days before ``cutoff`` that have rows."""
    days: set[int] = set()
    for grain, table, of_grain in _tables(session):
        if grain is Grain.DAY:
            where = of_grain & Condition("bucket < ?", (cutoff,))
            rows = session.rows(
                f"SELECT DISTINCT bucket FROM {table} WHERE {where.sql} ORDER BY bucket LIMIT ?",
                (*where.params, limit),
            )
            days.update(day for (day,) in rows)
    return sorted(days)[:limit]


def repair_clock(session: Session, now_s: float, after: int, *, apply: bool) -> ClockRepair:
    """Remove what lies after a minute, and trust the time ``now_s``; or only say what that does.

    Entities stay: they are removed some time after the day that they were last seen on.
    """
    before = Retention.read(session)
    rows = dict.fromkeys(Grain, 0)
    buckets: list[int] = []
    for grain, table, of_grain in _tables(session):
        where = of_grain & Condition("bucket > ?", (bucket_of(grain, after),))
        ((count, first, last),) = session.rows(
            f"SELECT count(*), min(bucket), max(bucket) FROM {table} WHERE {where.sql}",
            where.params,
        )
        rows[grain] += count
        if count and grain is Grain.MINUTE:
            buckets += [first, last]
        if count and apply:
            session.run(f"DELETE FROM {table} WHERE {where.sql}", where.params)
    newest = _newest_until(session, after)
    if apply:
        repaired = replace(
            before,
            newest=newest,
            last_minute=newest,
            trusted_s=now_s,
            furthest_s=now_s,
            writer=WriterClock(now_s, 0.0),
        ).turned_back()
        replace(repaired, highest=repaired.removed).write(session, before)
    return ClockRepair(
        applied=apply,
        before=before.state,
        newest_before=before.newest,
        newest=newest,
        rows=rows,
        first=min(buckets, default=None),
        last=max(buckets, default=None),
    )


def _newest_until(session: Session, minute: int) -> int | None:
    """The newest minute up to that one that has rows."""
    newest: int | None = None
    for grain, table, of_grain in _tables(session):
        if grain is Grain.MINUTE:
            where = of_grain & Condition("bucket <= ?", (minute,))
            ((last,),) = session.rows(
                f"SELECT max(bucket) FROM {table} WHERE {where.sql}", where.params
            )
            newest = newer(newest, last)
    return newest


def _tables(session: Session) -> Iterator[tuple[Grain, str, Condition]]:
    """Every table with buckets: a grain, its name in SQL, the condition for rows of that grain."""
    sources = session.rows("SELECT DISTINCT source FROM metric_column ORDER BY source")
    for grain in Grain:
        for (source,) in sources:
            yield grain, quote(table_name(grain, source)), Condition()
        for table in ("statement", "topn"):
            yield grain, table, Condition("grain = ?", (grain.value,))
