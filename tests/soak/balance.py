"""The books of a soak: sent = acknowledged = counted + reasons, and metrics that say the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from batchmill.sources import Grain, bucket_start
from batchmill.store import Store

SPAN = "Span"
AHEAD = "time too far ahead"
LATE_COPY_S = 60.0
"""A request that was sent twice may be stored a second time so long after its acknowledgement."""
CLOCK_S = 5.0
"""Processes may notice so late that a clock is right again."""
COMPARED = 0.3
"""At least this share of the calls must be in minutes that are compared exactly."""
Counters = Mapping[tuple[str, str, str], int]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the sender of a request knows of it at the end; times are by the right clock."""

    made_s: float
    acknowledged_s: float | None
    spans: int
    calls: Mapping[int, int]
    """How many of its spans are calls of a service, by the minute of their own time."""
    repeated: int = 0
    """How often it was sent again, because its answer did not arrive."""
    skew_days: int = 0
    """The clock of its sender was so wrong."""


@dataclass(frozen=True, kw_only=True)
class ClockMove:
    """The clocks of the whole machine were wrong for a while; times are by the right one."""

    began_s: float
    ended_s: float
    unread_since_s: float
    """When the oldest segment was written that the pipeline had not read as it began."""
    is_ahead: bool

    def may_concern(self, request: Request) -> bool:
        """Whether it is not known what becomes of a request.

        Its own times are by the wrong clock; or the pipeline may have read it by a clock that is
        behind, and then it is too new; or it was sent again, and the pipeline may have forgotten
        the first copy, as time has jumped. What a clock that is ahead calls too old counts.
        """
        if request.made_s > self.ended_s + CLOCK_S:
            return False
        if request.made_s >= self.began_s:
            return True
        acknowledged_s = request.acknowledged_s
        unread = acknowledged_s is None or acknowledged_s >= self.unread_since_s - LATE_COPY_S
        return unread and (request.repeated > 0 or not self.is_ahead)


@dataclass(frozen=True, kw_only=True)
class Sent:
    """What the senders of one road know at the end."""

    spans: int = 0
    """Different spans that were sent."""
    acknowledged: int = 0
    repeated: int = 0
    """Spans of requests that were sent again, because their answer did not arrive."""
    ahead: int = 0
    """Spans among them whose time is days ahead: each delivery of one is quarantined."""
    repeated_ahead: int = 0
    behind: int = 0
    repeated_behind: int = 0
    """Spans of days ago are not remembered, so a second delivery may count again."""
    near: int = 0
    """Spans near a move of the machine's clock: they may count, be quarantined or expire."""
    repeated_near: int = 0
    calls: Mapping[int, int] = field(default_factory=dict)
    """The calls that must be counted, by minute; none of any minute that is not here."""
    open_minutes: Set[int] = frozenset()
    """Minutes of which it is not known how many calls count."""
    open_calls: int = 0
    """The most that may be counted in those together."""

    @property
    def compared(self) -> float:
        """The share of calls in minutes that are compared exactly."""
        exact = sum(self.calls.values())
        return exact / (exact + self.open_calls) if self.open_calls else 1.0


def sent_of(requests: Iterable[Request], moves: Sequence[ClockMove] = ()) -> Sent:
    """The senders' side of the books.

    Once the machine's clock was moved, a store may keep rows of days ago for hours: see
    ``docs/operations.md``, Clocks.
    """
    totals: Counter[str] = Counter()
    calls: Counter[int] = Counter()
    unclear: Counter[int] = Counter()
    for request in requests:
        again = request.spans * request.repeated
        totals["spans"] += request.spans
        totals["repeated"] += again
        if request.acknowledged_s is not None:
            totals["acknowledged"] += request.spans
        near = any(move.may_concern(request) for move in moves)
        kind = "near" if near else "ahead" if request.skew_days > 0 else "behind"
        if near or request.skew_days:
            totals[kind] += request.spans
            totals[f"repeated_{kind}"] += again
        if near or (request.skew_days < 0 and moves):
            for minute, count in request.calls.items():
                unclear[minute] += count * (1 + request.repeated)
        elif not request.skew_days:
            calls.update(request.calls)
    exact = {minute: count for minute, count in calls.items() if minute not in unclear}
    return Sent(
        **totals,
        calls=exact,
        open_minutes=unclear.keys(),
        open_calls=unclear.total() + calls.total() - sum(exact.values()),
    )


@dataclass(frozen=True, kw_only=True)
class Counted:
    """What the store of one road has at the end."""

    spans: int = 0
    duplicates: int = 0
    quarantined: Mapping[str, int]
    """By reason."""
    lost_segments: int = 0
    """Segments that could not be read."""
    expired: int = 0
    """Rows older than the TTL, of all sources."""
    calls: Mapping[int, int]
    """The sum of ``service_cpm`` over all services, by minute."""


@dataclass(frozen=True)
class Balance:
    """The books of one road: a line, and what is wrong with them."""

    text: str
    problems: tuple[str, ...]


