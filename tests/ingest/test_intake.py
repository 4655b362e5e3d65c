"""What the receivers have in common, without a network."""

from __future__ import annotations

import asyncio
import gzip
import os
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("opentelemetry.proto")
pytest.importorskip("pyarrow")

from batchmill.export import KafkaForwarder, Target
from batchmill.ingest.decode import Decoded, Limits, decode_traces
from batchmill.ingest.intake import Intake, ReceiverSettings, Senders
from batchmill.ingest.responses import Refusal, Rejected
from batchmill.ingest.stats import ReceiverStats
from batchmill.spool import Spool
from tests.ingest.kit import LARGE, HeldSpool, take, zstd
from tests.kit.ingest import MIB, request
from tests.kit.threads import WAIT_S, Gate, until


@pytest.mark.parametrize("encoding", ["", "gzip", "zstd"])
def test_a_small_body_does_not_wait_for_a_large_one(tmp_path: Path, encoding: str) -> None:
    """It is decoded, stored and answered while the thread for large bodies is busy.

    Large is what is so without its compression, however small it was sent.
    """
    large = request(*random.Random(1).sample(range(1, 2**32), LARGE))
    body = {"": large, "gzip": gzip.compress(large), "zstd": zstd(large)}[encoding]

    async def send(intake: Intake, spool: HeldSpool) -> list[Rejected]:
        slow = asyncio.create_task(take(intake, body, encoding))
        await asyncio.to_thread(spool.gate.wait_entered)
        with spool.gate:
            quick = await asyncio.wait_for(take(intake, request(1), ""), WAIT_S / 2)
            assert not slow.done()
        return [quick, await slow]

    with HeldSpool(tmp_path) as spool:
        intake = Intake(spool, Limits(), ReceiverSettings(), ReceiverStats())
        answers = asyncio.run(send(intake, spool))
        intake.close()
    assert answers == [Rejected(), Rejected()]
    assert spool.stats().written_rows == LARGE + 1


