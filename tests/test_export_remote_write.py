"""Remote write: each minute once, in order, whatever the receiver does meanwhile."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from batchmill import ConfigError
from batchmill.export import RemoteWriter, RemoteWriteSettings, SeriesLimits
from batchmill.export._minutes import minutes_before
from batchmill.export._remote_write_http import Target, judged
from batchmill.export._remote_write_position import Position
from batchmill.export._remote_write_proto import STALE, decode, encode
from batchmill.store import EntityRow, Store, open_store
from tests.prometheus import running_prometheus, until
from tests.prometheus_kit import Key, Receiver, after, expected, last_minutes, receiving
from tests.store_kit import Measurement, Writer

QUICK: dict[str, Any] = {
    "poll_s": 0.01,
    "initial_ms": 5,
    "max_ms": 20,
    "late_every_s": 0,
    "close_timeout_s": 0.2,
}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """An empty store."""
    with open_store(f"sqlite:///{tmp_path}/store.db") as opened:
        yield opened


@pytest.fixture
def position(tmp_path: Path) -> Path:
    """Where a writer notes how far it has come."""
    return tmp_path / "position.json"


def writing(store: Store, to: str, position: Path, **settings: Any) -> RemoteWriter:
    """A writer that does everything at once."""
    return RemoteWriter(store, to, position, RemoteWriteSettings(**(QUICK | settings)))


def reached(writer: RemoteWriter, minute: int) -> bool:
    """Whether a minute is the last one that a writer is done with."""
    return writer.stats().minute == minute


def sent(receiver: Receiver, minute: int) -> dict[Key, float]:
    """What a receiver took of a minute, stale markers left out; the last value of each series."""
    found: dict[Key, float] = {}
    for labels, value, at_ms in receiver.samples():
        if at_ms == after(minute) * 1000 and value == value:
            name = labels.pop("__name__")
            found[name, frozenset(labels.items())] = value
    return found


def not_empty(values: dict[Key, float]) -> dict[Key, float]:
    """The same with labels as remote write has them: none that is empty."""
    return {
        (name, frozenset(each for each in labels if each[1])): value
        for (name, labels), value in values.items()
    }


def test_a_request_is_what_the_specification_wants(store: Store, position: Path) -> None:
    """Headers, and labels in order with the name among them and none empty, at the minute's end."""
    first, second = last_minutes(2)
    nowhere = EntityRow("endpoint", "id-one", "one")
    Writer(store).write(
        Measurement(10, minute=first), Measurement(10, minute=second), entities=[nowhere]
    )
    with receiving() as receiver, writing(store, receiver.url, position) as writer:
        until(lambda: writer.stats().minutes == 1)
        ((_, headers, body),) = receiver.requests
    assert {
        name: headers[name]
        for name in ("Content-Encoding", "Content-Type", "X-Prometheus-Remote-Write-Version")
    } == {
        "Content-Encoding": "snappy",
        "Content-Type": "application/x-protobuf",
        "X-Prometheus-Remote-Write-Version": "0.1.0",
    }
    for labels, _, at_ms in decode(body):
        assert list(labels) == sorted(labels)
        assert labels["__name__"].startswith("batchmill_")
        assert all(labels.values())
        assert at_ms == after(first) * 1000


def test_samples_survive_the_coding() -> None:
    """What is packed comes back: any text, any number, and the one not-a-number bit for bit."""
    labels = (("__name__", "m"), ("name", 'say "hi"\\\n名前\U0001f41f'))
    body = encode([(labels, 0.1, 1), (labels, -5, -2), (labels, STALE, 2**60)])
    found = decode(body)
    assert [(each[0], each[2]) for each in found] == [(dict(labels), n) for n in (1, -2, 2**60)]
    assert [each[1] for each in found[:2]] == [0.1, -5]
    assert struct.pack(">d", found[2][1]).hex() == "7ff0000000000002"


def test_the_packing_is_the_raw_block_format() -> None:
    """A body is snappy's block: its length unpacked, then literals; and no stream of frames."""
    # Short, and without repetition: one literal, whose length less one stands in front of it.
    plain = bytes.fromhex("0a1a0a0d0a085f5f6e616d655f5f12016d120909000000000000f03f")
    body = encode([((("__name__", "m"),), 1.0, 0)])
    assert body.startswith(bytes([len(plain)]))
    assert b"sNaPpY" not in body


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


