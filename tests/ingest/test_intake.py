"""What the receivers have in common, without a network."""

from __future__ import annotations

import asyncio
import gzip
import os
import random
from pathlib import Path

import pytest

pytest.importorskip("opentelemetry.proto")
pytest.importorskip("pyarrow")

from batchmill.ingest.decode import Limits
from batchmill.ingest.intake import Intake, ReceiverSettings, Senders
from batchmill.ingest.responses import Rejected
from batchmill.ingest.stats import ReceiverStats
from batchmill.spool import Spool
from tests.ingest.kit import LARGE, HeldSpool
from tests.kit.ingest import PROTOBUF, request
from tests.kit.threads import WAIT_S, Gate, until


@pytest.mark.parametrize("encoding", ["", "gzip"])
def test_a_small_body_does_not_wait_for_a_large_one(tmp_path: Path, encoding: str) -> None:
    """It is decoded, stored and answered while the thread for large bodies is busy."""
    large = request(*random.Random(1).sample(range(1, 2**63), LARGE))
    body = gzip.compress(large, 1) if encoding else large

    async def send(intake: Intake, spool: HeldSpool) -> list[Rejected]:
        slow = asyncio.create_task(_take(intake, body, encoding))
        await asyncio.to_thread(spool.gate.wait_entered)
        with spool.gate:
            quick = await asyncio.wait_for(_take(intake, request(1), ""), WAIT_S / 2)
            assert not slow.done()
        return [quick, await slow]

    with HeldSpool(tmp_path) as spool:
        intake = Intake(spool, Limits(), ReceiverSettings(), ReceiverStats())
        answers = asyncio.run(send(intake, spool))
        intake.close()
    assert answers == [Rejected(), Rejected()]
    assert spool.stats().written_rows == LARGE + 1


async def _take(intake: Intake, body: bytes, encoding: str, sender: str = "") -> Rejected:
    with intake.admit(sender) as held:
        held.add(body)
        return await intake.take_traces(held, encoding, PROTOBUF)


def test_one_sender_is_answered_without_lingering(tmp_path: Path) -> None:
    """Its spans are written at once, a segment for each request: nothing else can come."""

    async def send(intake: Intake) -> None:
        for number in range(1, 6):
            await asyncio.wait_for(_take(intake, request(number), "", "127.0.0.1:1"), WAIT_S)

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
        first = asyncio.create_task(_take(intake, request(1), "", "127.0.0.1:1"))
        await asyncio.to_thread(gate.wait_entered)
        with gate:
            rest = [
                asyncio.create_task(_take(intake, request(number), "", "127.0.0.1:1"))
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
        await _take(intake, request(1), "", "127.0.0.1:1")
        two = asyncio.create_task(_take(intake, request(2), "", "127.0.0.1:2"))
        await asyncio.to_thread(until, lambda: intake.waiting == 1)
        three = asyncio.create_task(_take(intake, request(3), "", "127.0.0.1:1"))
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
