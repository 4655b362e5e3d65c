"""The server for Prometheus: who gets the page, who does not, and a real Prometheus that does."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchmill import ConfigError
from batchmill.export import PageSettings, PrometheusServer, PrometheusSettings, TelemetryServer
from batchmill.http import Access
from batchmill.store import RetryPolicy, open_store
from batchmill.telemetry.exposition import TextFormat
from tests.kit.queues import make_queue
from tests.kit.servers.certificates import (
    check_replaced_without_restart,
    read_trusting,
    write_certificate,
)
from tests.kit.servers.prometheus import (
    Key,
    expected,
    last_minutes,
    metrics_of,
    parsed,
    running_prometheus,
)
from tests.kit.stores import Measurement, Writer
from tests.kit.threads import WAIT_S, until

OPEN = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"


@contextlib.contextmanager
def serving(url: str, **settings: Any) -> Iterator[PrometheusServer]:
    """A server on a free port, whose page asks the store each time whether there is more."""
    policy = RetryPolicy(give_up_after_s=0.1)
    defaults: dict[str, Any] = {"port": 0, "page": PageSettings(recheck_s=0.0)}
    with PrometheusServer(
        lambda: open_store(url, create=False, retry=policy),
        PrometheusSettings(**(defaults | settings)),
    ) as server:
        yield server


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A store with rows of this minute and of the one before."""
    url = f"sqlite:///{tmp_path}/store.db"
    before, now = last_minutes(2)
    with open_store(url) as store:
        Writer(store).write(
            Measurement(30, minute=before, entity='say "hi" \\ 名前\n'),
            Measurement(50, minute=before, entity='say "hi" \\ 名前\n'),
            Measurement(70, minute=now),
        )
    return url


def get(
    server: PrometheusServer | TelemetryServer,
    path: str = "/metrics",
    method: str = "GET",
    **headers: str,
) -> tuple[http.client.HTTPResponse, bytes]:
    """The answer to a request, and its body."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
    with contextlib.closing(connection):
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, headers=sent)
        response = connection.getresponse()
        return response, response.read()


def stored(url: str) -> dict[Key, float]:
    """What the page has to say of the store's first minute."""
    with open_store(url) as store:
        minute = min(value.bucket for value in store.values("calls"))
        return expected(store, minute)


@pytest.mark.parametrize(
    ("accept", "form"), [("", TextFormat.PROMETHEUS), (OPEN, TextFormat.OPENMETRICS)]
)
def test_the_page_is_served(url: str, accept: str, form: TextFormat) -> None:
    """GET /metrics answers the values of the store, in the format that the scraper prefers."""
    with serving(url) as server:
        response, body = get(server, Accept=accept)
    assert (response.status, response.headers["Content-Type"]) == (200, form.value)
    assert metrics_of(parsed(body.decode(), form)) == stored(url)


def test_a_packed_page_is_served(url: str) -> None:
    """Whoever takes gzip gets the page packed."""
    with serving(url) as server:
        response, body = get(server, Accept_Encoding="gzip")
    assert response.headers["Content-Encoding"] == "gzip"
    assert metrics_of(parsed(gzip.decompress(body).decode())) == stored(url)


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
@pytest.mark.parametrize(
    ("accept", "form"), [("", TextFormat.PROMETHEUS), (OPEN, TextFormat.OPENMETRICS)]
)
def test_the_page_has_the_queues_of_its_process(
    url: str, accept: str, form: TextFormat, encoding: str
) -> None:
    """As they are at that moment, though the store is not read again; in every form of a page."""
    labels = frozenset({("queue", "exporting")})
    pages = []
    with (
        serving(url, page=PageSettings(recheck_s=1e6)) as server,
        make_queue("exporting", consumer=lambda batch: None) as queue,
    ):
        for _ in range(2):
            queue.produce(1)
            assert queue.flush(WAIT_S)
            _, body = get(server, Accept=accept, Accept_Encoding=encoding)
            text = (gzip.decompress(body) if encoding == "gzip" else body).decode()
            pages.append(parsed(text, form))
        assert text.endswith("# EOF\n") is (form is TextFormat.OPENMETRICS)
    consumed = [page["batchmill_queue_consumed_items_total", labels] for page in pages]
    assert consumed[1] == consumed[0] + 1
    assert metrics_of(pages[0]) == metrics_of(pages[1]) == stored(url)


