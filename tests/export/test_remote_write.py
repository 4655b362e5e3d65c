"""Remote write: each minute once, in order, whatever the receiver does meanwhile."""

from __future__ import annotations

import socket
import struct
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from batchmill import ConfigError
from batchmill.export import SeriesLimits
from batchmill.export.prometheus.series import minutes_before
from batchmill.export.remote_write.client import RemoteTarget
from batchmill.export.remote_write.sender import PositionFile
from batchmill.store import Store
from tests.export.remote_write_kit import not_empty, position, reached, sent, store, writing
from tests.kit.servers.prometheus import (
    Judge,
    Samples,
    after,
    decode,
    expected,
    last_minutes,
    receiving,
)
from tests.kit.stores import Measurement, Writer
from tests.kit.threads import spawn, until

__all__ = ["position", "store"]


def test_every_complete_minute_is_sent(store: Store, position: Path) -> None:
    """Each minute goes out once its successor has begun, with the store's values."""
    minutes = last_minutes(4)
    with receiving() as receiver, writing(store, receiver.url, position) as writer:
        rows = Writer(store)
        rows.write(Measurement(5, minute=minutes[0]))
        for number in range(1, 4):
            rows.write(
                Measurement(number, "GET", minutes[number]),
                Measurement(99, 'odd "\\\n', minutes[number], 'e "\\\n'),
            )
            until(partial(reached, writer, minutes[number - 1]))
        for minute in minutes[:3]:
            assert sent(receiver, minute) == not_empty(expected(store, minute))
        assert sent(receiver, minutes[3]) == {}
        stats = writer.stats()
    assert stats.taken == stats.sent


def test_a_large_minute_is_many_requests(store: Store, position: Path) -> None:
    """A request has no more samples than allowed, and a minute larger than the queue passes it."""
    first, second = last_minutes(2)
    Writer(store).write(
        *(Measurement(1, "x", first, f"e{n}") for n in range(200)), Measurement(1, minute=second)
    )
    with (
        receiving() as receiver,
        writing(store, receiver.url, position, max_samples=100, buffer_samples=150) as writer,
    ):
        until(lambda: writer.stats().minutes == 1)
        sizes = [len(decode(body)) for _, _, body in receiver.requests]
        assert sent(receiver, first) == not_empty(expected(store, first))
    assert max(sizes) <= 100


def test_series_over_the_limit_are_counted(store: Store, position: Path) -> None:
    """The limit of series holds for remote write, too."""
    first, second = last_minutes(2)
    Writer(store, script="calls = from(Endpoint.*).count();").write(
        *(Measurement(1, "x", first, f"e{n}") for n in range(20)), Measurement(1, minute=second)
    )
    limits = SeriesLimits(max_series=15)
    with receiving() as receiver, writing(store, receiver.url, position, limits=limits) as writer:
        until(lambda: writer.stats().minutes == 1)
        assert (len(sent(receiver, first)), writer.stats().dropped) == (15, 5)


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_receiver_that_recovers_gets_everything(
    store: Store, position: Path, status: int
) -> None:
    """5xx and 429 are tried again until the receiver takes it; each try is counted."""
    first, second = last_minutes(2)
    Writer(store).write(Measurement(10, minute=first), Measurement(10, minute=second))
    with (
        receiving([(status, {})] * 5) as receiver,
        writing(store, receiver.url, position) as writer,
    ):
        until(lambda: writer.stats().minutes == 1)
        stats = writer.stats()
        assert sent(receiver, first) == not_empty(expected(store, first))
    assert (stats.failing, stats.failing_s) == ("", 0)
    assert (stats.retries, stats.requests) == (5, {f"HTTP {status}": 5, "HTTP 204": 1})
    assert stats.taken == stats.sent
    assert stats.waiting == 0


def test_what_is_refused_is_counted_and_not_sent_again(store: Store, position: Path) -> None:
    """After a refusal the next minute goes out; what was refused is counted under its answer."""
    minutes = last_minutes(3)
    rows = Writer(store)
    rows.write(*(Measurement(10, minute=minute) for minute in minutes[:2]))
    with (
        receiving([(401, {})]) as receiver,
        writing(store, receiver.url, position) as writer,
    ):
        until(lambda: writer.stats().minute == minutes[0])
        rows.write(Measurement(10, minute=minutes[2]))
        until(lambda: writer.stats().minute == minutes[1])
        stats = writer.stats()
        assert [status for status, _, _ in receiver.requests] == [401, 204]
        assert sent(receiver, minutes[1]) == not_empty(expected(store, minutes[1]))
    assert stats.refused_for == {"HTTP 401": len(expected(store, minutes[0]))}
    assert stats.taken == stats.sent + stats.refused


def refusing(entity: str, status: int, said: str) -> Judge:
    """A receiver that takes no request in which there is something of an entity."""

    def judge(samples: Samples) -> tuple[int, str]:
        bad = any(labels["entity_id"] == entity for labels, _, _ in samples)
        return (status, said) if bad else (204, "")

    return judge


