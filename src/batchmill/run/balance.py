"""The balance at the end of a demo: spans sent = acknowledged = counted by the pipeline."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from batchmill.store import StoreMissingError, open_store
from batchmill.wording import count_of

SPAN = "Span"


@dataclass(frozen=True)
class Sent:
    """The spans that the demo's traffic has sent."""

    sent: int
    acknowledged: int


@dataclass(frozen=True)
class CommittedSpans:
    """The spans that the pipeline has committed, since the store exists."""

    spans: int = 0
    duplicates: int = 0
    quarantined: int = 0

    def since(self, before: CommittedSpans) -> CommittedSpans:
        """The difference."""
        return CommittedSpans(
            self.spans - before.spans,
            self.duplicates - before.duplicates,
            self.quarantined - before.quarantined,
        )


@dataclass(frozen=True)
class Balance:
    """Whether the counts are equal, and the line that says so."""

    equal: bool
    text: str


def read_counted(url: str) -> CommittedSpans:
    """What a store has counted; nothing if there is no store."""
    try:
        with open_store(url, create=False) as store:
            return counted_of(store.counters())
    except StoreMissingError:
        return CommittedSpans()


def counted_of(counters: Mapping[tuple[str, str, str], int]) -> CommittedSpans:
    """The counters of spans."""
    totals = {"rows": 0, "duplicates": 0, "quarantined": 0}
    for (what, source, _), count in counters.items():
        if source == SPAN and what in totals:
            totals[what] += count
    return CommittedSpans(totals["rows"], totals["duplicates"], totals["quarantined"])


def read_sent(lines: Iterable[str]) -> Sent | None:
    """The result that ``batchmill demo`` prints as its last line of JSON; None: there is none."""
    for line in reversed(list(lines)):
        try:
            result = json.loads(line)
            return Sent(int(result["sent"]), int(result["acknowledged"]))
        except (ValueError, TypeError, KeyError):
            continue
    return None


def balance(sent: Sent | None, counted: CommittedSpans, received: int | None) -> Balance:
    """Compare what was sent with what was ``counted`` meanwhile.

    ``received`` is what ingest acknowledged meanwhile, to any sender, each delivery; None: not
    known, since ingest was restarted. Others may have sent spans, too, and a delivery that was
    repeated because its answer was lost is acknowledged twice and counted once.
    """
    if sent is None:
        return Balance(False, f"no balance: the demo gave no result ({counted.spans:,} counted)")
    expected = sent.acknowledged
    others = 0
    notes = []
    if received is not None:
        expected = received - counted.duplicates
        others = max(0, expected - sent.acknowledged)
    if others:
        notes.append(f"{others:,} from other senders")
    if counted.duplicates:
        repeated = count_of(counted.duplicates, "repeated delivery", "repeated deliveries")
        notes.append(f"{repeated} counted once")
    if counted.quarantined:
        notes.append(f"{counted.quarantined:,} quarantined")
    equal = sent.sent == sent.acknowledged <= expected == counted.spans
    own = counted.spans - others
    first = "=" if sent.sent == sent.acknowledged else "≠"
    second = "=" if own == sent.acknowledged else "≠"
    text = (
        f"{'balance' if equal else 'OUT OF BALANCE'}: {count_of(sent.sent, 'span')} sent {first} "
        f"{sent.acknowledged:,} acknowledged {second} {own:,} counted by the pipeline"
    )
    return Balance(equal, f"{text} ({'; '.join(notes)})" if notes else text)
