"""A wrong clock removes nothing: what expiry counts from, and the repair of a store."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from batchmill.oal import load
from batchmill.sources import Grain
from batchmill.store import DOUBTFUL, EXPIRED, ClockReading, ClockState, Store
from batchmill.store.batch import REMOVED_DAY, TOO_OLD, UNCONFIRMED
from batchmill.store.clock import (
    CONFIRM_S,
    DAY_S,
    HOUR_S,
    RATE,
    RUN_S,
    Observation,
    TrustedTime,
    WriterClock,
    minute_of,
    observe,
    span_of,
)
from tests.kit.stores import Backend, Measurement, Writer, downgrade
from tests.store.parts.kit import Parted

A = "a = from(Endpoint.*).count();"
NOON = datetime(2026, 11, 17, 12, tzinfo=UTC).timestamp()
TTL = 7
EVERY_S = 60.0
TRUSTED = WriterClock(NOON, 10 * HOUR_S)


# The decision alone.


def test_the_trusted_time_goes_on_between_commits() -> None:
    """By a clock that nobody can set; to ask for the same again begins nothing anew."""
    steady_s = 5.0
    trusted = TrustedTime(lambda: steady_s)
    assert trusted.now_s() is None
    trusted.note(ClockState(NOON, NOON + 40 * DAY_S))
    steady_s += 60
    trusted.note(ClockState(NOON, NOON + 40 * DAY_S))
    assert trusted.now_s() == NOON + 60
    trusted.note(ClockState(NOON - DAY_S, NOON - DAY_S))
    assert trusted.now_s() == NOON - DAY_S
    trusted.note(ClockState(None, NOON, minute_of(NOON - 300 * DAY_S)))
    assert trusted.now_s() == NOON - 300 * DAY_S, "only past events: their own time"


def test_the_first_clock_is_trusted() -> None:
    """A store without commits has nothing that could be removed."""
    assert observe(None, None, NOON, None).trusted_s == NOON


def test_a_clock_without_steps_is_followed_at_once() -> None:
    """Also after a weekend without a commit, if the process has lived through it."""
    for passed_s in (5.0, 65 * HOUR_S):
        seen = observe(NOON, TRUSTED, NOON + passed_s, passed_s)
        assert (seen.trusted_s, seen.step_s) == (NOON + passed_s, 0.0)


@pytest.mark.parametrize("elapsed_s", [5.0, None])
def test_a_step_ahead_is_not_followed(elapsed_s: float | None) -> None:
    """Whether the process was there, or was started anew with the wrong clock."""
    seen = observe(NOON, TRUSTED, NOON + 40 * DAY_S, elapsed_s)
    assert seen.trusted_s == NOON
    assert seen.step_s == pytest.approx(40 * DAY_S, abs=10)
    assert seen.writer.steady_s == 0


def test_a_clock_that_goes_back_is_followed_at_once() -> None:
    """To trust an earlier time removes nothing."""
    assert observe(NOON, TRUSTED, NOON - 40 * DAY_S, 5.0).trusted_s == NOON - 40 * DAY_S


def test_a_clock_that_goes_back_a_little_changes_nothing() -> None:
    """Clocks of several machines differ by seconds."""
    assert observe(NOON, TRUSTED, NOON - 60, 5.0).trusted_s == NOON


def test_a_new_process_within_a_day_goes_on() -> None:
    """One that is started once a day by cron has no step in its clock."""
    seen = observe(NOON, TRUSTED, NOON + 25 * HOUR_S, None)
    assert (seen.trusted_s, seen.step_s) == (NOON + 25 * HOUR_S, 0.0)


def test_a_fast_clock_is_followed_by_the_time_that_passes() -> None:
    """Steps that are each too small to notice do not add up."""
    trusted_s, writer = NOON, TRUSTED
    for number in range(1, 100):
        wall_s = NOON + number * (HOUR_S - 1)
        seen = observe(trusted_s, writer, wall_s, 5.0)
        trusted_s, writer = seen.trusted_s, seen.writer
    assert trusted_s <= NOON + 99 * 5 * RATE


def test_a_later_run_confirms_the_last_one() -> None:
    """A writer that runs once a week, and commits once, is a week behind, not for ever."""
    trusted_s, writer = NOON, WriterClock(NOON, 0.0)
    for week in range(1, 20):
        seen = observe(trusted_s, writer, NOON + week * RUN_S, None)
        trusted_s, writer = seen.trusted_s, seen.writer
        assert trusted_s == NOON + (week - 1) * RUN_S


def _commits(
    seen: Observation, wall_s: float, seconds: float, every_s: float = EVERY_S
) -> Iterator[Observation]:
    """What commits make of a clock that goes on from ``wall_s`` for so long."""
    passed_s = 0.0
    while passed_s < seconds:
        passed_s += every_s
        seen = observe(seen.trusted_s, seen.writer, wall_s + passed_s, every_s)
        yield seen


def test_a_store_that_was_off_for_a_month_catches_up() -> None:
    """Nothing for an hour, then a day in an hour, until it is there; nobody has to do anything."""
    start_s = NOON + 30 * DAY_S
    seen = observe(NOON, TRUSTED, start_s, None)
    *_, last = _commits(seen, start_s, CONFIRM_S - EVERY_S)
    assert last.trusted_s == NOON
    *_, last = _commits(seen, start_s, CONFIRM_S + HOUR_S)
    assert last.trusted_s == pytest.approx(NOON + DAY_S, abs=RATE * EVERY_S)
    *_, last = _commits(seen, start_s, 33 * HOUR_S)
    assert last.trusted_s == start_s + 33 * HOUR_S


def test_a_clock_that_is_corrected_within_an_hour_has_changed_nothing() -> None:
    """Neither while it was 40 days ahead, nor after that."""
    wrong_s = NOON + 40 * DAY_S
    *_, seen = _commits(observe(NOON, TRUSTED, wrong_s, 5.0), wrong_s, CONFIRM_S - 2 * EVERY_S)
    assert seen.trusted_s == NOON
    right_s = NOON + CONFIRM_S
    seen = observe(seen.trusted_s, seen.writer, right_s, EVERY_S)
    assert seen.trusted_s == NOON
    *_, seen = _commits(seen, right_s, 2 * HOUR_S)
    assert seen.trusted_s == right_s + 2 * HOUR_S


# In a store.


class Clocked:
    """Writes a measurement with the time of its clock at each commit, whole or by parts."""

    def __init__(self, store: Store, *, by_parts: bool = False) -> None:
        self.store = store
        self.now_s = NOON
        self.steady_s = 1000.0
        self.entity = "one"
        self._parted = Parted(store)
        self._by_parts = by_parts

    def write(self, *, ago_s: float = 0.0) -> dict[tuple[str, str, str], int]:
        """Commit a row that happened so long ago; the counters of the commit."""
        row = Measurement(1, minute=minute_of(self.now_s - ago_s), entity=self.entity)
        clock = ClockReading(self.now_s, self.steady_s)
        writer = self._parted.writer
        if self._by_parts:
            opened = self.store.begin_parts(
                writer.stream, writer.claim.epoch, writer.number, wall_s=self.now_s
            )
            for parts in ((0, 2), (1, 3)):
                self.store.commit_parts(*self._parted.task([row], opened, *parts))
            batch = self._parted.books([row])
        else:
            batch = writer.batch([row])
        batch.clock = clock
        result = self.store.commit(batch)
        assert result.applied
        writer.number += 1
        return dict(result.counters)

    def let_pass(self, seconds: float, every_s: float = DAY_S) -> None:
        """Commit every so often, until that much time has passed."""
        for _ in range(round(seconds / every_s)):
            self.now_s += every_s
            self.steady_s += every_s
            self.write()

    def days(self) -> list[int]:
        """The days that the store has values of."""
        return [value.bucket for value in self.store.values("calls", grain=Grain.DAY)]


@pytest.fixture(params=[False, True], ids=["whole", "parts"])
def by_parts(request: pytest.FixtureRequest) -> bool:
    """Whether batches are committed by parts."""
    return bool(request.param)


@pytest.fixture
def clocked(backend: Backend, by_parts: bool) -> Clocked:
    """A store with a week of data."""
    clocked = Clocked(backend.open(ttl_days=TTL), by_parts=by_parts)
    clocked.write()
    clocked.let_pass(TTL * DAY_S)
    assert len(clocked.days()) == TTL + 1
    return clocked


def test_a_clock_that_is_ahead_for_a_commit_removes_nothing(clocked: Clocked) -> None:
    """Its rows are kept and counted, and what comes with the right clock counts as before."""
    before = clocked.days()
    clocked.now_s += 40 * DAY_S
    assert clocked.write()[DOUBTFUL, "Endpoint", UNCONFIRMED] == 1
    assert clocked.days()[:-1] == before
    clocked.now_s -= 40 * DAY_S
    counted = clocked.write()
    assert not any(what in (EXPIRED, DOUBTFUL) for what, *_ in counted)
    assert clocked.days()[:-1] == before
    assert clocked.store.newest_minute() == minute_of(clocked.now_s)


def test_a_clock_that_is_behind_for_a_commit_loses_nothing(clocked: Clocked) -> None:
    """Rows of the past are kept and counted, though they are older than the TTL."""
    clocked.let_pass(3 * DAY_S)
    before = clocked.days()
    clocked.now_s -= 40 * DAY_S
    counted = clocked.write()
    assert counted[DOUBTFUL, "Endpoint", REMOVED_DAY] == 1
    assert (EXPIRED, "Endpoint", TOO_OLD) not in counted
    assert clocked.days()[1:] == before
    clocked.now_s += 40 * DAY_S
    assert (EXPIRED, "Endpoint", TOO_OLD) not in clocked.write()
    assert clocked.days()[1:] == before


def test_expiry_goes_on_after_a_wrong_clock(clocked: Clocked) -> None:
    """When the right one has been there for a while, old days are removed as ever."""
    clocked.now_s += 40 * DAY_S
    clocked.write()
    clocked.now_s -= 40 * DAY_S
    clocked.write()
    clocked.let_pass(4 * DAY_S)
    assert len(clocked.days()) == TTL + 1 + 1  # the one from the future


def test_a_weekend_without_a_commit_is_no_step(clocked: Clocked) -> None:
    """The first commit after it removes what has expired, and nothing is doubtful."""
    oldest = clocked.days()[:3]
    clocked.now_s += 65 * HOUR_S
    clocked.steady_s += 65 * HOUR_S
    counted = clocked.write()
    clocked.write()
    assert not set(oldest[:2]) & set(clocked.days())
    assert not any(what == DOUBTFUL for what, *_ in counted)
    assert clocked.store.clock().doubts(clocked.now_s) == []


def test_a_store_goes_on_after_a_month(backend: Backend, by_parts: bool) -> None:
    """New rows count and are read at once; the old ones go, some at each commit, an hour later."""
    first = Clocked(backend.open(ttl_days=TTL), by_parts=by_parts)
    first.let_pass(TTL * DAY_S)
    before = first.days()
    first.store.close()
    store = backend.open(ttl_days=TTL)
    again = Clocked.__new__(Clocked)
    again.__dict__.update(first.__dict__)
    again.store = store
    again.now_s += 30 * DAY_S
    again.steady_s = 5.0
    writer = first._parted.writer
    last = writer.number - 1
    writer.store = again._parted.store = store
    writer.claim = store.claim(writer.stream, writer.checkpoint, fresh=False, committed=last)
    writer.layout = store.register(writer.metrics, stream=writer.stream)
    again.write()
    assert again.days()[:-1] == before
    assert store.newest_minute() == minute_of(again.now_s)
    (doubt,) = store.clock().doubts(again.now_s)
    assert "30 days ahead of the store's" in doubt
    again.let_pass(HOUR_S, every_s=HOUR_S / 2)
    assert again.days()[:-1] == before[-len(again.days()) + 1 :]
    again.let_pass(48 * HOUR_S, every_s=6 * HOUR_S)
    assert min(again.days()) > max(before)
    assert store.clock().doubts(again.now_s) == []


def test_a_commit_removes_no_more_than_a_day_more_than_it_has(backend: Backend) -> None:
    """A lowered TTL, too, takes effect little by little."""
    clocked = Clocked(backend.open(ttl_days=60))
    clocked.write()
    clocked.let_pass(20 * DAY_S)
    days = clocked.days()
    clocked.store._ttl_days = 3
    lengths = []
    for _ in range(10):
        clocked.write()
        lengths.append(len(clocked.days()))
    assert len(days) == 21
    assert lengths == [19, 17, 15, 13, 11, 9, 7, 5, 4, 4]
    assert clocked.days() == days[-4:]


def test_past_events_expire_by_their_own_time(backend: Backend) -> None:
    """A backfill of last year into an empty store keeps as much as the TTL says."""
    writer = Writer(backend.open(ttl_days=TTL))
    clock = ClockReading(NOON, 0.0)
    for day in range(20):
        writer.write(Measurement(1, minute=minute_of(NOON - (400 - day) * DAY_S)), clock=clock)
    assert len(writer.store.values("calls", grain=Grain.DAY)) == TTL + 1


def test_past_events_stay_until_the_first_clock_is_confirmed(
    backend: Backend, by_parts: bool
) -> None:
    """The clock of a new store may be wrong, and its first events of the present are a step."""
    store = backend.open(ttl_days=TTL)
    fill = Writer(store, stream="backfill-x", checkpoint="c2", retire=False)
    for day in range(TTL):
        row = Measurement(1, minute=minute_of(NOON - (40 - day) * DAY_S))
        fill.write(row, clock=ClockReading(NOON, 0.0))
    assert store.clock().trusted_s is None
    clocked = Clocked(store, by_parts=by_parts)
    before = clocked.days()
    for _ in range(TTL):
        clocked.write()
    assert clocked.days()[:-1] == before
    clocked.let_pass(48 * HOUR_S, every_s=6 * HOUR_S)
    assert not set(before) & set(clocked.days())


@pytest.mark.parametrize(("ttl_days", "expired"), [(60, 0), (TTL, 1)])
def test_a_backfill_of_last_month_needs_a_ttl_that_is_long_enough(
    backend: Backend, ttl_days: int, expired: int
) -> None:
    """Beside present data, older rows than the TTL are expired, whatever the clock says."""
    clocked = Clocked(backend.open(ttl_days=ttl_days))
    clocked.let_pass(DAY_S)
    fill = Writer(clocked.store, stream="backfill-x", checkpoint="c2", retire=False)
    row = Measurement(1, minute=minute_of(clocked.now_s - 30 * DAY_S))
    clock = ClockReading(clocked.now_s, clocked.steady_s)
    assert clocked.store.commit(fill.batch([row], clock=clock)).expired == expired


def test_a_backfill_with_a_wrong_clock_does_not_move_expiry(clocked: Clocked) -> None:
    """A stream that is new to the store is not trusted more than those that it knows."""
    before = clocked.days()
    fill = Writer(clocked.store, stream="backfill-x", checkpoint="c2", retire=False)
    wrong_s = clocked.now_s + 40 * DAY_S
    fill.write(Measurement(1, minute=minute_of(wrong_s)), clock=ClockReading(wrong_s, 0.0))
    clocked.write()
    assert clocked.days()[:-1] == before


def test_a_batch_that_is_run_again_keeps_its_cutoff(backend: Backend) -> None:
    """Its parts keep the same days in all runs, though the clock has gone back meanwhile."""
    clocked = Clocked(backend.open(ttl_days=TTL), by_parts=True)
    clocked.let_pass(DAY_S)
    writer = clocked._parted.writer
    key = (writer.stream, writer.claim.epoch, writer.number)
    first = clocked.store.begin_parts(*key, wall_s=clocked.now_s)
    again = clocked.store.begin_parts(*key, wall_s=clocked.now_s - 40 * DAY_S)
    assert again.cutoff == first.cutoff
    assert clocked.write(ago_s=20 * DAY_S)[EXPIRED, "Endpoint", TOO_OLD] == 1


def test_a_store_of_the_fourth_schema_trusts_its_newest_minute(backend: Backend) -> None:
    """No more: the first clock after the upgrade may be wrong."""
    first = Clocked(backend.open(ttl_days=TTL))
    first.let_pass(TTL * DAY_S)
    before = first.days()
    downgrade(first.store, 4)
    backend.close()
    store = backend.open(ttl_days=TTL)
    assert store.clock() == ClockState(None, None, minute_of(first.now_s))
    fill = Writer(store, stream="next", checkpoint="c2")
    wrong_s = first.now_s + 40 * DAY_S
    row = Measurement(1, minute=minute_of(wrong_s))
    fill.write(row, clock=ClockReading(wrong_s, 0.0))
    assert [value.bucket for value in store.values("calls", grain=Grain.DAY)][:-1] == before
    assert store.clock().trusted_s == first.now_s


def test_expiry_goes_on_after_a_clock_that_was_wrong_for_days(clocked: Clocked) -> None:
    """Long enough to be trusted, and to remove a part of the week: the day after it is corrected,
    days expire again, and an entity that was removed is there again."""
    off_s = 60 * DAY_S
    clocked.now_s += off_s
    clocked.entity = "other"
    clocked.let_pass(20 * DAY_S, every_s=4 * DAY_S)
    assert [entity.name for entity in clocked.store.entities()] == ["other"]
    clocked.now_s -= off_s + 20 * DAY_S
    clocked.entity = "one"
    assert (EXPIRED, "Endpoint", TOO_OLD) not in clocked.write()
    assert minute_of(clocked.now_s) // 10_000 in clocked.days()
    clocked.let_pass(10 * DAY_S)
    latest = minute_of(clocked.now_s) // 10_000
    assert len([day for day in clocked.days() if day <= latest]) == TTL + 1
    assert [entity.name for entity in clocked.store.entities()] == ["one", "other"]


def test_a_wrong_clock_gives_away_no_column(clocked: Clocked) -> None:
    """The values of a metric that was removed from the script have not expired."""
    store, writer = clocked.store, clocked._parted.writer
    store.register(load(A), stream=writer.stream)
    clocked.now_s += 40 * DAY_S
    writer.write(clock=ClockReading(clocked.now_s, clocked.steady_s), newest_minute=209901010000)
    layout = store.register(load(A + "c = from(Endpoint.latency).max();"), stream=writer.stream)
    assert layout.columns["c"] != writer.layout.columns["slowest"]


# What an operator sees and does.


def test_doubts_are_told_with_what_to_do(clocked: Clocked) -> None:
    """While the clock is wrong; after that until the store is repaired."""
    assert clocked.store.clock().doubts(clocked.now_s) == []
    clocked.now_s += 40 * DAY_S
    clocked.write()
    (held,) = clocked.store.clock().doubts(clocked.now_s)
    assert held.startswith("expiry is held back: the clock is 40 days ahead of the store's")
    clocked.now_s -= 40 * DAY_S
    clocked.write()
    (future,) = clocked.store.clock().doubts(clocked.now_s)
    assert "2027-01-03 12:00 UTC, 40 days ahead of the clock" in future
    assert "batchmill store repair" in future


def test_a_repair_first_says_what_it_would_remove(clocked: Clocked) -> None:
    """Nothing is changed without ``apply``."""
    before = clocked.days()
    clocked.now_s += 40 * DAY_S
    clocked.write()
    clocked.now_s -= 40 * DAY_S
    repair = clocked.store.repair_clock(clocked.now_s)
    assert not repair.applied
    assert repair.rows == {Grain.MINUTE: 1, Grain.HOUR: 1, Grain.DAY: 1}
    assert repair.first == repair.last == minute_of(clocked.now_s + 40 * DAY_S)
    assert clocked.days()[:-1] == before
    assert clocked.store.clock().doubts(clocked.now_s)


def test_a_repair_removes_what_comes_from_the_future(clocked: Clocked) -> None:
    """And nothing else; the writer that runs goes on."""
    before = clocked.days()
    clocked.now_s += 40 * DAY_S
    clocked.write()
    clocked.now_s -= 40 * DAY_S
    assert clocked.store.repair_clock(clocked.now_s, apply=True).applied
    assert clocked.days() == before
    assert clocked.store.newest_minute() == minute_of(clocked.now_s)
    assert clocked.store.clock().doubts(clocked.now_s) == []
    clocked.let_pass(2 * DAY_S)
    assert len(clocked.days()) == TTL + 1


def test_a_repair_lets_a_store_take_rows_again(backend: Backend) -> None:
    """One that has trusted a clock from the future, for days, counts the right rows as before."""
    clocked = Clocked(backend.open(ttl_days=TTL))
    clocked.now_s += 40 * DAY_S
    clocked.let_pass(3 * DAY_S)
    clocked.now_s -= 43 * DAY_S
    clocked.store.repair_clock(clocked.now_s, apply=True)
    assert clocked.store.newest_minute() is None
    assert not any(what in (EXPIRED, DOUBTFUL) for what, *_ in clocked.write())
    assert clocked.days() == [minute_of(clocked.now_s) // 10_000]


def test_a_repair_trusts_the_clock_it_is_given(clocked: Clocked) -> None:
    """Where expiry waits after a long pause, it need not wait any longer."""
    clocked.now_s += 30 * DAY_S
    clocked.write()
    clocked.store.repair_clock(clocked.now_s, apply=True)
    for _ in range(TTL):
        clocked.write()
    assert clocked.days() == [minute_of(clocked.now_s) // 10_000]


@pytest.mark.parametrize(
    ("seconds", "text"), [(HOUR_S, "1 hour"), (DAY_S, "24 hours"), (2 * DAY_S, "2 days")]
)
def test_lengths_of_time_are_told_in_hours_or_days(seconds: float, text: str) -> None:
    """In days from two on."""
    assert span_of(seconds) == text
