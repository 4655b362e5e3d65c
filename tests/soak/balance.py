"""The books of a soak: sent = acknowledged = counted + reasons, and metrics that say the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from batchmill.sources import Grain
from batchmill.store import Store

SPAN = "Span"
AHEAD = "time too far ahead"
Counters = Mapping[tuple[str, str, str], int]


@dataclass(frozen=True, kw_only=True)
class Sent:
    """What the senders of one road know at the end."""

    spans: int = 0
    """Different spans that were sent."""
    acknowledged: int = 0
    repeated: int = 0
    """Spans of requests that were sent again, because their answer did not arrive."""
    served: int = 0
    """Spans among them that are calls of a service."""
    ahead: int = 0
    """Spans among them whose time is days ahead: each delivery of one is quarantined."""
    repeated_ahead: int = 0
    served_ahead: int = 0
    repeated_behind: int = 0
    """Spans of days ago are not remembered, so a second delivery may count again."""
    served_behind: int = 0


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
    calls: int = 0
    """The sum of ``service_cpm`` over all minutes and services."""


@dataclass(frozen=True)
class Balance:
    """The books of one road: a line, and what is wrong with them."""

    text: str
    problems: tuple[str, ...]


def read_counted(store: Store) -> Counted:
    """What a store has counted."""
    values = [value.value for value in store.values("service_cpm", grain=Grain.MINUTE)]
    return counted_of(store.counters(), sum(n for n in values if isinstance(n, int)))


def counted_of(counters: Counters, calls: int) -> Counted:
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


def balance(name: str, sent: Sent, counted: Counted, *, clock_moved: bool) -> Balance:
    """Compare them; with ``clock_moved``, what is left out because of its time is not judged.

    A machine whose clock jumps calls good spans too old, or too new: each of them is still in the
    counters, under that reason, but the sender cannot know how many.
    """
    problems = []
    if sent.acknowledged != sent.spans:
        problems.append(f"{sent.spans - sent.acknowledged:,} spans were never acknowledged")
    quarantined = sum(counted.quarantined.values())
    ahead = counted.quarantined.get(AHEAD, 0)
    if clock_moved:
        excess = counted.spans + quarantined - sent.acknowledged
        spare = sent.repeated
    else:
        excess = counted.spans - (sent.acknowledged - sent.ahead)
        spare = sent.repeated_behind
        if not 0 <= ahead - sent.ahead <= sent.repeated_ahead or quarantined != ahead:
            problems.append(
                f"{sent.ahead:,} spans were days ahead; quarantined: {dict(counted.quarantined)}"
            )
        if counted.expired and not sent.served_behind:
            problems.append(f"rows of good spans were too old: {counted.expired:,}")
        calls = sent.served - sent.served_ahead - sent.served_behind
        if counted.calls != calls:
            problems.append(
                f"service_cpm has {counted.calls:,} calls, and {calls:,} were sent: "
                f"{counted.calls - calls:+,}"
            )
    if not 0 <= excess <= spare:
        problems.append(
            f"{sent.acknowledged:,} spans were acknowledged; {counted.spans:,} are counted and "
            f"{quarantined:,} quarantined: {excess:+,}"
        )
    if counted.duplicates > sent.repeated:
        problems.append(
            f"{counted.duplicates:,} duplicates, but only {sent.repeated:,} were sent again"
        )
    if counted.lost_segments:
        problems.append(f"segments that could not be read: {counted.lost_segments:,}")
    left_out = {**counted.quarantined, "expired rows": counted.expired}
    notes = [f"{count:,} {reason}" for reason, count in left_out.items() if count]
    text = (
        f"{name}: {sent.spans:,} sent, {sent.acknowledged:,} acknowledged, {counted.spans:,} "
        f"counted, {counted.duplicates:,} duplicates dropped of {sent.repeated:,} sent again, "
        f"{counted.calls:,} calls in the metrics"
    )
    return Balance(f"{text} ({'; '.join(notes)})" if notes else text, tuple(problems))