@pytest.mark.parametrize(
    ("status", "said", "reason"),
    [
        (400, "out of order sample", "out of order"),
        (400, "duplicate sample for timestamp", "another value is there"),
        (400, "out of bounds", "too old"),
        (500, "too old sample", "too old"),
        (422, "", "HTTP 422"),
    ],
)
def test_one_bad_sample_takes_no_others_with_it(
    store: Store, position: Path, status: int, said: str, reason: str
) -> None:
    """A request that is refused is cut, down to what is wrong with it; that alone is counted."""
    first, second = last_minutes(2)
    Writer(store, script="calls = from(Endpoint.*).count();").write(
        *(Measurement(1, "x", first, f"e{n}") for n in range(200)), Measurement(1, minute=second)
    )
    with receiving() as receiver:
        receiver.judge = refusing("id-e77", status, said)
        with writing(store, receiver.url, position) as writer:
            until(lambda: writer.stats().minute == first)
            stats = writer.stats()
        arrived = {labels["entity_id"] for labels, _, _ in receiver.samples()}
    assert arrived == {f"id-e{n}" for n in range(200)} - {"id-e77"}
    assert (stats.sent, stats.refused_for, stats.retries) == (199, {reason: 1}, 0)


def test_a_request_that_is_refused_whole_is_not_sent_sample_by_sample(
    store: Store, position: Path
) -> None:
    """Cutting ends when nothing of it is taken, and all of it is counted."""
    first, second = last_minutes(2)
    Writer(store, script="calls = from(Endpoint.*).count();").write(
        *(Measurement(1, "x", first, f"e{n}") for n in range(500)), Measurement(1, minute=second)
    )
    with receiving() as receiver:
        receiver.judge = lambda samples: (400, "too many series")
        with writing(store, receiver.url, position) as writer:
            until(lambda: writer.stats().minute == first)
            stats = writer.stats()
        assert len(receiver.requests) < 40
    assert (stats.sent, stats.refused_for) == (0, {"HTTP 400": 500})


