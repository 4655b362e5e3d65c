"""A collector that fails, hangs or is dead: everything arrives at least once, or is counted."""

from __future__ import annotations

import dataclasses
import threading
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from batchmill.outbox import OutboxSettings
from batchmill.queue import BufferStrategy
from batchmill.store import StoreUnavailableError
from tests.kit.exporters import (
    NAME,
    QUICK,
    Mill,
    added_up,
    check_all_arrived,
    last_totals,
    measurements,
    mill,
    one,
    running,
    stored,
)
from tests.kit.otlp import GrpcReceiver, HttpReceiver, Verdict
from tests.kit.processes import free_port
from tests.kit.stores import MINUTE, Measurement
from tests.kit.threads import WAIT_S, until

UNAVAILABLE = Verdict(grpc.StatusCode.UNAVAILABLE, 503)
__all__ = ["one"]


@pytest.mark.parametrize("kind", [GrpcReceiver, HttpReceiver])
def test_a_collector_that_fails_and_recovers_gets_everything(
    one: Mill, kind: type[GrpcReceiver | HttpReceiver]
) -> None:
    """Each retry is counted by its reason, in the store too."""
    with kind(lambda number: UNAVAILABLE if number <= 5 else Verdict()) as receiver:
        exporter = one.exporter(receiver.target)
        with running(exporter):
            for number in range(5):
                one.commit(*measurements(number))
            receiver.wait_for(lambda: not one.store.outbox(one.outbox.place))
            stats = exporter.stats()
        check_all_arrived(one, receiver.points())
    reason = "UNAVAILABLE" if kind is GrpcReceiver else "HTTP 503"
    assert stats.retries == one.counted("export retries") == {reason: 5}
    assert stats.failing == ""
    assert one.counted("exported values") == {"": stats.sent}


def test_a_dead_collector_holds_up_no_commit(one: Mill) -> None:
    """Files wait for it; when it comes it gets all of them, in order."""
    port = free_port()
    exporter = one.exporter(f"otlp+grpc://127.0.0.1:{port}")
    with running(exporter):
        for number in range(10):
            one.commit(*measurements(number))
        assert len(one.files()) == 10
        until(lambda: exporter.stats().retries.get("UNAVAILABLE", 0) > 2)
        stats = exporter.stats()
        assert (stats.sent, stats.waiting.files, stats.position) == (0, 10, 0)
        assert stats.failing.startswith("UNAVAILABLE")
        with GrpcReceiver(port=port) as receiver:
            receiver.wait_for(lambda: not one.store.outbox(one.outbox.place))
            points = receiver.points()
    check_all_arrived(one, points)


def test_a_request_to_a_hanging_collector_is_sent_again(one: Mill) -> None:
    """After the timeout, which is counted."""
    release = threading.Event()
    hanging = Verdict(hold=release, taken=False)
    with GrpcReceiver(lambda number: hanging if number == 1 else Verdict()) as receiver:
        exporter = one.exporter(receiver.target, dataclasses.replace(QUICK, timeout_s=1))
        with running(exporter):
            one.commit(*measurements(0))
            receiver.wait_for(lambda: not one.store.outbox(one.outbox.place))
        check_all_arrived(one, receiver.points())
        release.set()
    # On a busy machine, the next ones may be too late as well.
    assert one.counted("export retries").keys() == {"DEADLINE_EXCEEDED"}


def test_a_full_queue_that_blocks_loses_nothing(one: Mill) -> None:
    """It never holds more than it may, and the rest stays in the outbox meanwhile."""
    release = threading.Event()
    with GrpcReceiver(lambda number: Verdict(hold=release)) as receiver:
        small = dataclasses.replace(QUICK, buffer_size=10, max_batch=5, timeout_s=WAIT_S)
        exporter = one.exporter(receiver.target, small)
        with running(exporter):
            for number in range(4):
                one.commit(*measurements(number, 20))
            receiver.wait_for(lambda: receiver.seen == 1)
            until(lambda: exporter.stats().queued == 10)
            assert len(one.files()) == 4
            release.set()
            receiver.wait_for(lambda: not one.store.outbox(one.outbox.place))
        check_all_arrived(one, receiver.points())


def test_a_full_queue_that_drops_counts_what_it_drops(one: Mill) -> None:
    """Sent and dropped are all there was; the position goes on."""
    release = threading.Event()
    with GrpcReceiver(lambda number: Verdict(hold=release)) as receiver:
        dropping = dataclasses.replace(
            QUICK,
            buffer_size=10,
            max_batch=5,
            timeout_s=WAIT_S,
            strategy=BufferStrategy.IF_POSSIBLE,
        )
        exporter = one.exporter(receiver.target, dropping)
        one.commit(*measurements(0, 300, [f"e{number}" for number in range(300)]))
        with running(exporter):
            until(lambda: exporter.stats().dropped.get("queue full", 0) > 0)
            release.set()
            receiver.wait_for(lambda: not one.store.outbox(one.outbox.place))
            stats = exporter.stats()
    values = sum(len(one.store.values(metric)) for metric in one.store.metrics())
    assert stats.sent + stats.dropped["queue full"] == values
    assert 0 < stats.sent < values
    assert one.counted("export values dropped") == dict(stats.dropped)


