"""Exporting to a collector: everything arrives at least once, whatever the collector does."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from batchmill.export import (
    ExporterInUseError,
    ExporterSettings,
    ExporterStats,
    Target,
    open_sender,
)
from batchmill.outbox import OutboxSettings
from batchmill.queue import BufferStrategy
from batchmill.sources import bucket_start
from tests.export_kit import (
    NAME,
    QUICK,
    Mill,
    added_up,
    last_totals,
    measurements,
    mill,
    running,
    stored,
)
from tests.otlp_metrics_receiver import GrpcReceiver, HttpReceiver, Verdict
from tests.store_kit import MINUTE, Measurement

UNAVAILABLE = Verdict(grpc.StatusCode.UNAVAILABLE, 503)


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Mill]:
    """A mill on SQLite."""
    made = mill(tmp_path)
    with made.store:
        yield made


def free_port() -> int:
    """A port that nobody listens on."""
    with GrpcReceiver() as receiver:
        return receiver.port


@pytest.mark.parametrize("kind", [GrpcReceiver, HttpReceiver])
def test_every_change_arrives(one: Mill, kind: type[GrpcReceiver | HttpReceiver]) -> None:
    """The last total of each value is the store's; increments of counts add up to it."""
    with kind() as receiver:
        with running(one.exporter(receiver.target)):
            for number in range(20):
                one.commit(*measurements(number))
            one.commit(*measurements(20), settle=True)
            receiver.wait_for(lambda: len(one.store.outbox(one.outbox.place)) == 0)
        points = receiver.points()
    assert last_totals(points) == stored(one.store)
    counts = {key: n for key, n in stored(one.store).items() if key[0] == "batchmill.calls"}
    assert added_up(points, "calls") == counts
    assert one.files() == []


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
            found = exporter.stats()
        assert last_totals(receiver.points()) == stored(one.store)
    reason = "UNAVAILABLE" if kind is GrpcReceiver else "HTTP 503"
    assert found.retries == one.counted("export retries") == {reason: 5}
    assert found.failing == ""
    assert one.counted("exported values") == {"": found.sent}


def test_a_dead_collector_holds_up_no_commit(one: Mill) -> None:
    """Files wait for it; when it comes it gets all of them, in order."""
    port = free_port()
    exporter = one.exporter(f"otlp+grpc://127.0.0.1:{port}")
    with running(exporter):
        for number in range(10):
            one.commit(*measurements(number))
        assert len(one.files()) == 10
        wait_until(lambda: exporter.stats().retries.get("UNAVAILABLE", 0) > 2)
        found = exporter.stats()
        assert (found.sent, found.waiting.files, found.position) == (0, 10, 0)
        assert found.failing.startswith("UNAVAILABLE")
        with GrpcReceiver(port=port) as receiver:
            receiver.wait_for(lambda: not one.store.outbox(one.outbox.place))
            points = receiver.points()
    assert last_totals(points) == stored(one.store)
    calls = {key: n for key, n in stored(one.store).items() if key[0] == "batchmill.calls"}
    assert added_up(points, "calls") == calls
    assert one.files() == []


def test_a_collector_that_hangs_is_asked_again(one: Mill) -> None:
    """After the timeout, which is counted."""
    release = threading.Event()
    hanging = Verdict(hold=release, taken=False)
    with GrpcReceiver(lambda number: hanging if number == 1 else Verdict()) as receiver:
        exporter = one.exporter(receiver.target, dataclasses.replace(QUICK, timeout_s=0.3))
        with running(exporter):
            one.commit(*measurements(0))
            receiver.wait_for(lambda: not one.store.outbox(one.outbox.place))
        assert last_totals(receiver.points()) == stored(one.store)
        release.set()
    assert one.counted("export retries") == {"DEADLINE_EXCEEDED": 1}


def test_a_full_queue_that_blocks_loses_nothing(one: Mill) -> None:
    """It never holds more than it may, and the rest stays in the outbox meanwhile."""
    release = threading.Event()
    with GrpcReceiver(lambda number: Verdict(hold=release)) as receiver:
        small = dataclasses.replace(QUICK, buffer_size=10, max_batch=5, timeout_s=30)
        exporter = one.exporter(receiver.target, small)
        with running(exporter):
            for number in range(4):
                one.commit(*measurements(number, 20))
            receiver.wait_for(lambda: receiver.seen == 1)
            wait_until(lambda: exporter.stats().queued == 10)
            assert len(one.files()) == 4
            release.set()
            receiver.wait_for(lambda: not one.store.outbox(one.outbox.place))
            found = exporter.stats()
        assert last_totals(receiver.points()) == stored(one.store)
    assert found.dropped == {}


