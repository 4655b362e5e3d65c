"""Exporting to a collector: what arrives there, and where there is."""

from __future__ import annotations

import dataclasses
from typing import Any

import grpc
import pytest

from batchmill.export import (
    ExporterInUseError,
    ExporterSettings,
    ExporterStats,
    SendError,
    Target,
    open_sender,
)
from batchmill.sources import bucket_start
from tests.kit.exporters import (
    NAME,
    QUICK,
    Mill,
    added_up,
    last_totals,
    measurements,
    one,
    running,
    stored,
)
from tests.kit.otlp import GrpcReceiver, HttpReceiver, Verdict
from tests.kit.stores import MINUTE, Measurement
from tests.kit.threads import until

UNAVAILABLE = Verdict(grpc.StatusCode.UNAVAILABLE, 503)
__all__ = ["one"]


@pytest.mark.parametrize("kind", [GrpcReceiver, HttpReceiver])
def test_every_change_arrives(one: Mill, kind: type[GrpcReceiver | HttpReceiver]) -> None:
    """The last total of each value is the store's; increments of counts add up to it."""
    with kind() as receiver:
        with running(one.exporter(receiver.target)):
            for number in range(21):
                one.commit(*measurements(number))
            receiver.wait_for(lambda: len(one.store.outbox(one.outbox.place)) == 0)
        points = receiver.points()
    assert last_totals(points) == stored(one.store)
    counts = {key: n for key, n in stored(one.store).items() if key[0] == "batchmill.calls"}
    assert added_up(points, "calls") == counts
    assert one.files() == []


@pytest.mark.parametrize("status", [202, 204])
def test_any_answer_of_success_is_one(one: Mill, status: int) -> None:
    """A gateway may say 202 or 204; sending it again would double it."""
    with HttpReceiver(lambda number: Verdict(status=status)) as receiver:
        one.commit(*measurements(0))
        one.exporter(receiver.target).run(once=True)
        assert receiver.seen == 1
    assert one.counted("export retries") == {}


@pytest.mark.parametrize(
    "wrong",
    [
        {"headers": {"a b": "x"}},
        {"headers": {"token-bin": "x"}},
        {"headers": {"x": "s3cret\n"}},
        {"timeout_s": float("inf")},
        {"max_ms": float("nan")},
        {"drain_s": 0},
    ],
)
def test_settings_that_would_fail_every_request_are_refused(wrong: dict[str, Any]) -> None:
    """Before anything is sent, and without showing what may be a token."""
    with pytest.raises(ValueError, match="is not valid") as caught:
        ExporterSettings(**wrong)
    assert "s3cret" not in str(caught.value)


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
    assert [header["authorization"] for header in receiver.headers] == ["Bearer x"]


def test_one_exporter_of_a_name_at_a_time(one: Mill) -> None:
    """Two would send everything twice."""
    with GrpcReceiver() as receiver, running(one.exporter(receiver.target)):
        until(lambda: one.store.exporters())
        second = one.exporter(receiver.target)
        with pytest.raises(ExporterInUseError, match="--name"):
            second.run()
        with pytest.raises(SendError, match="interrupted"):  # it has let go of its connection
            second._sender.send([])


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


def test_stats_are_of_one_moment(one: Mill) -> None:
    """What an exporter tells before it has done anything."""
    exporter = one.exporter("otlp+grpc://127.0.0.1:1")
    one.commit(*measurements(0))
    stats = exporter.stats()
    assert isinstance(stats, ExporterStats)
    assert (stats.name, stats.position, stats.waiting.files, stats.sent) == (NAME, 0, 1, 0)
    assert stats.retries == {}


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