def test_a_body_counts_without_its_compression_while_it_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large or small, until it is decoded; then the sink counts what waits."""
    counted = []

    def decode(body: bytes, *arguments: Any, **options: Any) -> Decoded:
        counted.append(intake.bytes - len(body))
        return decode_traces(body, *arguments, **options)

    bodies = [request(*random.Random(1).sample(range(1, 2**32), count)) for count in (100, LARGE)]
    sent = [zstd(body) for body in bodies]
    monkeypatch.setattr("batchmill.ingest.intake.decode_traces", decode)
    with Spool(tmp_path, linger_s=0) as spool:
        intake = Intake(spool, Limits(), ReceiverSettings(), ReceiverStats())
        for body in sent:
            asyncio.run(take(intake, body, "zstd"))
        intake.close()
    assert counted == [len(body) for body in sent]
    assert intake.bytes == 0


def test_copies_of_requests_are_bounded_while_these_are_stored(tmp_path: Path) -> None:
    """One that finds no room in the forwarder is stored, and counted there as dropped."""
    pytest.importorskip("confluent_kafka", reason="install it: pip install 'batchmill[kafka]'")
    topic = Target.parse("kafka://127.0.0.1:1/topic")
    bodies = [request(*range(first, first + 12_000)) for first in (1, 100_001)]
    size = len(bodies[0])
    assert MIB / 2 < size < MIB

    async def send(intake: Intake) -> None:
        senders = [
            asyncio.create_task(take(intake, body, "", f"127.0.0.1:{port}"))
            for port, body in enumerate(bodies)
        ]
        await asyncio.to_thread(until, lambda: intake.waiting == 2)
        waiting = forwarder.stats()
        assert (waiting["offered"], waiting["in_hand_bytes"]) == (0, size)
        await asyncio.to_thread(spool.flush)
        await asyncio.gather(*senders)

    forwarder = KafkaForwarder(topic, max_bytes=MIB, timeout_s=600)
    with Spool(tmp_path, linger_s=600) as spool:
        intake = Intake(spool, Limits(), ReceiverSettings(), ReceiverStats(), {"traces": forwarder})
        asyncio.run(send(intake))
    stats = forwarder.stats()
    assert (stats["offered"], stats["in_hand"]) == (24_000, 12_000)
    assert stats["dropped"] == {"too many bytes in hand": 12_000}
    forwarder.close(0.1)
    with pytest.raises(Refusal, match="shutting down"):  # the spool is closed
        asyncio.run(take(intake, bodies[0], ""))
    intake.close()
    assert forwarder.stats()["in_hand_bytes"] == 0


def test_a_request_of_which_nothing_arrives_makes_room(tmp_path: Path) -> None:
    """Of the address that has the most; one of which a part has arrived goes on."""

    async def read(intake: Intake, sender: str, part: bytes) -> None:
        with intake.admit(sender) as body:
            async with intake.reading(body, asyncio.get_running_loop().time()):
                body.add(part)
                await asyncio.Event().wait()

    async def send(intake: Intake) -> list[bool]:
        senders = [("10.0.0.1:1", b"x"), ("10.0.0.2:1", b""), *[("10.0.0.3:1", b"")] * 2]
        reads = [asyncio.create_task(read(intake, *sender)) for sender in senders]
        await asyncio.sleep(0)  # until all of them wait
        assert intake.requests == len(reads)
        assert await take(intake, request(1), "", "10.0.0.4:1") == Rejected()
        with pytest.raises(Refusal, match="in progress, and this one was slow"):
            await asyncio.wait_for(reads[2], WAIT_S)
        done = [task.done() for task in reads]
        for task in reads:
            task.cancel()
        await asyncio.gather(*reads, return_exceptions=True)
        return done

    with Spool(tmp_path) as spool:
        settings = ReceiverSettings(max_requests=4, silent_s=600, request_s=600)
        intake = Intake(spool, Limits(), settings, ReceiverStats())
        done = asyncio.run(send(intake))
        intake.close()
    assert done == [False, False, True, False]


def test_one_sender_is_answered_without_lingering(tmp_path: Path) -> None:
    """Its spans are written at once, a segment for each request: nothing else can come."""

    async def send(intake: Intake) -> None:
        for number in range(1, 6):
            await asyncio.wait_for(take(intake, request(number), "", "127.0.0.1:1"), WAIT_S)

    with Spool(tmp_path, linger_s=600) as spool:
        intake = Intake(spool, Limits(), ReceiverSettings(), ReceiverStats())
        asyncio.run(send(intake))
        intake.close()
        assert spool.stats().segments == 5


def test_what_comes_while_a_segment_is_written_gathers_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sender with many requests at a time: they share segments, and none of them lingers."""
    gate, fsync = Gate(), os.fsync

    def held_fsync(handle: int) -> None:
        gate.wait()
        fsync(handle)

    async def send(intake: Intake) -> None:
        first = asyncio.create_task(take(intake, request(1), "", "127.0.0.1:1"))
        await asyncio.to_thread(gate.wait_entered)
        with gate:
            rest = [
                asyncio.create_task(take(intake, request(number), "", "127.0.0.1:1"))
                for number in range(2, 12)
            ]
            await asyncio.to_thread(until, lambda: intake.waiting == 11)
        await asyncio.wait_for(asyncio.gather(first, *rest), WAIT_S)

    with Spool(tmp_path, linger_s=600) as spool:
        monkeypatch.setattr(os, "fsync", held_fsync)
        intake = Intake(spool, Limits(), ReceiverSettings(), ReceiverStats())
        asyncio.run(send(intake))
        intake.close()
        assert spool.stats().segments == 2


def test_senders_in_turns_share_segments(tmp_path: Path) -> None:
    """Two that send at the same time linger, so that segments do not become small."""

    async def send(intake: Intake) -> None:
        await take(intake, request(1), "", "127.0.0.1:1")
        two = asyncio.create_task(take(intake, request(2), "", "127.0.0.1:2"))
        await asyncio.to_thread(until, lambda: intake.waiting == 1)
        three = asyncio.create_task(take(intake, request(3), "", "127.0.0.1:1"))
        await asyncio.to_thread(until, lambda: intake.waiting == 2)
        assert not two.done()
        await asyncio.to_thread(spool.flush)
        await asyncio.gather(two, three)

    with Spool(tmp_path, linger_s=600) as spool:
        intake = Intake(spool, Limits(), ReceiverSettings(), ReceiverStats())
        asyncio.run(send(intake))
        intake.close()
        assert spool.stats().segments == 2


def test_a_sender_is_alone_once_nobody_else_has_sent_for_a_second() -> None:
    """The first one is, at once; whoever comes soon after another is not."""
    senders = Senders()
    senders.sent("a", 10.0)
    assert senders.alone(10.0)
    senders.sent("b", 10.5)
    assert not senders.alone(10.6)
    senders.sent("b", 11.2)
    assert senders.alone(11.2)
    senders.sent("a", 11.5)
    assert not senders.alone(12.1)