def test_a_process_without_a_store_serves_its_queues() -> None:
    """To those who show the token."""
    settings = PrometheusSettings(port=0, access=Access(token="s3cret"))
    with (
        TelemetryServer(settings) as server,
        make_queue("serving", consumer=lambda batch: None),
    ):
        refused, _ = get(server)
        response, body = get(server, Authorization="Bearer s3cret")
    assert (refused.status, response.status) == (401, 200)
    page = parsed(body.decode())
    assert page["batchmill_queue_depth", frozenset({("queue", "serving")})] == 0


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [
        ("/healthz", "GET", 200),
        ("/metrics", "HEAD", 200),
        ("/", "GET", 404),
        ("/metrics", "POST", 501),
    ],
)
def test_other_requests_are_answered(url: str, path: str, method: str, status: int) -> None:
    """There is a health page; what is neither page nor known method is refused."""
    with serving(url) as server:
        response, body = get(server, path, method)
    assert response.status == status
    assert method != "HEAD" or (not body and int(response.headers["Content-Length"]) > 1000)


def test_a_token_is_required(url: str) -> None:
    """With a token set, the page is for those who show it; the health page is for all."""
    with serving(url, access=Access(token="s3cret")) as server:
        statuses = [
            get(server)[0].status,
            get(server, Authorization="Bearer wrong")[0].status,
            get(server, Authorization="Bearer s3cret")[0].status,
            get(server, "/healthz")[0].status,
        ]
        until(lambda: server.answers() == {"unauthorized": 2, "ok": 1, "healthz": 1})
    assert statuses == [401, 401, 200, 200]


def test_strangers_are_not_let_in_by_accident() -> None:
    """Beyond this machine the page takes a token, or a word that it shall be open."""
    with pytest.raises(ConfigError, match="loopback"):
        PrometheusSettings(bind="0.0.0.0")
    PrometheusSettings(bind="0.0.0.0", access=Access(token="s3cret"))
    PrometheusSettings(bind="0.0.0.0", insecure=True)


def test_a_port_that_is_taken_is_said(url: str) -> None:
    """A port that another program has is an error that names it."""
    with serving(url) as server, pytest.raises(ConfigError, match=f"port={server.port}"):
        PrometheusServer(lambda: open_store(url), PrometheusSettings(port=server.port))


def test_a_store_that_cannot_be_read_is_a_503(tmp_path: Path) -> None:
    """Without a store, scrapers are told why and when to come again; health is as before."""
    with serving(f"sqlite:///{tmp_path}/none.db") as server:
        response, body = get(server)
        assert get(server, "/healthz")[0].status == 200
    assert (response.status, response.headers["Retry-After"]) == (503, "5")
    assert b"there is no store at sqlite:///" in body


def test_a_lost_postgres_is_a_503_and_comes_back(postgres: Any, postgres_url: str) -> None:
    """While PostgreSQL is down a scrape is answered 503; when it is back, so is the page."""
    before, now = last_minutes(2)
    with open_store(postgres_url) as store:
        Writer(store).write(Measurement(30, minute=before), Measurement(70, minute=now))
    with serving(postgres_url) as server:
        assert get(server)[0].status == 200
        postgres.stop("immediate")
        response, body = get(server)
        postgres.start()
        until(lambda: get(server)[0].status == 200)
    assert response.status == 503
    assert body.startswith(b"the store cannot be read: ")