def test_retry_after_is_kept_to() -> None:
    """A receiver's pause is kept to, if it is longer than our own, and not longer than allowed."""
    settings = RemoteWriteSettings(initial_ms=100, max_ms=1000, max_retry_after_s=60)
    now_s = 1_700_000_000.0
    seconds = judged(503, "", "7", now_s).retry_after_s
    date = judged(429, "", "Tue, 14 Nov 2023 22:13:50 GMT", now_s).retry_after_s
    assert (seconds, date) == (7, 30)
    assert settings.pause_s(1, seconds, 0) == 7
    assert settings.pause_s(1, 3600, 0) == 60
    assert settings.pause_s(1, 0, 0) == 0.1
    assert [settings.pause_s(n, None, 0) for n in (1, 2, 3, 4, 5, 99)] == [0.1, 0.2, 0.4, 0.8, 1, 1]


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        *[(each, "sent") for each in (200, 204)],
        *[(each, "refused") for each in (301, 400, 401, 404, 413, 422)],
        *[(each, "failed") for each in (429, 500, 502, 503, 504)],
    ],
)
def test_what_an_answer_means(status: int, outcome: str) -> None:
    """2xx is sent, 5xx and 429 are tried again, everything else is not."""
    assert judged(status, "", None, 0.0).outcome == outcome


def test_what_is_refused_is_counted_and_not_sent_again(store: Store, position: Path) -> None:
    """After a 400 the next minute goes out, and what was refused is counted."""
    minutes = last_minutes(3)
    rows = Writer(store)
    rows.write(*(Measurement(10, minute=each) for each in minutes[:2]))
    with (
        receiving([(400, {})]) as receiver,
        writing(store, receiver.url, position) as writer,
    ):
        until(lambda: writer.stats().minute == minutes[0])
        rows.write(Measurement(10, minute=minutes[2]))
        until(lambda: writer.stats().minute == minutes[1])
        stats = writer.stats()
        assert [status for status, _, _ in receiver.requests] == [400, 204]
        assert sent(receiver, minutes[1]) == not_empty(expected(store, minutes[1]))
    assert stats.refused == len(expected(store, minutes[0]))
    assert stats.taken == stats.sent + stats.refused


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
        began = time.monotonic()
        assert not writer.close()
    took_s = time.monotonic() - began
    stats = writer.stats()
    assert waiting <= 100 + 50 + 50  # in the queue, in the request, about to be put
    assert took_s < 10
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
        writer = writing(store, url, position)
        connection, _ = silent.accept()
        with connection:
            connection.recv(1)
            began = time.monotonic()
            assert not writer.close()
    assert time.monotonic() - began < 10
    assert writer.stats().unsent == writer.stats().taken > 0


def test_a_restart_goes_on_where_it_ended(store: Store, position: Path) -> None:
    """The next writer sends the minutes behind the position, and none before it."""
    minutes = last_minutes(5)
    rows = Writer(store)
    rows.write(*(Measurement(10, minute=each) for each in minutes[:2]))
    with receiving() as receiver:
        with writing(store, receiver.url, position) as writer:
            until(lambda: writer.stats().minute == minutes[0])
        rows.write(*(Measurement(10, minute=each) for each in minutes[2:]))
        receiver.requests.clear()
        with writing(store, receiver.url, position, late_minutes=0) as writer:
            until(lambda: writer.stats().minute == minutes[3])
            assert writer.stats().minutes == 3
        times = sorted({at_ms for _, _, at_ms in receiver.samples()})
    assert times == [after(each) * 1000 for each in minutes[1:4]]


def test_without_a_position_history_stays_where_it_is(store: Store, position: Path) -> None:
    """The first start sends the newest complete minute, and not all that the store has."""
    minutes = last_minutes(5)
    Writer(store).write(*(Measurement(10, minute=each) for each in minutes))
    with receiving() as receiver, writing(store, receiver.url, position) as writer:
        until(lambda: writer.stats().minute == minutes[3])
        assert {at_ms for _, _, at_ms in receiver.samples()} == {after(minutes[3]) * 1000}


