"""The account at the end of a demonstration: sent = acknowledged = counted."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from batchmill.run.figures import Counted


@dataclass(frozen=True)
class Sent:
    """What the demo's traffic says of itself."""

    sent: int
    acknowledged: int


@dataclass(frozen=True)
class Balance:
    """Whether it balances, and how to say so."""

    whole: bool
    text: str


def read_sent(lines: Iterable[str]) -> Sent | None:
    """The account in the last line that is one; None: there is none."""
    for line in reversed(list(lines)):
        try:
            found = json.loads(line)
            return Sent(int(found["sent"]), int(found["acknowledged"]))
        except (ValueError, TypeError, KeyError):
            continue
    return None


def balance(sent: Sent | None, counted: Counted, received: int | None) -> Balance:
    """Compare what was sent with what was ``counted`` meanwhile.

    ``received`` is what ingest acknowledged meanwhile, to anybody, each delivery; None: not known,
    since it was started again. Others may have sent, too, and a delivery that was repeated because
    its answer was lost is acknowledged twice and counted once.
    """
    if sent is None:
        return Balance(False, f"no balance: the demo gave no account ({counted.spans:,} counted)")
    expected = sent.acknowledged
    others = 0
    notes = []
    if received is not None:
        expected = received - counted.duplicates
        others = max(0, expected - sent.acknowledged)
    if others:
        notes.append(f"{others:,} of other senders")
    if counted.duplicates:
        notes.append(f"{counted.duplicates:,} repeated deliveries counted once")
    if counted.quarantined:
        notes.append(f"{counted.quarantined:,} set aside")
    whole = sent.sent == sent.acknowledged <= expected == counted.spans
    first = "=" if sent.sent == sent.acknowledged else "≠"
    mine = counted.spans - others
    second = "=" if mine == sent.acknowledged else "≠"
    text = (
        f"{'balance' if whole else 'OUT OF BALANCE'}: {sent.sent:,} spans sent {first} "
        f"{sent.acknowledged:,} acknowledged {second} {mine:,} counted by the pipeline"
    )
    return Balance(whole, f"{text} ({'; '.join(notes)})" if notes else text)