def test_a_full_queue_that_drops_counts_what_it_drops(one: Mill) -> None:
    """Sent and dropped are all there was; the position goes on."""
    release = threading.Event()
    with GrpcReceiver(lambda number: Verdict(hold=release)) as receiver:
        dropping = dataclasses.replace(
            QUICK,
            buffer_size=10,
            max_batch=5,
            timeout_s=30,
            strategy=BufferStrategy.IF_POSSIBLE,
        )
        exporter = one.exporter(receiver.target, dropping)
        one.commit(*measurements(0, 300, [f"e{number}" for number in range(300)]))
        with running(exporter):
            wait_until(lambda: exporter.stats().dropped.get("queue full", 0) > 0)
            release.set()
            receiver.wait_for(lambda: not one.store.outbox(one.outbox.place))
            found = exporter.stats()
    values = sum(len(one.store.values(each)) for each in one.store.metrics())
    assert found.sent + found.dropped["queue full"] == values
    assert 0 < found.sent < values
    assert one.counted("export values dropped") == dict(found.dropped)


def test_beyond_the_bound_of_the_outbox_drops_equal_the_counters(tmp_path: Path) -> None:
    """What never arrives of a dead collector's is what was counted, no more and no less."""
    one = mill(tmp_path, bound=OutboxSettings(max_files=3))
    port = free_port()
    with one.store, running(one.exporter(f"otlp+grpc://127.0.0.1:{port}")) as thread:
        wait_until(lambda: one.store.exporters())
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


def test_points_tell_what_they_are_about(one: Mill) -> None:
    """A total is a gauge; an increment is a delta where adding up makes sense, else a gauge."""
    with GrpcReceiver() as receiver:
        one.exporter(receiver.target).run(once=True)  # nothing is there: it ends at once
        one.commit(Measurement(10), Measurement(30, name="POST"))
        one.exporter(receiver.target).run(once=True)
        one.commit(Measurement(50))
        one.exporter(receiver.target).run(once=True)
        points = receiver.points()
    start_ns = int(bucket_start(MINUTE).timestamp()) * 10**9
    assert {(p.start_ns, p.end_ns) for p in points} == {(start_ns, start_ns + 60 * 10**9)}
    assert {p.about for p in points if p.label is None} == {
        (
            ("batchmill.entity.id", "id-one"),
            ("batchmill.entity.kind", "endpoint"),
            ("batchmill.entity.name", "one"),
            ("batchmill.layer", "GENERAL"),
        )
    }
    kinds = {p.metric: p.kind for p in points}
    assert kinds["batchmill.calls"] == kinds["batchmill.avg"] == "gauge"
    assert kinds["batchmill.calls.increment"] == "monotonic delta"
    assert kinds["batchmill.statuses.increment"] == "monotonic delta"
    assert kinds["batchmill.avg.increment"] == "gauge"

    def of(metric: str) -> list[tuple[str | None, int | float]]:
        return [(p.label, p.value) for p in points if p.metric == f"batchmill.{metric}"]

    assert of("avg") == [(None, 20), (None, 30)]
    assert of("avg.increment") == [(None, 20), (None, 50)]
    assert of("calls") == [(None, 2), (None, 3)]
    assert of("calls.increment") == [(None, 2), (None, 1)]
    assert of("statuses") == [("GET", 1), ("POST", 1), ("GET", 2), ("POST", 1)]
    assert of("statuses.increment") == [("GET", 1), ("POST", 1), ("GET", 1)]


@pytest.mark.parametrize("kind", [GrpcReceiver, HttpReceiver])
def test_points_that_the_collector_refuses_are_counted(
    one: Mill, kind: type[GrpcReceiver | HttpReceiver]
) -> None:
    """It took the request, but for some points (partial success): those are not sent again."""
    with kind(lambda number: Verdict(rejected=3)) as receiver:
        one.commit(*measurements(0))
        one.exporter(receiver.target).run(once=True)
        assert receiver.seen == 1
    assert one.counted("export points refused") == {"by the peer": 3}


@pytest.mark.parametrize("kind", [GrpcReceiver, HttpReceiver])
def test_what_is_refused_for_good_is_counted_and_left(
    one: Mill, kind: type[GrpcReceiver | HttpReceiver]
) -> None:
    """The collector says that it is wrong: sending it again would not help."""
    wrong = Verdict(grpc.StatusCode.INVALID_ARGUMENT, 400)
    with kind(lambda number: wrong if number == 1 else Verdict()) as receiver:
        for _ in range(2):
            one.commit(*measurements(0))
            one.exporter(receiver.target).run(once=True)
        assert receiver.seen == 2
        assert len(receiver.requests) == 1
    reason = "refused: INVALID_ARGUMENT" if kind is GrpcReceiver else "refused: HTTP 400"
    # Both commits are alike in how many values they change.
    assert one.counted("export values dropped") == {reason: one.counted("exported values")[""]}