def test_a_store_that_was_empty_is_sent_from_its_start(store: Store, position: Path) -> None:
    """Whoever was there before the first commit sends every minute of it, however many it has."""
    minutes = last_minutes(5)
    with receiving() as receiver, writing(store, receiver.url, position) as writer:
        until(lambda: writer._from_start)
        Writer(store).write(*(Measurement(10, minute=each) for each in minutes))
        until(lambda: writer.stats().minute == minutes[3])
        times = sorted({at_ms for _, _, at_ms in receiver.samples()})
    assert times == [after(each) * 1000 for each in minutes[:4]]


def test_after_a_long_pause_old_minutes_are_skipped(store: Store, position: Path) -> None:
    """A position that lies too far back is not followed by a flood; what is skipped is counted."""
    minutes = last_minutes(10)
    Writer(store).write(*(Measurement(10, minute=each) for each in minutes))
    with receiving() as receiver:
        url = Target.parse(receiver.url).url
        Position(position, store.id, url).save(minutes_before(minutes[0], 100))
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
    Position(position, store.id, "remote+http://elsewhere/write").save(202403011200)
    with pytest.raises(ConfigError, match="of the same store and receiver"):
        writing(store, "remote+http://127.0.0.1:1/write", position)
    position.write_text("{}")
    with pytest.raises(ConfigError, match="remove it"):
        writing(store, "remote+http://127.0.0.1:1/write", position)


def test_late_rows_are_sent_again(store: Store, position: Path) -> None:
    """What late rows change of the last minutes goes out again: the changed series alone."""
    minutes = last_minutes(3)
    rows = Writer(store)
    rows.write(*(Measurement(10, "x", each, name) for each in minutes for name in "ab"))
    with receiving() as receiver, writing(store, receiver.url, position) as writer:
        until(lambda: writer.stats().minute == minutes[1])
        receiver.requests.clear()
        rows.write(Measurement(990, "x", minutes[1], "b"))
        until(lambda: receiver.requests and writer.stats().waiting == 0)
        entities = {labels["entity"] for labels, _, _ in receiver.samples()}
        stats = writer.stats()
        changed = sent(receiver, minutes[1])
        assert changed.items() <= not_empty(expected(store, minutes[1])).items()
    assert entities == {"id-b"}
    assert stats.late == len(changed) > 0


def test_a_receiver_that_refuses_late_rows_is_left_alone(store: Store, position: Path) -> None:
    """After the first refusal of a change no more are sent; new minutes are."""
    minutes = last_minutes(4)
    rows = Writer(store)
    rows.write(*(Measurement(10, "x", each) for each in minutes[:3]))
    with (
        receiving([(204, {}), (400, {})]) as receiver,
        writing(store, receiver.url, position) as writer,
    ):
        until(lambda: writer.stats().minute == minutes[1])
        rows.write(Measurement(990, "x", minutes[1]))
        until(lambda: writer.stats().late_refused)
        rows.write(Measurement(980, "x", minutes[1]))
        rows.write(Measurement(10, "x", minutes[3]))
        until(lambda: writer.stats().minute == minutes[2])
        assert [status for status, _, _ in receiver.requests] == [204, 400, 204]


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
            (labels["entity"], at_ms)
            for labels, value, at_ms in receiver.samples()
            if struct.pack(">d", value).hex() == "7ff0000000000002"
        }
    assert ended == {("id-c", after(minutes[1]) * 1000), ("id-b", after(minutes[2]) * 1000)}


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("remote+http://h/w", ("h", 80, "/w", False)),
        ("remote+https://h", ("h", 443, "/api/v1/write", True)),
        ("remote+http://[::1]:9090/a?b=c", ("::1", 9090, "/a?b=c", False)),
    ],
)
def test_addresses_are_read(url: str, place: tuple[str, int, str, bool]) -> None:
    """Host, port, path and whether it is encrypted."""
    target = Target.parse(url)
    assert (target.host, target.port, target.path, target.tls) == place


def test_a_login_is_sent_and_not_shown() -> None:
    """A password in the address goes to the receiver, and into no log; a token likewise."""
    target = Target.parse("remote+http://me:s%40crt@h:1/w")
    assert target.headers == {"Authorization": "Basic bWU6c0BjcnQ="}
    assert "bWU6c0BjcnQ=" not in repr(target)
    assert target.url == "remote+http://h:1/w"
    more = Target.parse("remote+http://h", "t0ken", {"X-Scope-OrgID": "shop"})
    assert more.headers == {"Authorization": "Bearer t0ken", "X-Scope-OrgID": "shop"}
    with pytest.raises(ConfigError) as caught:
        Target.parse("http://me:s3cret@h:1/w")
    assert "s3cret" not in str(caught.value)


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