def test_beyond_the_bound_of_the_outbox_drops_equal_the_counters(tmp_path: Path) -> None:
    """What never arrives of a dead collector's is what was counted, no more and no less."""
    one = mill(tmp_path, bound=OutboxSettings(max_files=3))
    port = free_port()
    with one.store, running(one.exporter(f"otlp+grpc://127.0.0.1:{port}")) as thread:
        until(lambda: one.store.exporters())
        for number in range(8):
            one.commit(Measurement(5, minute=MINUTE + number))
        assert len(one.files()) == 3
        with GrpcReceiver(port=port) as receiver:
            receiver.wait_for(lambda: not one.store.outbox(one.outbox.place))
            points = receiver.points()
        assert thread.is_alive()
        arrived = {p.end_ns for p in points if p.metric == "batchmill.calls"}
        # A file that was in hand when it had to go arrives all the same, and is not counted then.
        assert one.counted("export dropped").get("outbox full", 0) == 8 - len(arrived)
        expected = {key: n for key, n in stored(one.store).items() if key[1] in arrived}
        assert last_totals(points) == expected


def test_files_that_go_while_the_collector_is_slow_stay_counted(tmp_path: Path) -> None:
    """An exporter that knew of them, and came to find them gone, has not sent them."""
    one = mill(tmp_path, bound=OutboxSettings(max_files=3))
    release = threading.Event()
    # A file is more than the queue holds, so the exporter has not even opened the next one.
    small = dataclasses.replace(QUICK, buffer_size=2, max_batch=2, timeout_s=60)
    with one.store, GrpcReceiver(lambda number: Verdict(hold=release)) as receiver:
        for number in range(3):
            one.commit(Measurement(5, minute=MINUTE + number))
        with running(one.exporter(receiver.target, small)):
            receiver.wait_for(lambda: receiver.seen == 1)
            for number in range(3, 8):
                one.commit(Measurement(5, minute=MINUTE + number))
            release.set()
            receiver.wait_for(lambda: not one.store.outbox(one.outbox.place))
        arrived = {p.end_ns for p in receiver.points() if p.metric == "batchmill.calls"}
        assert len(arrived) == 4  # the one in hand, and the three that were left
        assert one.counted("export dropped") == {"outbox full": 8 - 4}