def test_a_request_beyond_the_collectors_limit_is_cut(one: Mill) -> None:
    """In halves, until it is taken."""
    with GrpcReceiver(max_bytes=50_000) as receiver:
        one.commit(*measurements(0, 40, [f"entity {number}" for number in range(40)]))
        exporter = one.exporter(receiver.target)
        exporter.run(once=True)
        assert last_totals(receiver.points()) == stored(one.store)
        assert receiver.seen > 2
    assert exporter.stats().dropped == {}


@pytest.mark.parametrize("kind", [GrpcReceiver, HttpReceiver])
def test_headers_go_with_each_request(one: Mill, kind: type[GrpcReceiver | HttpReceiver]) -> None:
    """A token, for one."""
    with kind() as receiver:
        one.commit(*measurements(0))
        token = dataclasses.replace(QUICK, headers={"Authorization": "Bearer x"})
        one.exporter(receiver.target, token).run(once=True)
    assert [each["authorization"] for each in receiver.headers] == ["Bearer x"]


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
        assert last_totals(receiver.points()) == stored(one.store)
    assert one.files() == []


def test_what_is_in_hand_is_sent_before_it_ends(one: Mill) -> None:
    """A file that was begun is finished, and its position stored."""
    release = threading.Event()
    with GrpcReceiver(lambda number: Verdict(hold=release)) as receiver:
        one.commit(*measurements(0, 50))
        exporter = one.exporter(receiver.target, dataclasses.replace(QUICK, drain_s=30))
        with running(exporter) as thread:
            receiver.wait_for(lambda: receiver.seen == 1)
            exporter.stop()
            release.set()
            thread.join(30)
        assert last_totals(receiver.points()) == stored(one.store)
    assert one.files() == one.named() == []


def test_one_exporter_of_a_name_at_a_time(one: Mill) -> None:
    """Two would send everything twice."""
    with GrpcReceiver() as receiver, running(one.exporter(receiver.target)):
        wait_until(lambda: one.store.exporters())
        with pytest.raises(ExporterInUseError, match="--name"):
            one.exporter(receiver.target).run()


def test_exporters_of_two_names_both_get_everything(one: Mill) -> None:
    """Files go when both have them."""
    with GrpcReceiver() as first, HttpReceiver() as second:
        one.store.join_outbox("second", one.outbox.place)
        one.commit(*measurements(0))
        one.exporter(first.target, name="first").run(once=True)
        assert len(one.files()) == 1
        one.exporter(second.target, name="second").run(once=True)
        assert one.files() == []
        assert last_totals(first.points()) == last_totals(second.points()) == stored(one.store)


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


def test_stats_are_of_one_moment(one: Mill) -> None:
    """What an exporter tells before it has done anything."""
    exporter = one.exporter("otlp+grpc://127.0.0.1:1")
    one.commit(*measurements(0))
    found = exporter.stats()
    assert isinstance(found, ExporterStats)
    assert (found.name, found.position, found.waiting.files, found.sent) == (NAME, 0, 1, 0)
    assert found.retries == {}


@pytest.mark.parametrize(
    "address",
    [
        "grpc://host:1",
        "otlp+grpc://",
        "otlp+grpc://host:1/path",
        "kafka://host:1",
        "kafka://host:1/a/b",
        "otlp+http://user:secret@host:1",
        "otlp+http://host:port",
        "",
    ],
)
def test_an_address_that_is_none_is_refused(address: str) -> None:
    """With what is allowed, and without a password that stands in it."""
    with pytest.raises(ValueError, match=r"otlp\+grpc://host:port") as caught:
        Target.parse(address)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("address", "shown", "tls"),
    [
        ("otlp+grpc://host", "otlp+grpc://host:4317", False),
        ("otlp+https://host/custom/v1/metrics", "otlp+https://host:4318/custom/v1/metrics", True),
        ("otlp+grpcs://[::1]:7", "otlp+grpcs://[::1]:7", True),
        ("kafka://one,two:1/topic", "kafka://one:9092,two:1/topic", False),
    ],
)
def test_an_address_is_completed(address: str, shown: str, tls: bool) -> None:
    """The usual ports are filled in; the path of HTTP may be another."""
    target = Target.parse(address)
    assert (str(target), target.tls) == (shown, tls)
    assert Target.parse(shown) == target


def test_a_sender_may_be_closed_twice() -> None:
    """Also one that never sent."""
    for address in ("otlp+grpc://127.0.0.1:1", "otlp+http://127.0.0.1:1"):
        sender = open_sender(Target.parse(address), ExporterSettings())
        sender.interrupt()
        sender.close()
        sender.close()


def wait_until(done: Callable[[], Any]) -> None:
    """Nobody tells of what an exporter counts: it is asked for."""
    deadline = time.monotonic() + 30
    while not done():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)
