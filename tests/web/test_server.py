"""The server: who may ask, what it says when the store is away, and how much it takes on."""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from batchmill import ConfigError
from batchmill.http import Access
from batchmill.store import open_store
from batchmill.telemetry.exposition import TextFormat
from batchmill.web import WebServer, WebSettings, make_app, query_pool
from tests.kit.queues import make_queue
from tests.kit.servers.certificates import (
    check_replaced_without_restart,
    read_trusting,
    write_certificate,
)
from tests.kit.servers.prometheus import parsed
from tests.kit.threads import WAIT_S
from tests.oracle.functions import log_floor
from tests.web.kit import START_S, Call, CallWriter, Client, FakeRun, serving

ASKED = {"from_": START_S, "to": START_S + 600}


def _url(folder: Path) -> str:
    return f"sqlite:///{folder}/store.db"


def _write(url: str, *calls: Call) -> None:
    with open_store(url) as store:
        CallWriter(store).write(calls)


def _names(client: Client) -> list[str]:
    return [service["name"] for service in client.get("/api/v1/services", **ASKED)["services"]]


def test_a_store_that_comes_later_is_read(tmp_path: Path) -> None:
    """Until then 503 with a reason, and the status says so; no restart is needed."""
    with serving(_url(tmp_path)) as client:
        status, headers, body = client.raw("/api/v1/services")
        assert (status, headers["retry-after"]) == (503, "5")
        assert b"there is no store at" in body
        report = client.get("/api/v1/status")
        assert (report["store"]["ok"], report["newest_minute_s"]) == (False, None)
        _write(_url(tmp_path), Call("shop", START_S))
        assert _names(client) == ["shop"]
        report = client.get("/api/v1/status")
        store = {"ok": True, "fault": None, "url": _url(tmp_path)}
        assert (report["store"], report["newest_minute_s"]) == (store, START_S)


def test_a_replaced_store_is_read(tmp_path: Path) -> None:
    """Another file in the old one's place is read, not the one that is gone."""
    place = tmp_path / "place"
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        _write(_url(tmp_path / name), Call(name, START_S))
    place.mkdir()
    (tmp_path / "old" / "store.db").rename(place / "store.db")
    with serving(_url(place)) as client:
        assert _names(client) == ["old"]
        (tmp_path / "new" / "store.db").replace(place / "store.db")
        assert _names(client) == ["new"]


def test_what_is_committed_shows_at_once(tmp_path: Path) -> None:
    """The server reads while others write, and remembers nothing that has changed."""
    with open_store(_url(tmp_path)) as store, serving(_url(tmp_path)) as client:
        writer = CallWriter(store)
        for number in range(1, 5):
            call = Call("shop", START_S, 100 * number)
            writer.write([call])
            (service,) = client.get("/api/v1/services", **ASKED)["services"]
            latest = [result for result in service["series"]["p99"] if result is not None]
            p99 = log_floor(call.micros) / 1000
            assert (service["range"]["p99"], latest) == (p99, [p99])


def test_a_file_that_is_no_store_is_said_to_be_none(tmp_path: Path) -> None:
    """503 with what is wrong with it."""
    (tmp_path / "store.db").write_text("this is no database, and longer than a header is " * 50)
    with serving(_url(tmp_path)) as client:
        status, answer = client.ask("/api/v1/metrics")
    assert (status, "not a store that can be read" in answer["error"]) == (503, True)


def test_an_address_that_is_none_is_said_to_be_none() -> None:
    """503, as whoever asks cannot help it; with what an address looks like."""
    with serving("mysql://somewhere") as client:
        status, answer = client.ask("/api/v1/metrics")
    assert (status, "sqlite:///relative.db" in answer["error"]) == (503, True)


def test_a_database_that_restarts_is_survived(postgres_url: str) -> None:
    """A connection that the server cut is made anew."""
    import psycopg

    _write(postgres_url, Call("shop", START_S))
    with serving(postgres_url) as client:
        assert _names(client) == ["shop"]
        with psycopg.connect(postgres_url, autocommit=True) as other:
            other.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE pid <> pg_backend_pid() AND datname = current_database()"
            )
        assert _names(client) == ["shop"]


def test_the_api_asks_for_the_token(tmp_path: Path) -> None:
    """401 without it or with a wrong one, on every path under /api, also those there are not."""
    access = Access(token="secret")
    with serving(_url(tmp_path), access=access, token="secret") as client:
        assert client.ask("/api/v1/status")[0] == 200
        for token in (None, "wrong"):
            stranger = Client(client.address, token)
            for path in ("/api/v1/status", "/api/v1/query", "/api/none", "/api", "/metrics"):
                status, headers, _ = stranger.raw(path)
                assert (status, headers["www-authenticate"]) == (401, "Bearer")
            assert stranger.raw("/other")[0] == 404


def test_the_queues_of_its_process_are_served_to_prometheus(tmp_path: Path) -> None:
    """In the format that the scraper prefers."""
    accept = {"": TextFormat.PROMETHEUS, TextFormat.OPENMETRICS.value: TextFormat.OPENMETRICS}
    with (
        serving(_url(tmp_path)) as client,
        make_queue("beside", consumer=lambda batch: None),
    ):
        for header, text_format in accept.items():
            request = Request(f"{client.address}/metrics", headers={"Accept": header})
            with urlopen(request, timeout=WAIT_S) as response:
                assert response.headers["Content-Type"] == text_format.value
                samples = parsed(response.read().decode(), text_format)
            assert samples["batchmill_queue_depth", frozenset({("queue", "beside")})] == 0