def test_values_that_are_tried_again_do_not_stay_counted_as_dropped(
    one: Mill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store fails in the middle of a file, which is then read once more from its start."""
    monkeypatch.setattr("batchmill.outbox.outbox.ROWS", 4)  # so many are read at a time
    one.commit(*measurements(0, 10, [f"e{number}" for number in range(10)]))
    read, calls = one.store.totals, iter(range(100))

    def failing(*given: Any) -> Any:
        if next(calls) == 1:
            raise StoreUnavailableError("store", 1, 0.0, "as the test wants it")
        return read(*given)

    monkeypatch.setattr(one.store, "totals", failing)
    wrong = Verdict(grpc.StatusCode.INVALID_ARGUMENT)
    with GrpcReceiver(lambda number: wrong if number == 1 else Verdict()) as receiver:
        exporter = one.exporter(receiver.target)
        exporter.run(once=True)
        assert last_totals(receiver.points()) == stored(one.store)
    assert exporter.stats().dropped == {}
    assert one.counted("export values dropped") == {}
    assert one.counted("export retries") == {"store unavailable": 1}


def test_an_increment_that_comes_twice_is_known_by_its_commit(one: Mill) -> None:
    """Two commits that add the same are two; a request whose answer was lost is one."""
    lost = Verdict(grpc.StatusCode.UNAVAILABLE, taken=True)
    with GrpcReceiver(lambda number: lost if number == 1 else Verdict()) as receiver:
        one.commit(Measurement(5))
        one.commit(Measurement(5))
        one.exporter(receiver.target).run(once=True)
        points = receiver.points()
    calls = [p for p in points if p.metric == "batchmill.calls.increment"]
    assert len(calls) > 2
    assert {p.commit for p in calls} == {f"{one.outbox.place}/{seq}" for seq in (1, 2)}
    counts = {key: n for key, n in stored(one.store).items() if key[0] == "batchmill.calls"}
    assert added_up(points, "calls") == counts


def test_a_retry_after_of_zero_does_not_shorten_the_pauses(one: Mill) -> None:
    """Retry-After: 0 is no leave to come back at once; our own pauses are kept to."""
    slow = dataclasses.replace(QUICK, initial_ms=60_000, max_ms=60_000, drain_s=0.2)
    with HttpReceiver(lambda number: UNAVAILABLE) as receiver:
        one.commit(*measurements(0))
        exporter = one.exporter(receiver.target, slow)
        with running(exporter):
            until(lambda: exporter.stats().retries)
        assert receiver.seen == 1


def test_an_error_of_its_own_is_tried_again_with_pauses(
    one: Mill, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Told once with where it happened, counted each time; and nothing is passed over."""
    with GrpcReceiver() as receiver:
        one.commit(*measurements(0))
        exporter = one.exporter(receiver.target)
        send, calls = exporter._sender.send, iter(range(100))

        def failing(values: Any) -> int:
            if next(calls) < 3:
                raise ZeroDivisionError("as the test wants it")
            return send(values)

        monkeypatch.setattr(exporter._sender, "send", failing)
        exporter.run(once=True)
        assert last_totals(receiver.points()) == stored(one.store)
    assert one.counted("export retries") == {"error of its own": 3}
    assert caplog.text.count("ZeroDivisionError: as the test wants it") == 1


def test_what_went_before_an_exporter_came_to_it_is_dropped(tmp_path: Path) -> None:
    """The newest files are there, and are sent."""
    one = mill(tmp_path, bound=OutboxSettings(max_files=3))
    with one.store, GrpcReceiver() as receiver:
        one.store.join_outbox(NAME, one.outbox.place)
        for number in range(8):
            one.commit(Measurement(5, minute=MINUTE + number))
        one.exporter(receiver.target).run(once=True)
        arrived = {point.end_ns for point in receiver.points()}
        assert arrived == set(sorted({key[1] for key in stored(one.store)})[-3:])
        assert len(arrived) == 3
        assert one.counted("export dropped") == {"outbox full": 5}


@pytest.mark.parametrize("kind", [GrpcReceiver, HttpReceiver])
def test_it_ends_within_seconds_though_the_collector_hangs(
    one: Mill, kind: type[GrpcReceiver | HttpReceiver]
) -> None:
    """And what was not acknowledged is sent by the next one."""
    release = threading.Event()
    hanging = Verdict(hold=release, taken=False)
    settings = dataclasses.replace(QUICK, timeout_s=300, drain_s=0.2, buffer_size=5)
    with kind(lambda number: hanging if number == 1 else Verdict()) as receiver:
        one.commit(*measurements(0, 50))
        with running(one.exporter(receiver.target, settings)) as thread:
            receiver.wait_for(lambda: receiver.seen == 1)
        assert not thread.is_alive()
        assert len(one.files()) == 1
        release.set()
        one.exporter(receiver.target).run(once=True)
        check_all_arrived(one, receiver.points())


def test_what_is_in_hand_is_sent_before_it_ends(one: Mill) -> None:
    """A file that was begun is finished, and its position stored."""
    release = threading.Event()
    with GrpcReceiver(lambda number: Verdict(hold=release)) as receiver:
        one.commit(*measurements(0, 50))
        exporter = one.exporter(receiver.target, dataclasses.replace(QUICK, drain_s=WAIT_S))
        with running(exporter) as thread:
            receiver.wait_for(lambda: receiver.seen == 1)
            exporter.stop()
            release.set()
            thread.join(WAIT_S)
        check_all_arrived(one, receiver.points())


def test_a_file_that_cannot_be_read_is_counted_and_passed(one: Mill) -> None:
    """One that is gone likewise; those after it are sent."""
    for number in range(3):
        one.commit(Measurement(5, minute=MINUTE + number))
    broken, gone, _ = one.store.outbox(one.outbox.place)
    (one.outbox.folder / broken.path).write_bytes(b"nonsense" * 10)
    (one.outbox.folder / gone.path).unlink()
    with GrpcReceiver() as receiver:
        one.exporter(receiver.target).run(once=True)
        ends = {point.end_ns for point in receiver.points()}
    assert len(ends) == 1
    assert one.counted("export dropped") == {"file cannot be read": 1, "file is gone": 1}
    assert one.named() == []


def test_what_has_expired_meanwhile_is_counted_and_left(one: Mill) -> None:
    """The store has no total of it any more."""
    one.commit(Measurement(5))
    one.commit(Measurement(5, minute=MINUTE + 20_0000))  # 20 days later
    with GrpcReceiver() as receiver:
        one.exporter(receiver.target).run(once=True)
        assert last_totals(receiver.points()) == stored(one.store)
    metrics = len(one.store.metrics())
    assert one.counted("export values dropped") == {"not in the store any more": metrics}


def test_a_connection_that_the_collector_closed_is_no_failure(one: Mill) -> None:
    """It had nothing to do for a while: the next request goes over a new one, at once."""
    with HttpReceiver(hang_up=True) as receiver:
        with running(one.exporter(receiver.target)):
            for number in range(3):
                one.commit(*measurements(number))
                receiver.wait_for(lambda: not one.store.outbox(one.outbox.place))
                until(partial(lambda closed: receiver.closed > closed, number))
        check_all_arrived(one, receiver.points())
    assert one.counted("export retries") == {}
