"""Remote write when a clock was wrong: a position from the future is not waited for."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pytest

from batchmill.export.remote_write.client import RemoteTarget
from batchmill.export.remote_write.sender import PositionFile
from batchmill.sources import minute_bucket
from batchmill.store import ClockReading, Store
from batchmill.testing import ManualClock
from tests.export.remote_write_kit import position, sent, store, writing
from tests.kit.servers.prometheus import receiving
from tests.kit.stores import Measurement, Writer
from tests.kit.threads import until

__all__ = ["position", "store"]

NOON = 1_780_000_200.0
DAY_S = 86_400
AHEAD_S = 40 * DAY_S


@dataclass
class Shop:
    """A pipeline that commits a row at each minute of its clock."""

    store: Store
    clock: ManualClock = field(default_factory=lambda: ManualClock(NOON))

    def __post_init__(self) -> None:
        self._rows = Writer(self.store)
        self._steady_s = 0.0

    def commit_minutes(self, count: int) -> list[int]:
        """Commit a row in each of so many minutes; those that are complete after that."""
        minutes = []
        for _ in range(count):
            minutes.append(minute_bucket(datetime.fromtimestamp(self.clock.now(), UTC)))
            reading = ClockReading(self.clock.now(), self._steady_s)
            self._rows.write(Measurement(10, minute=minutes[-1]), clock=reading)
            self.clock.advance(60)
            self._steady_s += 60
        return minutes[:-1]

    def step(self, seconds: float) -> None:
        """Set the clock: no time passes."""
        self.clock.advance(seconds)

    def repair(self) -> None:
        """As ``batchmill store repair --apply`` does."""
        assert self.store.repair_clock(self.clock.now(), apply=True).applied


@pytest.mark.parametrize("restart", [False, True], ids=["running", "restarted"])
@pytest.mark.parametrize("at_once", [False, True], ids=["repaired later", "repaired at once"])
def test_a_clock_that_was_ahead_for_a_commit_stops_nothing(
    store: Store, position: Path, restart: bool, at_once: bool
) -> None:
    """The minutes after it are sent, and those that came just before it, too."""
    shop = Shop(store)
    before = shop.commit_minutes(3)
    with receiving() as receiver:
        writer = writing(store, receiver.url, position, shop.clock.now)
        until(lambda: writer.stats().minute == before[-1])
        shop.step(AHEAD_S)
        future = shop.commit_minutes(3)
        until(lambda: writer.stats().minute == future[-1])
        if restart:
            assert writer.close()
        shop.step(-AHEAD_S)
        if at_once:
            shop.repair()
        if restart:
            writer = writing(store, receiver.url, position, shop.clock.now)
        after_it = shop.commit_minutes(3)
        if not at_once:
            shop.repair()
        until(lambda: writer.stats().minute == after_it[-1])
        assert writer.stats().faults == {"position from the future": 1}
        assert all(sent(receiver, minute) for minute in after_it)
        assert writer.close()
    url = RemoteTarget.parse(receiver.url).url
    assert PositionFile(position, store.id, url).minute == after_it[-1]


def test_what_came_before_the_wrong_clock_and_was_not_sent_is_sent(
    store: Store, position: Path
) -> None:
    """It goes on behind the last minute of the right time, not with the newest one."""
    shop = Shop(store)
    before = shop.commit_minutes(3)
    with receiving() as receiver:
        with writing(store, receiver.url, position, shop.clock.now) as writer:
            until(lambda: writer.stats().minute == before[-1])
        missed = shop.commit_minutes(4)
        shop.step(AHEAD_S)
        future = shop.commit_minutes(3)
        with writing(store, receiver.url, position, shop.clock.now) as writer:
            until(lambda: writer.stats().minute == future[-1])
        assert not any(sent(receiver, minute) for minute in missed)
        shop.step(-AHEAD_S)
        shop.repair()
        after_it = shop.commit_minutes(3)
        with writing(store, receiver.url, position, shop.clock.now) as writer:
            until(lambda: writer.stats().minute == after_it[-1])
        assert all(sent(receiver, minute) for minute in (*missed, *after_it))


def test_a_clock_that_was_behind_sends_nothing_again(store: Store, position: Path) -> None:
    """The position is from the future by that clock, but the store has such minutes: it stays."""
    shop = Shop(store)
    before = shop.commit_minutes(3)
    with receiving() as receiver:
        with writing(store, receiver.url, position, shop.clock.now) as writer:
            until(lambda: writer.stats().minute == before[-1])
        receiver.requests.clear()
        shop.step(-AHEAD_S)
        late = shop.commit_minutes(2)
        polls = []

        def counting() -> float:
            polls.append(1)
            return shop.clock.now()

        with writing(store, receiver.url, position, counting) as writer:
            until(lambda: len(polls) > 3)
            assert writer.stats().faults == {}
        assert not any(sent(receiver, minute) for minute in late)
        shop.step(AHEAD_S)
        after_it = shop.commit_minutes(2)
        with writing(store, receiver.url, position, shop.clock.now) as writer:
            until(lambda: writer.stats().minute == after_it[-1])
            assert writer.stats().minutes_skipped == 0
