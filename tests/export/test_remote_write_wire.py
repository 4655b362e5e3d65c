"""Remote write on the wire: what a request is, what an answer means, what an address is."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from batchmill import ConfigError
from batchmill.export import RemoteWriteSettings
from batchmill.export.http import HttpAnswer, parse_retry_after
from batchmill.export.remote_write.client import (
    STALE,
    Outcome,
    RemoteTarget,
    Sample,
    WriteResult,
    encode,
    interpret,
)
from batchmill.store import EntityRow, Store
from tests.export.remote_write_kit import position, store, writing
from tests.kit.servers.prometheus import after, decode, last_minutes, receiving
from tests.kit.stores import Measurement, Writer
from tests.kit.threads import until

__all__ = ["position", "store"]


def result_of(status: int, text: str = "") -> WriteResult:
    """What an answer without Retry-After means."""
    return interpret(HttpAnswer(status, text.encode(), None))


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
    values = {1: 0.1, -2: -5, 2**60: STALE}
    body = encode(Sample(0, at_ms, labels, value) for at_ms, value in values.items())
    samples = decode(body)
    assert [(result[0], result[2]) for result in samples] == [
        (dict(labels), n) for n in (1, -2, 2**60)
    ]
    assert [result[1] for result in samples[:2]] == [0.1, -5]
    assert struct.pack(">d", samples[2][1]).hex() == "7ff0000000000002"


def test_the_packing_is_the_raw_block_format() -> None:
    """A body is snappy's block: its length unpacked, then literals; and no stream of frames."""
    # Short, and without repetition: one literal, whose length less one stands in front of it.
    plain = bytes.fromhex("0a1a0a0d0a085f5f6e616d655f5f12016d120909000000000000f03f")
    body = encode([Sample(0, 0, (("__name__", "m"),), 1.0)])
    assert body.startswith(bytes([len(plain)]))
    assert b"sNaPpY" not in body


def test_retry_after_is_kept_to() -> None:
    """A receiver's pause is kept to, if it is longer than our own, and not longer than allowed."""
    settings = RemoteWriteSettings(initial_ms=100, max_ms=1000, max_retry_after_s=60)
    now_s = 1_700_000_000.0
    seconds = parse_retry_after("7", now_s)
    assert parse_retry_after("Tue, 14 Nov 2023 22:13:50 GMT", now_s) == 30
    assert [parse_retry_after(text, now_s) for text in (None, "", "soon")] == [None] * 3
    assert interpret(HttpAnswer(503, b"", seconds)).retry_after_s == seconds == 7
    assert settings.pause_s(1, seconds, 0) == 7
    assert settings.pause_s(1, 3600, 0) == 60
    assert settings.pause_s(1, 0, 0) == 0.1
    assert [settings.pause_s(n, None, 0) for n in (1, 2, 3, 4, 5, 99)] == [0.1, 0.2, 0.4, 0.8, 1, 1]


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        *[(status, Outcome.SENT) for status in (200, 204)],
        *[(status, Outcome.REFUSED) for status in (301, 400, 401, 404, 413, 422)],
        *[(status, Outcome.FAILED) for status in (429, 500, 502, 503, 504)],
    ],
)
def test_what_an_answer_means(status: int, outcome: Outcome) -> None:
    """2xx is sent, 5xx and 429 are tried again, everything else is not."""
    assert result_of(status).outcome is outcome


@pytest.mark.parametrize(
    ("status", "said", "reason"),
    [
        (400, "out of order sample", "out of order"),
        (409, "store locally: out of order sample", "out of order"),
        (400, "err-mimir-sample-timestamp-too-old", "too old"),
        (500, "too old sample", "too old"),
        (400, "duplicate sample for timestamp", "another value is there"),
        (400, "no such label", "HTTP 400"),
    ],
)
def test_why_samples_are_refused(status: int, said: str, reason: str) -> None:
    """In a few words of ours; also where a Prometheus says so with a 500, which is for ever."""
    result = result_of(status, said)
    assert (result.outcome, result.reason, result.of_some) == (Outcome.REFUSED, reason, True)


def test_any_other_500_is_tried_again() -> None:
    """A receiver that is in trouble is not taken for one that does not want samples."""
    assert result_of(500, "out of memory").outcome is Outcome.FAILED
    assert result_of(503, "too old sample").outcome is Outcome.FAILED


def test_a_header_that_cannot_be_sent_is_refused_at_once() -> None:
    """It would fail every request; its value, which may be a token, is not shown."""
    for headers in ({"a b": "c"}, {"x": "s3cret\n"}, {"x": "s3cret\u20ac"}):
        with pytest.raises(ConfigError, match="headers") as caught:
            RemoteTarget.parse("remote+http://h", None, headers)
        assert "s3cret" not in str(caught.value)
    with pytest.raises(ConfigError, match="Authorization"):
        RemoteTarget.parse("remote+http://h", "to\nken")


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
    target = RemoteTarget.parse(url)
    assert (target.host, target.port, target.path, target.tls) == place


def test_a_login_is_sent_and_not_shown() -> None:
    """A password in the address goes to the receiver, and into no log; a token likewise."""
    target = RemoteTarget.parse("remote+http://me:s%40crt@h:1/w")
    assert target.headers == {"Authorization": "Basic bWU6c0BjcnQ="}
    assert "bWU6c0BjcnQ=" not in repr(target)
    assert target.url == "remote+http://h:1/w"
    more = RemoteTarget.parse("remote+http://h", "t0ken", {"X-Scope-OrgID": "shop"})
    assert more.headers == {"Authorization": "Bearer t0ken", "X-Scope-OrgID": "shop"}
    with pytest.raises(ConfigError) as caught:
        RemoteTarget.parse("http://me:s3cret@h:1/w")
    assert "s3cret" not in str(caught.value)