def test_one_connection_more_than_allowed_costs_one_of_them(url: str) -> None:
    """The oldest idle one, or the new one, which may check the health only: it is answered 503."""
    with serving(url, max_connections=2) as server:
        with contextlib.ExitStack() as stack:
            clients = [
                stack.enter_context(socket.create_connection(("127.0.0.1", server.port), WAIT_S))
                for _ in range(3)
            ]
            clients[-1].sendall(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n")

            def heads() -> list[bytes]:
                answered, _, _ = select.select(clients, [], [], WAIT_S)
                return [client.recv(13, socket.MSG_PEEK) for client in answered]

            until(lambda: b"HTTP/1.1 503 " in heads())
        until(lambda: get(server)[0].status == 200)
        assert server.answers()["too many connections"] >= 1


@pytest.mark.parametrize("sent", [b"", b"GET /metrics HTTP/1.1\r\n", b"GET /met"])
def test_a_slow_scraper_is_cut_off(url: str, sent: bytes) -> None:
    """A request that does not arrive in time ends with its connection."""
    with serving(url, request_s=0.3) as server:
        with socket.create_connection(("127.0.0.1", server.port), WAIT_S) as slow:
            slow.sendall(sent)
            assert slow.recv(1) == b""
        until(lambda: server.answers().get("cut off") == 1)


def test_a_scraper_that_drips_is_cut_off(url: str) -> None:
    """Nor does one byte after the other keep a connection longer than is allowed."""
    with serving(url, request_s=0.5) as server:
        with socket.create_connection(("127.0.0.1", server.port), WAIT_S) as slow:
            slow.sendall(b"GET /metrics HTTP/1.1\r\n")
            slow.settimeout(0.05)

            def is_cut() -> bool:
                try:
                    slow.sendall(b"x")
                    return slow.recv(1) == b""
                except TimeoutError:
                    return False
                except OSError:
                    return True

            until(is_cut)
        until(lambda: server.answers().get("cut off") == 1)


def test_the_page_may_be_encrypted(url: str, tmp_path: Path) -> None:
    """With a certificate the page is served over TLS, and who speaks something else is cut off."""
    access = write_certificate(tmp_path)
    with serving(url, access=access) as server:
        with socket.create_connection(("127.0.0.1", server.port), WAIT_S) as plain:
            plain.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            until(lambda: server.answers() == {"TLS failed": 1})
        page = read_trusting(server.address, access).decode()
    assert metrics_of(parsed(page)) == stored(url)


def test_the_certificate_of_the_page_is_replaced_without_a_restart(
    url: str, tmp_path: Path
) -> None:
    """The next scrape gets the new one."""
    with serving(url, access=write_certificate(tmp_path)) as server:
        check_replaced_without_restart(server.address, tmp_path)


def test_the_page_of_a_process_is_encrypted_too(tmp_path: Path) -> None:
    """That of ``metrics_port``; its certificate is replaced without a restart as well."""
    access = write_certificate(tmp_path)
    with (
        TelemetryServer(PrometheusSettings(port=0, access=access)) as server,
        make_queue("encrypted", consumer=lambda batch: None),
    ):
        assert b"batchmill" in read_trusting(server.address, access)
        check_replaced_without_restart(server.address, tmp_path)


def test_headers_are_bounded(url: str) -> None:
    """A request with endless headers is answered, and not kept."""
    with serving(url) as server, socket.create_connection(("127.0.0.1", server.port), WAIT_S) as c:
        c.sendall(b"GET /metrics HTTP/1.1\r\n" + b"".join(b"h%d: x\r\n" % n for n in range(9000)))
        assert c.recv(12) == b"HTTP/1.1 431"


def test_scrapes_at_once_are_one_read(url: str) -> None:
    """Thirty scrapers at a time all get the same page, which is read once."""
    pages: list[bytes] = []
    with serving(url, page=PageSettings()) as server:
        threads = [threading.Thread(target=lambda: pages.append(get(server)[1])) for _ in range(30)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert server._page.reads == 1
    assert (len(pages), len(set(pages))) == (30, 1)


def test_a_real_prometheus_scrapes_it(url: str, tmp_path: Path) -> None:
    """A Prometheus that scrapes the page answers PromQL with the store's values."""
    with (
        serving(url) as server,
        running_prometheus(tmp_path / "prom", f"127.0.0.1:{server.port}") as prometheus,
    ):

        def scraped() -> dict[Key, float]:
            series = {}
            for labels, value in prometheus.query('{__name__=~"batchmill_.*",job="batchmill"}'):
                name = labels.pop("__name__")
                del labels["job"], labels["instance"]
                series[name, frozenset(labels.items())] = value
            return metrics_of(series)

        # Each time: a scrape that takes too long ends all series until the next one.
        until(lambda: scraped() == stored(url))
        product = "sum by (kind) (batchmill_calls * batchmill_avg)"
        until(lambda: prometheus.query(product) == [({"kind": "endpoint"}, 2 * 40)])


@pytest.mark.system
def test_a_real_prometheus_forgets_what_is_gone(tmp_path: Path) -> None:
    """An entity that is not on the next minute's page has no value any more at once."""
    url = f"sqlite:///{tmp_path}/store.db"
    first, second, third = last_minutes(3)
    with open_store(url) as store:
        writer = Writer(store)
        writer.write(
            *(Measurement(1, minute=first, entity=entity) for entity in ("stays", "goes")),
            Measurement(1, minute=second, entity="stays"),
        )
        with (
            serving(url) as server,
            running_prometheus(tmp_path / "prom", f"127.0.0.1:{server.port}") as prometheus,
        ):

            def names() -> set[str]:
                return {labels["name"] for labels, _ in prometheus.query("batchmill_calls")}

            until(lambda: names() == {"stays", "goes"})
            writer.write(Measurement(1, minute=third, entity="stays"))
            until(lambda: names() == {"stays"})