def read_counted(store: Store) -> Counted:
    """What a store has counted."""
    calls: Counter[int] = Counter()
    for value in store.values("service_cpm", grain=Grain.MINUTE):
        if isinstance(value.value, int):
            calls[int(bucket_start(value.bucket).timestamp()) // 60] += value.value
    return counted_of(store.counters(), calls)


def counted_of(counters: Counters, calls: Mapping[int, int]) -> Counted:
    """The counters that concern spans."""

    def total(wanted: str, source: str | None = SPAN) -> int:
        return sum(
            count
            for (counter, name, _), count in counters.items()
            if counter == wanted and source in (None, name)
        )

    return Counted(
        spans=total("rows"),
        duplicates=total("duplicates"),
        quarantined={
            reason: count
            for (counter, source, reason), count in counters.items()
            if (counter, source) == ("quarantined", SPAN)
        },
        lost_segments=total("quarantined segment", None),
        expired=total("expired", None),
        calls=calls,
    )


def balance(name: str, sent: Sent, counted: Counted) -> Balance:
    """Compare them.

    A machine whose clock jumps calls good spans too new, or forgets that it had them: each is still
    in the counters, but the sender cannot know under which. That is allowed for requests near a
    move of the clock, and for no others.
    """
    problems = [*_span_problems(sent, counted), *_call_problems(sent, counted)]
    if counted.duplicates > sent.repeated:
        problems.append(
            f"{counted.duplicates:,} duplicates, but only {sent.repeated:,} were sent again"
        )
    if counted.lost_segments:
        problems.append(f"segments that could not be read: {counted.lost_segments:,}")
    left_out = {**counted.quarantined, "expired rows": counted.expired}
    notes = [f"{count:,} {reason}" for reason, count in left_out.items() if count]
    if sent.open_minutes:
        share = f"{sent.compared:.0%} of the calls compared by minute"
        notes.append(f"{sent.near:,} spans near a clock move, {share}")
    text = (
        f"{name}: {sent.spans:,} sent, {sent.acknowledged:,} acknowledged, {counted.spans:,} "
        f"counted, {counted.duplicates:,} duplicates dropped of {sent.repeated:,} sent again, "
        f"{sum(counted.calls.values()):,} calls in the metrics"
    )
    return Balance(f"{text} ({'; '.join(notes)})" if notes else text, tuple(problems))


def _span_problems(sent: Sent, counted: Counted) -> list[str]:
    problems = []
    if sent.acknowledged != sent.spans:
        problems.append(f"{sent.spans - sent.acknowledged:,} spans were never acknowledged")
    quarantined = sum(counted.quarantined.values())
    ahead = counted.quarantined.get(AHEAD, 0)
    most_ahead = sent.ahead + sent.repeated_ahead + sent.near + sent.repeated_near
    if not sent.ahead <= ahead <= most_ahead or quarantined != ahead:
        problems.append(
            f"{sent.ahead:,} to {most_ahead:,} spans were days ahead; quarantined: "
            f"{dict(counted.quarantined)}"
        )
    if counted.expired and not sent.behind and not sent.near:
        problems.append(f"rows of good spans were too old: {counted.expired:,}")
    excess = counted.spans + ahead - sent.acknowledged
    spare = sent.repeated_ahead + sent.repeated_behind + sent.repeated_near
    most = sent.acknowledged - sent.ahead + sent.repeated_behind + sent.repeated_near
    if not 0 <= excess <= spare or counted.spans > most:
        problems.append(
            f"{sent.acknowledged:,} spans were acknowledged; {counted.spans:,} are counted and "
            f"{quarantined:,} quarantined: {excess:+,}"
        )
    return problems


def _call_problems(sent: Sent, counted: Counted) -> list[str]:
    problems = []
    minutes = (sent.calls.keys() | counted.calls.keys()) - sent.open_minutes
    wrong = {
        minute: counted.calls.get(minute, 0) - sent.calls.get(minute, 0)
        for minute in sorted(minutes)
        if counted.calls.get(minute, 0) != sent.calls.get(minute, 0)
    }
    if wrong:
        some = ", ".join(f"{count:+,} in {minute}" for minute, count in list(wrong.items())[:9])
        problems.append(
            f"service_cpm differs from the calls that were sent in {len(wrong)} of {len(minutes)} "
            f"minutes by {sum(wrong.values()):+,} (minutes since 1970: {some})"
        )
    inside = sum(counted.calls.get(minute, 0) for minute in sent.open_minutes)
    if inside > sent.open_calls:
        problems.append(
            f"service_cpm has {inside:,} calls near moves of the clock, and at most "
            f"{sent.open_calls:,} were sent"
        )
    if sent.compared < COMPARED:
        problems.append(
            f"only {sent.compared:.0%} of the calls are in minutes away from moves of the clock, "
            "too few to judge: the pipeline was far behind when they happened"
        )
    return problems
