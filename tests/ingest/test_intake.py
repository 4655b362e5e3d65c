"""What the receivers have in common, without a network."""

from __future__ import annotations

import asyncio
import gzip
from pathlib import Path

import pytest

pytest.importorskip("opentelemetry.proto")
pytest.importorskip("pyarrow")

from batchmill.ingest.decode import Limits
from batchmill.ingest.intake import Intake, ReceiverSettings
from batchmill.ingest.responses import Rejected
from batchmill.ingest.stats import ReceiverStats
from tests.ingest.kit import LARGE, HeldSpool
from tests.kit.ingest import PROTOBUF, request
from tests.kit.threads import WAIT_S


@pytest.mark.parametrize("encoding", ["", "gzip"])
def test_a_small_body_does_not_wait_for_a_large_one(tmp_path: Path, encoding: str) -> None:
    """It is decoded, stored and answered while the thread for large bodies is busy."""
    large = request(*range(1, LARGE + 1))
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


async def _take(intake: Intake, body: bytes, encoding: str) -> Rejected:
    with intake.admit() as held:
        held.add(body)
        return await intake.take_traces(held, encoding, PROTOBUF)
