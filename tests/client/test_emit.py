"""The embedded client: an application's own events, on the disk."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")

import pyarrow.parquet as pq

from batchmill import Client
from batchmill.sources import UnknownNameError, service, source
from batchmill.spool import BadRowsError, Level, Overloaded, Spool, SpoolClosedError
from tests.kit.events import BASKET, NOON, Basket, HeldDisk, Mood, segments
from tests.kit.threads import WAIT_S


@source(entity=service("shop"))
@dataclass(frozen=True)
class ClientSale:
    shop: str
    cents: int
    time: datetime = NOON
    mood: Mood = Mood.GOOD
    basket: Basket = BASKET
    labels: dict[str, str] = field(default_factory=dict)


@source(entity=service("shop"))
@dataclass(frozen=True)
class ClientVisit:
    shop: str
    seconds: float


def rows(folder: Path) -> list[dict[str, Any]]:
    """Everything in a spool."""
    tables = [pq.read_table(path, partitioning=None).to_pylist() for path in segments(folder)]
    return [row for some in tables for row in some]


def test_an_event_of_ones_own_type(tmp_path: Path) -> None:
    """Enums by name, structs and maps as such; in the folder of its type."""
    with Client(tmp_path) as client:
        answer = client.emit(ClientSale("a", 250, labels={"till": "2"}))
        assert client.flush(WAIT_S)
        assert answer.result(WAIT_S).parent == tmp_path / "ClientSale"
    assert rows(tmp_path) == [
        {
            "time": NOON,
            "shop": "a",
            "cents": 250,
            "mood": "GOOD",
            "basket": {"items": 3, "note": None},
            "labels": [("till", "2")],
        }
    ]


def test_an_event_of_the_catalog(tmp_path: Path) -> None:
    """As a mapping, with the name of its type."""
    event = {"time": NOON, "serviceName": "shop", "name": "GET /", "latency": 12, "status": True}
    with Client(tmp_path) as client:
        client.emit(event, "Endpoint")
    (row,) = rows(tmp_path)
    assert {name: value for name, value in row.items() if name in event} == event
    assert segments(tmp_path)[0].parent.name == "Endpoint"


@pytest.mark.parametrize(
    ("moment", "read"),
    [
        (NOON.astimezone(timezone(timedelta(hours=5))), NOON),
        (1_000_001, datetime(1970, 1, 1, 0, 0, 1, 1, tzinfo=UTC)),
        (NOON.replace(microsecond=999_999), NOON.replace(microsecond=999_999)),
    ],
)
def test_moments_are_exact(tmp_path: Path, moment: object, read: datetime) -> None:
    """To the microsecond, whatever the time zone."""
    with Client(tmp_path) as client:
        client.emit({"time": moment, "serviceName": "shop", "latency": 1}, "Endpoint")
    assert rows(tmp_path)[0]["time"] == read


def test_an_event_without_a_time_happened_now(tmp_path: Path) -> None:
    """Without any, the pipeline would set it aside."""
    before = datetime.now(UTC)
    with Client(tmp_path) as client:
        client.emit(ClientVisit("a", 1.5))
    assert before <= rows(tmp_path)[0]["time"] <= datetime.now(UTC)


@pytest.mark.parametrize(
    ("event", "name", "error", "says"),
    [
        ({"time": NOON}, None, TypeError, "which type"),
        ({"time": NOON}, "Nope", UnknownNameError, "Nope"),
        ({"time": NOON, "latancy": 1}, "Endpoint", UnknownNameError, "latency"),
        ({"time": datetime(2026, 1, 1), "latency": 1}, "Endpoint", BadRowsError, "time zone"),
        ({"time": "noon", "latency": 1}, "Endpoint", BadRowsError, "datetime"),
        ({"time": NOON}, "ClientSale", BadRowsError, "cents is required"),
        (ClientVisit("a", 1.5), "ClientSale", TypeError, "not a ClientSale"),
        (object(), None, UnknownNameError, "object"),
    ],
)
def test_what_is_no_event_is_refused_at_once(
    tmp_path: Path, event: object, name: str | None, error: type[Exception], says: str
) -> None:
    """By the call, saying what is wrong, and nothing is taken."""
    with Client(tmp_path) as client:
        with pytest.raises(error, match=says):
            client.emit(event, name)
        assert client.stats().emitted == 0


def test_many_at_once_go_as_one_batch_for_each_type(tmp_path: Path) -> None:
    """In order; if one is no event, none is taken."""
    with Client(tmp_path, linger_s=60) as client:
        events = [ClientSale("a", n) if n % 3 else ClientVisit("a", n) for n in range(9)]
        assert len(client.emit_many(events)) == 2
        with pytest.raises(BadRowsError):
            client.emit_many([{"cents": 1}, {}], "ClientSale")
    assert [row["cents"] for row in rows(tmp_path) if "cents" in row] == [1, 2, 4, 5, 7, 8]
    stats = client.stats()
    assert (stats.emitted, stats.written, stats.failed, stats.waiting) == (9, 9, 0, 0)


def test_an_event_that_does_not_fit_fails_its_own_future(tmp_path: Path) -> None:
    """And is counted; the others are written."""
    with Client(tmp_path, linger_s=60) as client:
        good = client.emit(ClientSale("a", 1))
        bad = client.emit({"cents": "much"}, "ClientSale")
    assert good.exception(WAIT_S) is None
    assert isinstance(bad.exception(WAIT_S), BadRowsError)
    assert (client.stats().written, client.stats().failed) == (1, 1)


@pytest.fixture
def held() -> Iterator[HeldDisk]:
    """A disk on which nothing gets written until its gate is opened."""
    disk = HeldDisk()
    yield disk
    disk.gate.open()


def test_a_client_that_is_refused_waits_for_a_while(tmp_path: Path, held: HeldDisk) -> None:
    """Not for ever: then it raises, and counts."""
    with (
        Spool(tmp_path, linger_s=0, capacity_rows=1, disk=held) as spool,
        Client(spool, wait_s=0.05) as client,
    ):
        client.emit(ClientSale("a", 1))
        with pytest.raises(Overloaded):
            client.emit(ClientSale("a", 2))
        with pytest.raises(Overloaded):
            asyncio.run(client.aemit(ClientSale("a", 3)))
        assert (client.stats().refused, client.stats().waiting) == (2, 1)
        held.gate.open()
        assert client.flush(WAIT_S)
        assert client.stats().written == 1


def test_a_client_goes_on_as_soon_as_there_is_room(tmp_path: Path, held: HeldDisk) -> None:
    """The event that had to wait is written, not refused."""
    with (
        Spool(tmp_path, linger_s=0, capacity_rows=1, disk=held) as spool,
        Client(spool, wait_s=WAIT_S) as client,
    ):
        client.emit(ClientSale("a", 1)).add_done_callback(lambda _: None)
        held.gate.wait_entered()
        assert spool.level() >= Level.CRITICAL

        async def both() -> None:
            waiting = asyncio.create_task(client.aemit(ClientSale("a", 2)))
            await asyncio.sleep(0)
            assert not waiting.done()  # the loop was not blocked
            held.gate.open()
            await waiting

        asyncio.run(both())
        client.emit(ClientSale("a", 3))
    stats = client.stats()
    assert (stats.emitted, stats.refused, stats.waiting) == (3, 0, 0)


def test_asyncio(tmp_path: Path) -> None:
    """aemit is back when the event is safe; many of them share a segment."""

    async def main() -> set[Path]:
        async with Client(tmp_path, linger_s=0.01) as client:
            paths = await asyncio.gather(*(client.aemit(ClientSale("a", n)) for n in range(100)))
            assert await client.aflush()
            assert all(path.exists() for path in paths)
            return set(paths)

    paths = asyncio.run(main())
    assert len(paths) < 100
    assert sorted(row["cents"] for row in rows(tmp_path)) == list(range(100))


def test_a_task_that_is_cancelled_does_not_lose_its_event(tmp_path: Path) -> None:
    """It was taken, so it is written; only nobody waits for it any more."""

    async def main() -> None:
        async with Client(tmp_path, linger_s=60) as client:
            task = asyncio.create_task(client.aemit(ClientSale("a", 1)))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    assert [row["cents"] for row in rows(tmp_path)] == [1]


def test_only_a_spool_of_its_own_is_closed(tmp_path: Path) -> None:
    """One that was given is others' too; it is flushed."""
    with Spool(tmp_path, linger_s=60) as spool:
        with Client(spool) as client:
            answer = client.emit(ClientSale("a", 1))
        assert answer.done()
        assert not spool.closed
        with pytest.raises(TypeError, match="linger_s"):
            Client(spool, linger_s=1)
    with Client(tmp_path) as client:
        pass
    assert client.spool.closed


def test_after_close_events_are_refused(tmp_path: Path) -> None:
    """At once: waiting would not help."""
    client = Client(tmp_path, wait_s=3600)
    assert client.close()
    with pytest.raises(SpoolClosedError):
        client.emit(ClientSale("a", 1))
    assert (client.stats().emitted, client.stats().refused) == (0, 1)