def test_an_error_of_its_own_loses_nothing(
    store: Store, position: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What could not even be tried counts as not sent: the position stays in front of it."""
    first, second = last_minutes(2)
    Writer(store).write(Measurement(10, minute=first), Measurement(10, minute=second))
    with receiving() as receiver:
        with monkeypatch.context() as patch:
            patch.setattr("batchmill.export.remote_write.sender.encode", lambda samples: 1 / 0)
            with writing(store, receiver.url, position) as writer:
                until(lambda: writer.stats().unsent)
            assert writer.stats().faults == {"sending failed": 1}
            assert writer.stats().unsent == writer.stats().taken
            assert not position.exists()
        with writing(store, receiver.url, position) as writer:
            until(lambda: writer.stats().minute == first)
        assert sent(receiver, first) == not_empty(expected(store, first))


def test_a_dead_receiver_holds_nobody_up(store: Store, position: Path) -> None:
    """While nobody answers, commits go on, what waits is bounded, and closing is quick."""
    minutes = last_minutes(10)
    rows = Writer(store)
    rows.write(*(Measurement(1, "x", minutes[0], f"e{n}") for n in range(50)))
    writer = writing(
        store, "remote+http://127.0.0.1:1/write", position, buffer_samples=100, max_samples=50
    )
    try:
        for minute in minutes[1:]:
            rows.write(*(Measurement(1, "x", minute, f"e{n}") for n in range(50)))
        until(lambda: writer.stats().retries > 3)
        failing = writer.stats().failing
        waiting = writer.stats().waiting
    finally:
        assert not spawn(writer.close).result()
    stats = writer.stats()
    assert waiting <= 100 + 50 + 50  # in the queue, in the request, about to be put
    assert failing == "unreachable"
    assert stats.requests == {"unreachable": stats.retries}
    assert stats.minute is None or stats.minute < minutes[0]  # the one before is empty: done with
    assert (stats.sent, stats.waiting) == (0, 0)
    assert stats.taken == stats.unsent > 0


def test_a_receiver_that_hangs_does_not_hold_up_the_end(store: Store, position: Path) -> None:
    """A request that is not answered is given up when the writer closes."""
    first, second = last_minutes(2)
    Writer(store).write(Measurement(10, minute=first), Measurement(10, minute=second))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"remote+http://127.0.0.1:{silent.getsockname()[1]}/write"
        writer = writing(store, url, position, timeout_s=3600)
        connection, _ = silent.accept()
        with connection:
            connection.recv(1)
            assert not spawn(writer.close).result()
    assert writer.stats().unsent == writer.stats().taken > 0


def test_a_restart_goes_on_where_it_ended(store: Store, position: Path) -> None:
    """The next writer sends the minutes behind the position, and none before it."""
    minutes = last_minutes(5)
    rows = Writer(store)
    rows.write(*(Measurement(10, minute=minute) for minute in minutes[:2]))
    with receiving() as receiver:
        with writing(store, receiver.url, position) as writer:
            until(lambda: writer.stats().minute == minutes[0])
        rows.write(*(Measurement(10, minute=minute) for minute in minutes[2:]))
        receiver.requests.clear()
        with writing(store, receiver.url, position, late_minutes=0) as writer:
            until(lambda: writer.stats().minute == minutes[3])
            assert writer.stats().minutes == 3
        times = sorted({at_ms for _, _, at_ms in receiver.samples()})
    assert times == [after(minute) * 1000 for minute in minutes[1:4]]


def test_without_a_position_history_stays_where_it_is(store: Store, position: Path) -> None:
    """The first start sends the newest complete minute, and not all that the store has."""
    minutes = last_minutes(5)
    Writer(store).write(*(Measurement(10, minute=minute) for minute in minutes))
    with receiving() as receiver, writing(store, receiver.url, position) as writer:
        until(lambda: writer.stats().minute == minutes[3])
        assert {at_ms for _, _, at_ms in receiver.samples()} == {after(minutes[3]) * 1000}


def test_a_store_that_was_empty_is_sent_from_its_start(store: Store, position: Path) -> None:
    """Whoever was there before the first commit sends every minute of it, however many it has."""
    minutes = last_minutes(5)
    with receiving() as receiver, writing(store, receiver.url, position) as writer:
        until(lambda: writer._from_start)
        Writer(store).write(*(Measurement(10, minute=minute) for minute in minutes))
        until(lambda: writer.stats().minute == minutes[3])
        times = sorted({at_ms for _, _, at_ms in receiver.samples()})
    assert times == [after(minute) * 1000 for minute in minutes[:4]]


def test_after_a_long_pause_old_minutes_are_skipped(store: Store, position: Path) -> None:
    """A position that lies too far back is not followed by a flood; what is skipped is counted."""
    minutes = last_minutes(10)
    Writer(store).write(*(Measurement(10, minute=minute) for minute in minutes))
    with receiving() as receiver:
        url = RemoteTarget.parse(receiver.url).url
        PositionFile(position, store.id, url).save(minutes_before(minutes[0], 100))
        with writing(store, receiver.url, position, catch_up_minutes=3) as writer:
            until(lambda: writer.stats().minute == minutes[8])
            stats = writer.stats()
    assert stats.minutes == 3
    assert stats.minutes_skipped == 100 + 8 - 3


def test_a_minute_that_was_given_up_is_sent_again(store: Store, position: Path) -> None:
    """What a writer could not send before its end, the next one sends."""
    first, second = last_minutes(2)
    Writer(store).write(Measurement(10, minute=first), Measurement(10, minute=second))
    with receiving([(500, {})] * 10_000) as receiver:
        with writing(store, receiver.url, position) as writer:
            until(lambda: writer.stats().retries > 1)
        assert writer.stats().unsent == writer.stats().taken
        receiver.script.clear()
        with writing(store, receiver.url, position) as writer:
            until(lambda: writer.stats().minute == first)
        assert sent(receiver, first) == not_empty(expected(store, first))


def test_a_position_of_another_store_is_refused(store: Store, position: Path) -> None:
    """A file that belongs to another receiver or store is not taken for one's own."""
    PositionFile(position, store.id, "remote+http://elsewhere/write").save(202403011200)
    with pytest.raises(ConfigError, match="of the same store and receiver"):
        writing(store, "remote+http://127.0.0.1:1/write", position)
    position.write_text("{}")
    with pytest.raises(ConfigError, match="remove it"):
        writing(store, "remote+http://127.0.0.1:1/write", position)


def test_a_series_that_ends_is_marked(store: Store, position: Path) -> None:
    """An entity that a minute has no more gets a stale marker there, also after a restart."""
    minutes = last_minutes(4)
    rows = Writer(store)
    rows.write(*(Measurement(1, "x", minutes[0], name) for name in "abc"))
    rows.write(*(Measurement(1, "x", minutes[1], name) for name in "ab"))
    with receiving() as receiver:
        with writing(store, receiver.url, position) as writer:
            until(lambda: writer.stats().minute == minutes[0])
            rows.write(*(Measurement(1, "x", minutes[2], name) for name in "a"))
            until(lambda: writer.stats().minute == minutes[1])
        rows.write(Measurement(1, "x", minutes[3], "a"))
        with writing(store, receiver.url, position) as writer:
            until(lambda: writer.stats().minute == minutes[2])
        ended = {
            (labels["entity_id"], at_ms)
            for labels, value, at_ms in receiver.samples()
            if struct.pack(">d", value).hex() == "7ff0000000000002"
        }
    assert ended == {("id-c", after(minutes[1]) * 1000), ("id-b", after(minutes[2]) * 1000)}


def test_a_store_that_fails_is_read_again(
    store: Store, position: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the store cannot be read it is counted, and what was not read is sent afterwards."""
    first, second = last_minutes(2)
    Writer(store).write(Measurement(10, minute=first), Measurement(10, minute=second))
    read, faults = store.bucket_values, [OSError("away")] * 3

    def failing(*args: Any, **settings: Any) -> Any:
        if faults:
            raise faults.pop()
        return read(*args, **settings)

    monkeypatch.setattr(store, "bucket_values", failing)
    with receiving() as receiver, writing(store, receiver.url, position) as writer:
        until(lambda: writer.stats().minute == first)
        assert writer.stats().faults == {"store not read": 3}
