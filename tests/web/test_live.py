"""Server-sent events: which are sent, to how many listeners, and how streams end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from batchmill.store import open_store
from batchmill.web import WebServer, WebSettings
from batchmill.web.live import Live, LiveSettings
from batchmill.web.query_pool import QueryPool
from tests.kit.threads import WAIT_S
from tests.web.kit import FakeRun
from tests.web.traffic import Call, Shop

QUICK = LiveSettings(every_s=0.02, heartbeat_s=60.0)


class Listener:
    """Somebody who asks a :class:`Live`, and what they are sent."""

    def __init__(self, live: Live, stalled: bool = False) -> None:
        self.status = 0
        self.text = ""
        self.reads = asyncio.Event()
        if not stalled:
            self.reads.set()
        self._gone = asyncio.Event()
        self._came = asyncio.Event()
        self.task = asyncio.create_task(self._ask(live))

    async def _ask(self, live: Live) -> None:
        answer = await live.stream(None)  # type: ignore[arg-type]
        scope = {"type": "http", "asgi": {"spec_version": "2.3"}, "method": "GET", "headers": []}
        await answer(scope, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            await self.reads.wait()
            self.text += message.get("body", b"").decode()
        self._came.set()

    def events(self, kind: str) -> list[Any]:
        """What was told of a kind."""
        parts = [part.split("\n") for part in self.text.split("\n\n")]
        return [
            json.loads(lines[1].removeprefix("data: "))
            for lines in parts
            if lines[0] == f"event: {kind}"
        ]

    async def until(self, true: Callable[[], Any]) -> None:
        """Wait for what the next events will make true."""
        async with asyncio.timeout(WAIT_S):
            while not true():
                self._came.clear()
                await self._came.wait()

    async def leave(self) -> None:
        """Close the connection."""
        self._gone.set()
        await self.task


@contextlib.asynccontextmanager
async def living(
    url: str, run: Callable[[], Mapping[str, Any]] | None, settings: LiveSettings = QUICK
) -> AsyncIterator[Live]:
    """A source of events; closed in the end."""
    pool = QueryPool(url)
    live = Live(pool, run and FakeRun(run), settings)
    try:
        yield live
    finally:
        live.close()
        await asyncio.to_thread(pool.close)


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Where a store will be."""
    return f"sqlite:///{tmp_path}/store.db"


class Counting:
    """A run that says how often it was asked."""

    def __init__(self) -> None:
        self.reads = 0

    def __call__(self) -> Mapping[str, Any]:
        self.reads += 1
        return {"reads": self.reads}


def test_the_run_is_sent_each_time_and_a_commit_once(url: str) -> None:
    """A commit that was told is not told again; the next one is."""

    async def listen() -> None:
        with open_store(url) as store:
            shop = Shop(store)
            began = time.time()
            shop.commit([Call("shop", 30, 1_772_366_430)])
            async with living(url, Counting()) as live:
                listener = Listener(live)
                await listener.until(
                    lambda: listener.events("commit") and len(listener.events("pipeline")) > 5
                )
                [commit] = listener.events("commit")
                assert commit["newest_minute_s"] == 1_772_366_400
                assert commit["last_batch"] == 0
                assert began - 1 <= commit["committed_at"] <= time.time()
                await asyncio.to_thread(shop.commit, [Call("shop", 30, 1_772_366_490)])
                await listener.until(lambda: len(listener.events("commit")) > 1)
                assert listener.events("commit")[1]["newest_minute_s"] == 1_772_366_460
                assert listener.events("commit")[1]["last_batch"] == 1
                await listener.leave()

    asyncio.run(listen())


def test_however_many_listen_one_looks(url: str) -> None:
    """And nobody looks when nobody listens."""

    async def listen() -> None:
        run = Counting()
        async with living(url, run) as live:
            many = [Listener(live) for _ in range(10)]
            for client in many:
                await client.until(lambda client=client: client.events("pipeline"))  # type: ignore[misc]
            newest = max(client.events("pipeline")[-1]["reads"] for client in many)
            assert run.reads <= newest + 1
            assert live.listeners == 10
            await asyncio.gather(*(client.leave() for client in many))
            assert live.listeners == 0
            assert live._polling is None

    asyncio.run(listen())