@pytest.mark.parametrize(
    ("host", "given", "status"),
    [
        ("localhost:8080", {}, 200),
        ("127.0.0.1", {}, 200),
        ("[::1]:8080", {}, 200),
        ("rebound.example:8080", {}, 421),
        ("", {}, 421),
        ("rebound.example:8080", {"insecure": True}, 200),
        ("metrics.example", {"access": Access(token="secret")}, 200),
    ],
)
def test_without_a_token_only_its_own_host_names_are_served(
    tmp_path: Path, host: str, given: dict[str, Any], status: int
) -> None:
    """Else a stranger's page whose name leads to this machine could read all there is."""
    settings = WebSettings(**given)
    app = make_app(_url(tmp_path), access=settings.access, hosts=settings.hosts)
    heard: list[Any] = []

    async def hear(message: Any) -> None:
        heard.append(message)

    async def say() -> Any:
        return {"type": "http.request"}

    scope: dict[str, Any] = {"type": "http", "method": "GET", "path": "/", "query_string": b""}
    scope["headers"] = [(b"host", host.encode())]
    asyncio.run(app(scope, say, hear))
    assert heard[0]["status"] == status


def test_answers_are_encrypted_where_there_is_a_certificate(tmp_path: Path) -> None:
    """As for senders of spans; in the clear nobody is answered."""
    access = write_certificate(tmp_path)
    with serving(_url(tmp_path), access=access) as client:
        assert client.address.startswith("https://")
        assert b"version" in read_trusting(f"{client.address}/api/v1/status", access)
        with pytest.raises((OSError, http.client.HTTPException)):
            client.raw("/api/v1/status")


def test_the_certificate_is_replaced_without_a_restart(tmp_path: Path) -> None:
    """The next connection gets the new one."""
    with serving(_url(tmp_path), access=write_certificate(tmp_path)) as client:
        check_replaced_without_restart(f"{client.address}/api/v1/status", tmp_path)


def test_strangers_are_not_let_in_by_mistake() -> None:
    """Beyond this machine nobody is served without a token, a certificate or being told so."""
    with pytest.raises(ConfigError, match="loopback"):
        WebSettings(bind="0.0.0.0")
    assert WebSettings(bind="0.0.0.0", insecure=True).insecure
    assert WebSettings(bind="0.0.0.0", access=Access(token="x")).access.token == "x"


def test_every_answer_has_its_headers(tmp_path: Path) -> None:
    """Nothing is kept by caches or read by other pages, be it an answer or an error."""
    with serving(_url(tmp_path)) as client:
        for path in ("/api/v1/status", "/api/v1/services", "/nothing"):
            _, headers, _ = client.raw(path)
            assert headers["cache-control"] == "no-store"
            assert headers["x-content-type-options"] == "nosniff"
            assert "default-src 'self'" in headers["content-security-policy"]
            assert headers["x-frame-options"] == "DENY"


def test_other_methods_are_refused(tmp_path: Path) -> None:
    """405, with a reason, and HEAD is as good as GET."""
    with serving(_url(tmp_path)) as client:
        status, answer = client.ask("/api/v1/services", "DELETE")
        assert (status, answer["error"]) == (405, "/api/v1/services does not support DELETE")
        assert client.raw("/api/v1/status", "HEAD")[0] == 200


def test_more_questions_than_it_can_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those beyond the bound are answered 503 at once, those within it when their turn comes."""
    monkeypatch.setattr(query_pool, "MOST_RUNNING", 2)
    entered, going = threading.Semaphore(0), threading.Event()

    def pipeline() -> dict[str, int]:
        entered.release()
        assert going.wait(WAIT_S)
        return {"fine": 1}

    with serving(_url(tmp_path), run=FakeRun(pipeline)) as client, ThreadPoolExecutor(2) as others:
        try:
            answers = [others.submit(client.ask, "/api/v1/pipeline") for _ in range(2)]
            for _ in answers:
                assert entered.acquire(timeout=WAIT_S)
            status, headers, body = client.raw("/api/v1/pipeline")
            assert (status, headers["retry-after"]) == (503, "1")
            assert b"running already" in body
            assert client.ask("/api/v1/status")[1]["answers"] == {"too many": 2}
        finally:
            going.set()
        assert [answer.result(WAIT_S) for answer in answers] == [(200, {"fine": 1})] * 2


def test_a_pipeline_that_fails_is_said_to_have_failed(tmp_path: Path) -> None:
    """500 with a sentence, not a page of code; the next question is answered."""

    def pipeline() -> dict[str, int]:
        raise RuntimeError("secret detail")

    with serving(_url(tmp_path), run=FakeRun(pipeline)) as client:
        status, _, body = client.raw("/api/v1/pipeline")
        assert (status, b"secret" in body) == (500, False)
        assert client.ask("/api/v1/status")[0] == 200


def test_a_request_without_end_is_cut_off(tmp_path: Path) -> None:
    """Whoever begins a request and does not end it, or never begins one, is not waited for."""
    with serving(_url(tmp_path), request_s=0.2) as client:
        host, _, port = client.address.partition("://")[2].rpartition(":")
        for begun in (b"", b"GET /api/v1/status HTTP/1.1\r\nHost:"):
            with socket.create_connection((host, int(port)), WAIT_S) as slow:
                slow.sendall(begun)
                assert slow.recv(100) == b""
        assert client.ask("/api/v1/status")[0] == 200


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    """The error says which port, and where."""
    import asyncio

    with serving(_url(tmp_path)) as client:
        port = int(client.address.rpartition(":")[2])
        server = WebServer(_url(tmp_path), WebSettings(port=port))
        with pytest.raises(ConfigError, match=f"port={port} is not valid"):
            asyncio.run(server.serve())


def test_a_server_that_is_stopped_before_it_starts(tmp_path: Path) -> None:
    """It does not start."""
    import asyncio

    server = WebServer(_url(tmp_path), WebSettings(port=0))
    server.stop()
    asyncio.run(server.serve())