def test_a_real_prometheus_takes_it(store: Store, position: Path, tmp_path: Path) -> None:
    """A Prometheus answers for every series of every minute with the store's value."""
    minutes = last_minutes(4)
    rows = Writer(store)
    rows.write(Measurement(5, minute=minutes[0]))
    with (
        running_prometheus(tmp_path / "prom") as prometheus,
        writing(store, prometheus.remote_write, position) as writer,
    ):
        for number in range(1, 4):
            rows.write(
                Measurement(number, "GET", minutes[number]),
                Measurement(99, 'odd "\\\n', minutes[number], f'e{number} "\\\n名前'),
            )
            until(partial(reached, writer, minutes[number - 1]))
        stats = writer.stats()
        for minute in minutes[:3]:
            found = {}
            for labels, value in prometheus.query('{__name__=~"batchmill_.+"}', after(minute)):
                name = labels.pop("__name__")
                found[name, frozenset(labels.items())] = value
            # Nothing else: what the minute before had and this one has not was marked as ended.
            assert found == not_empty(expected(store, minute))
    assert stats.requests == {"HTTP 204": 3}
    assert stats.ended > 0


def test_a_real_prometheus_keeps_what_it_has(store: Store, position: Path, tmp_path: Path) -> None:
    """A Prometheus refuses what late rows have changed; it is counted, and new minutes go on."""
    minutes = last_minutes(4)
    rows = Writer(store, script="calls = from(Endpoint.*).count();")
    rows.write(*(Measurement(1, minute=each) for each in minutes[:3]))
    with (
        running_prometheus(tmp_path / "prom") as prometheus,
        writing(store, prometheus.remote_write, position) as writer,
    ):
        until(lambda: writer.stats().minute == minutes[1])
        rows.write(Measurement(2, minute=minutes[1]))
        until(lambda: writer.stats().late_refused)
        rows.write(Measurement(3, minute=minutes[3]))
        until(lambda: writer.stats().minute == minutes[2])
        values = [
            [value for _, value in prometheus.query("batchmill_calls", after(each))]
            for each in minutes[1:3]
        ]
        stats = writer.stats()
    assert values == [[1.0], [1.0]]
    assert (stats.refused, stats.sent, stats.taken) == (1, 2, 3)


def test_a_real_prometheus_that_was_away_gets_everything(
    store: Store, position: Path, tmp_path: Path
) -> None:
    """While Prometheus is down minutes go on; when it is back it has every one of them."""
    minutes = last_minutes(5)
    rows = Writer(store)
    rows.write(*(Measurement(1, minute=each) for each in minutes[:2]))
    with contextlib.ExitStack() as stack:
        with running_prometheus(tmp_path / "prom") as prometheus:
            writer = stack.enter_context(writing(store, prometheus.remote_write, position))
            until(lambda: writer.stats().minute == minutes[0])
        for number in (2, 3, 4):
            rows.write(*(Measurement(number, minute=minutes[number]) for _ in range(number)))
        until(lambda: writer.stats().retries > 3)
        with running_prometheus(tmp_path / "prom", port=prometheus.port):
            until(lambda: writer.stats().minute == minutes[3])
            calls = [prometheus.query("batchmill_calls", after(each)) for each in minutes[:4]]
        stats = writer.stats()
    assert [[value for _, value in each] for each in calls] == [[1], [1], [2], [3]]
    assert (stats.sent, stats.refused) == (stats.taken, 0)


def test_a_real_prometheus_takes_a_minute_twice(
    store: Store, position: Path, tmp_path: Path
) -> None:
    """A writer that was killed sends its last minute again, which Prometheus takes for the same."""
    minutes = last_minutes(3)
    Writer(store).write(*(Measurement(1, minute=each) for each in minutes))
    with running_prometheus(tmp_path / "prom") as prometheus:
        for _ in range(2):
            with writing(store, prometheus.remote_write, position) as writer:
                until(lambda: writer.stats().minute == minutes[1])
            assert writer.stats().requests == {"HTTP 204": 1}
            saved = json.loads(position.read_text())
            # As if it had been killed between the answer and the note of it.
            position.write_text(json.dumps(saved | {"minute": minutes[0]}))