def test_one_more_than_may_listen_is_sent_away(url: str) -> None:
    """503 and a reason; when one leaves, the next may."""

    async def listen() -> None:
        settings = LiveSettings(most_listeners=2, every_s=0.02)
        async with living(url, Counting(), settings) as live:
            first, second = Listener(live), Listener(live)
            await first.until(lambda: first.text)
            await second.until(lambda: second.text)
            third = Listener(live)
            await third.task
            assert third.status == 503
            assert "the limit of 2 listeners" in json.loads(third.text)["error"]
            assert (live.listeners, live.refused) == (2, 1)
            await first.leave()
            fourth = Listener(live)
            await fourth.until(lambda: fourth.events("pipeline"))
            assert fourth.status == 200

    asyncio.run(listen())


def test_a_slow_reader_gets_the_newest_and_holds_up_nobody(url: str) -> None:
    """What it has missed is not kept for it."""

    async def listen() -> None:
        async with living(url, Counting()) as live:
            slow, quick = Listener(live, stalled=True), Listener(live)
            await quick.until(lambda: len(quick.events("pipeline")) > 20)
            slow.reads.set()
            await slow.until(lambda: slow.events("pipeline"))
            assert slow.events("pipeline")[0]["reads"] >= 20

    asyncio.run(listen())


def test_who_does_not_read_at_all_is_let_go(url: str) -> None:
    """So that its place is another's."""

    async def listen() -> None:
        settings = LiveSettings(every_s=0.02, send_s=0.05)
        async with living(url, Counting(), settings) as live:
            stalled = Listener(live, stalled=True)
            async with asyncio.timeout(WAIT_S):
                await stalled.task
            assert (live.listeners, live.disconnected) == (0, 1)

    asyncio.run(listen())


def test_a_line_says_that_we_are_there_while_nothing_happens(url: str) -> None:
    """No run, no store: there is nothing to tell of."""

    async def listen() -> None:
        settings = LiveSettings(every_s=60.0, heartbeat_s=0.02)
        async with living(url, None, settings) as live:
            listener = Listener(live)
            await listener.until(lambda: listener.text.count(": still here\n\n") > 2)

    asyncio.run(listen())


def test_an_unreadable_store_is_reported_once(url: str, tmp_path: Path) -> None:
    """With the reason; and when it can be again, that too."""

    async def listen() -> None:
        async with living(url, Counting()) as live:
            listener = Listener(live)
            await listener.until(lambda: listener.events("store"))
            [report] = listener.events("store")
            assert report["ok"] is False
            assert "store.db" in report["fault"]
            with open_store(url) as store:
                Shop(store).commit([Call("shop", 30, 1_772_366_430)])
                await listener.until(lambda: listener.events("commit"))
            assert [event["ok"] for event in listener.events("store")] == [False, True]

    asyncio.run(listen())


def test_a_run_that_cannot_be_read_is_tried_again(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever its error; it is logged once."""
    reads = 0

    def run() -> Mapping[str, Any]:
        nonlocal reads
        reads += 1
        if reads < 5:
            raise KeyError("broken")
        return {"reads": reads}

    async def listen() -> None:
        async with living(url, run) as live:
            listener = Listener(live)
            await listener.until(lambda: listener.events("pipeline"))
            assert listener.events("pipeline")[0]["reads"] == 5

    asyncio.run(listen())
    assert [record.getMessage() for record in caplog.records if record.name == "batchmill.web"] == [
        "the status of the run cannot be read; retrying"
    ]


def test_a_server_ends_though_people_listen(url: str) -> None:
    """Their answers end properly, and at once, not after the hour that requests are given."""

    async def serve() -> bytes:
        server = WebServer(url, WebSettings(port=0, drain_s=3600), run=FakeRun(Counting()))
        ready = asyncio.Event()
        serving = asyncio.create_task(server.serve(ready.set))
        async with asyncio.timeout(WAIT_S):
            await ready.wait()
            host, _, port = server.address.removeprefix("http://").rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET /api/v1/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            heard = await reader.readuntil(b"event: pipeline")
            threading.Thread(target=server.stop).start()
            heard += await reader.read()
            await serving
            writer.close()
        return heard

    heard = asyncio.run(serve())
    assert heard.startswith(b"HTTP/1.1 200 OK")
    assert heard.endswith(b"\r\n0\r\n\r\n"), "the last chunk"
