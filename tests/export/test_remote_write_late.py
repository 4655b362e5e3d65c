"""Remote write to a real Prometheus, and what becomes of rows that come late."""

from __future__ import annotations

import contextlib
import json
from functools import partial
from pathlib import Path

from batchmill.export.prometheus.series import minutes_before
from batchmill.store import Store, open_store
from tests.export.remote_write_kit import not_empty, position, reached, store, writing
from tests.kit.servers.prometheus import (
    Receiver,
    after,
    expected,
    last_minutes,
    receiving,
    running_prometheus,
)
from tests.kit.stores import Measurement, Writer
from tests.kit.threads import until

__all__ = ["position", "store"]


COUNTS = "calls = from(Endpoint.*).count();"


def late(receiver: Receiver) -> list[tuple[int, str, float]]:
    """What came after all that was newer: the end of its minute in s, the entity, the value."""
    samples, newest = [], 0
    for labels, value, at_ms in receiver.samples():
        if at_ms < newest:
            samples.append((at_ms // 1000, labels["entity_id"], value))
        newest = max(newest, at_ms)
    return samples


def test_late_rows_are_sent_again(store: Store, position: Path) -> None:
    """What late rows change of the last minutes goes out again: the changed series alone."""
    minutes = last_minutes(4)
    rows = Writer(store, script=COUNTS)
    rows.write(*(Measurement(1, "x", minute, name) for minute in minutes[:3] for name in "ab"))
    with receiving() as receiver, writing(store, receiver.url, position) as writer:
        until(lambda: writer.stats().minute == minutes[1])
        rows.write(*(Measurement(1, "x", minutes[3], name) for name in "ab"))
        until(lambda: writer.stats().minute == minutes[2])
        rows.write(Measurement(1, "x", minutes[1], "b"))
        until(lambda: writer.stats().late and writer.stats().waiting == 0)
        assert late(receiver) == [(after(minutes[1]), "id-b", 2)]
        assert writer.stats().late == 1


def test_the_newest_minute_is_sent_again_behind_its_successor(store: Store, position: Path) -> None:
    """No Prometheus takes another value for the newest time that it has of a series."""
    minutes = last_minutes(4)
    rows = Writer(store, script=COUNTS)
    rows.write(*(Measurement(1, minute=minute) for minute in minutes[:3]))
    with receiving() as receiver, writing(store, receiver.url, position) as writer:
        until(lambda: writer.stats().minute == minutes[1])
        checked_s = writer._late_checked_s
        rows.write(Measurement(1, minute=minutes[1]))
        until(lambda: writer._late_checked_s > checked_s)
        rows.write(Measurement(1, minute=minutes[3]))
        until(lambda: writer.stats().late and writer.stats().waiting == 0)
        times = [(at_ms // 1000, value) for _, value, at_ms in receiver.samples()]
    assert times == [(after(minutes[1]), 1), (after(minutes[2]), 1), (after(minutes[1]), 2)]


def test_a_series_that_comes_late_ends_where_it_ended(store: Store, position: Path) -> None:
    """It gets a stale marker in the next minute, which was sent without it."""
    minutes = last_minutes(4)
    rows = Writer(store, script=COUNTS)
    rows.write(*(Measurement(1, minute=minute) for minute in minutes[:3]))
    with receiving() as receiver, writing(store, receiver.url, position) as writer:
        until(lambda: writer.stats().minute == minutes[1])
        rows.write(Measurement(1, minute=minutes[3]))
        until(lambda: writer.stats().minute == minutes[2])
        rows.write(Measurement(1, "x", minutes[1], "new"))
        until(lambda: writer.stats().late == 2 and writer.stats().waiting == 0)
        samples = [
            (at_ms // 1000, value if value == value else "ended")
            for labels, value, at_ms in receiver.samples()
            if labels["entity_id"] == "id-new"
        ]
    assert samples == [(after(minutes[1]), 1), (after(minutes[2]), "ended")]


def test_a_receiver_that_refuses_late_rows_is_left_alone(store: Store, position: Path) -> None:
    """After the first refusal no more of them are sent; new minutes are."""
    minutes = last_minutes(5)
    rows = Writer(store, script=COUNTS)
    rows.write(*(Measurement(1, minute=minute) for minute in minutes[:3]))
    with receiving() as receiver, writing(store, receiver.url, position) as writer:
        until(lambda: writer.stats().minute == minutes[1])
        rows.write(Measurement(1, minute=minutes[3]))
        until(lambda: writer.stats().minute == minutes[2])
        receiver.script = [(400, {})]
        rows.write(Measurement(1, minute=minutes[1]))
        until(lambda: writer.stats().late_refused)
        rows.write(Measurement(1, minute=minutes[1]))
        rows.write(Measurement(1, minute=minutes[4]))
        until(lambda: writer.stats().minute == minutes[3])
        assert [status for status, _, _ in receiver.requests] == [204, 204, 400, 204]
        assert late(receiver) == []


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
            series = {}
            for labels, value in prometheus.query('{__name__=~"batchmill_.+"}', after(minute)):
                name = labels.pop("__name__")
                series[name, frozenset(labels.items())] = value
            # Nothing else: what the minute before had and this one has not was marked as ended.
            assert series == not_empty(expected(store, minute))
    assert stats.requests == {"HTTP 204": 3}
    assert stats.ended > 0


def test_a_real_prometheus_refuses_late_minutes(
    store: Store, position: Path, tmp_path: Path
) -> None:
    """One as it comes: it is counted under its reason, and new minutes go on."""
    minutes = last_minutes(5)
    rows = Writer(store, script=COUNTS)
    rows.write(*(Measurement(1, minute=minute) for minute in minutes[:3]))
    with (
        running_prometheus(tmp_path / "prom") as prometheus,
        writing(store, prometheus.remote_write, position) as writer,
    ):
        until(lambda: writer.stats().minute == minutes[1])
        rows.write(Measurement(1, minute=minutes[3]))
        until(lambda: writer.stats().minute == minutes[2])
        rows.write(Measurement(1, minute=minutes[1]))
        until(lambda: writer.stats().late_refused)
        rows.write(Measurement(1, minute=minutes[4]))
        until(lambda: writer.stats().minute == minutes[3])
        values = [
            [value for _, value in prometheus.query("batchmill_calls", after(minute))]
            for minute in minutes[1:4]
        ]
        stats = writer.stats()
    assert values == [[1], [1], [1]]
    assert (stats.refused_for, stats.sent, stats.taken) == ({"out of order": 1}, 3, 4)


def test_a_real_prometheus_with_an_out_of_order_window_takes_late_minutes(
    store: Store, position: Path, tmp_path: Path
) -> None:
    """With out_of_order_time_window: changed values, and a minute that came late as a whole."""
    minutes = last_minutes(5)
    rows = Writer(store, script=COUNTS)
    with (
        running_prometheus(tmp_path / "prom", out_of_order="30m") as prometheus,
        writing(store, prometheus.remote_write, position) as writer,
    ):
        until(lambda: writer._from_start)
        rows.write(*(Measurement(1, "x", minutes[n], "one") for n in (0, 2, 3, 4)))
        until(lambda: writer.stats().minute == minutes[3])
        rows.write(
            Measurement(1, "x", minutes[0], "one"),
            *(Measurement(1, "x", minutes[1], name) for name in ("one", "two", "two")),
        )
        # One changed, two that are new, and one of those two ends in the minute after.
        until(lambda: writer.stats().late == 4 and writer.stats().waiting == 0)
        for minute in minutes[:4]:
            series = {}
            for labels, value in prometheus.query('{__name__=~"batchmill_.+"}', after(minute)):
                name = labels.pop("__name__")
                series[name, frozenset(labels.items())] = value
            assert series == not_empty(expected(store, minute))
        stats = writer.stats()
    assert (stats.refused, stats.late_refused) == (0, False)
    assert stats.requests.keys() == {"HTTP 204"}


def test_what_is_too_old_even_for_that_holds_up_nobody(tmp_path: Path) -> None:
    """A real Prometheus answers 500 to it; it is counted, and not tried again for ever."""
    newest = last_minutes(2)
    old = [minutes_before(minute, 120) for minute in newest]
    with contextlib.ExitStack() as stack:
        prometheus = stack.enter_context(running_prometheus(tmp_path / "prom", out_of_order="10m"))
        for name, minutes in (("new", newest), ("old", old)):
            store = stack.enter_context(open_store(f"sqlite:///{tmp_path}/{name}.db"))
            Writer(store, script=COUNTS).write(
                *(Measurement(1, "x", minutes[0], f"e{n}") for n in range(3)),
                Measurement(1, minute=minutes[1]),
            )
            with writing(store, prometheus.remote_write, tmp_path / name) as writer:
                until(partial(reached, writer, minutes[0]))
                stats = writer.stats()
    assert (stats.refused_for, stats.sent) == ({"too old": 3}, 0)


def test_a_real_prometheus_that_was_away_gets_everything(
    store: Store, position: Path, tmp_path: Path
) -> None:
    """While Prometheus is down minutes go on; when it is back it has every one of them."""
    minutes = last_minutes(5)
    rows = Writer(store)
    rows.write(*(Measurement(1, minute=minute) for minute in minutes[:2]))
    with contextlib.ExitStack() as stack:
        with running_prometheus(tmp_path / "prom") as prometheus:
            writer = stack.enter_context(writing(store, prometheus.remote_write, position))
            until(lambda: writer.stats().minute == minutes[0])
        for number in (2, 3, 4):
            rows.write(*(Measurement(number, minute=minutes[number]) for _ in range(number)))
        until(lambda: writer.stats().retries > 3)
        with running_prometheus(tmp_path / "prom", port=prometheus.port):
            until(lambda: writer.stats().minute == minutes[3])
            calls = [prometheus.query("batchmill_calls", after(minute)) for minute in minutes[:4]]
        stats = writer.stats()
    assert [[value for _, value in call] for call in calls] == [[1], [1], [2], [3]]
    assert (stats.sent, stats.refused) == (stats.taken, 0)


def test_a_real_prometheus_takes_a_minute_twice(
    store: Store, position: Path, tmp_path: Path
) -> None:
    """A writer that was killed sends its last minute again, which Prometheus takes for the same."""
    minutes = last_minutes(3)
    Writer(store).write(*(Measurement(1, minute=minute) for minute in minutes))
    with running_prometheus(tmp_path / "prom") as prometheus:
        for _ in range(2):
            with writing(store, prometheus.remote_write, position) as writer:
                until(lambda: writer.stats().minute == minutes[1])
            assert writer.stats().requests == {"HTTP 204": 1}
            saved = json.loads(position.read_text())
            # As if it had been killed between the answer and the note of it.
            position.write_text(json.dumps(saved | {"minute": minutes[0]}))
