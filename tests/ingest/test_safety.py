"""Senders that do harm: the receiver stays up, stays bounded, and says what is wrong."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import resource
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batchmill import ConfigError
from batchmill.ingest import Access, ReceiverSettings
from batchmill.ingest.decode import ENCODINGS
from tests.ingest.hostile import spans
from tests.kit.files import ROOT
from tests.kit.ingest import (
    JSON,
    MIB,
    PROTOBUF,
    QUICK,
    Ingest,
    Receiving,
    gzip_bomb,
    ingest,
    local_ingest,
    read_all,
    request,
    request_json,
)
from tests.kit.servers.certificates import client_of, write_authority
from tests.kit.threads import PATIENCE_S, until

TRACES = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
HEAD = b"POST /v1/traces HTTP/1.1\r\nhost: x\r\ncontent-type: application/x-protobuf\r\n"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ingest]:
    """One receiver, which all of this happens to."""
    with ingest(tmp_path_factory.mktemp("ingest"), *QUICK, "--max-body-mb", "1") as running:
        yield running


def exchange(running: Receiving, *parts: bytes, end: bool = True) -> bytes:
    """Send these bytes, perhaps say that it is all, and read what comes back."""
    with running.connect() as link:
        with contextlib.suppress(OSError):  # it may have hung up
            for part in parts:
                link.sendall(part)
            if end:
                link.shutdown(socket.SHUT_WR)
        return read_all(link)


def statuses(answers: bytes) -> list[int]:
    """The status of each answer on a connection."""
    return [int(line[9:12]) for line in answers.split(b"\n") if line.startswith(b"HTTP/1.1 ")]


headers = st.sampled_from(
    [
        b"content-length: 10",
        b"content-length: -1",
        b"content-length: 99999999999999999999",
        b"content-length: 5\r\ncontent-length: 6",
        b"transfer-encoding: chunked",
        b"transfer-encoding: gzip, chunked",
        b"content-encoding: gzip",
        b"content-encoding: deflate, gzip",
        b"content-type: application/json",
        b"content-type: application/x-protobuf",
        b"connection: close",
        b"connection: upgrade\r\nupgrade: websocket",
        b"connection: upgrade\r\nupgrade: h2c",
        b"expect: 100-continue",
        b"authorization: Bearer \xff\xfe",
        b"x: " + b"y" * 20_000,
        b"no colon here",
        b" folded: line",
        b"host: other",
    ]
)
lines = st.sampled_from(
    [
        b"POST /v1/traces HTTP/1.1",
        b"POST /v1/traces HTTP/1.0",
        b"POST /v1/traces?%00=%ff HTTP/1.1",
        b"POST http://x/v1/traces HTTP/1.1",
        b"GET /metrics HTTP/1.1",
        b"HEAD /metrics HTTP/1.1",
        b"OPTIONS * HTTP/1.1",
        b"CONNECT x:1 HTTP/1.1",
        b"GET /%2e%2e/%2e%2e/etc/passwd HTTP/1.1",
        b"BREW /v1/traces HTTP/1.1",
        b"POST /v1/traces HTTP/9.9",
        b"PRI * HTTP/2.0",
        b"GET /\xff HTTP/1.1",
    ]
)
bodies = st.one_of(
    st.binary(max_size=300),
    st.sampled_from([request(1), request_json(2), b"5\r\nhello\r\n0\r\n\r\n", b"zz\r\n", b"{}"]),
)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """Something like a request: sound parts, odd parts, cut anywhere."""
    head = [draw(lines), b"host: x", *draw(st.lists(headers, max_size=4))]
    body = draw(bodies)
    if draw(st.booleans()):
        head.append(b"content-length: %d" % len(body))
    whole = b"\r\n".join([*head, b"", body])
    cut = draw(st.none() | st.integers(0, len(whole)))
    return whole[:cut]


@settings(max_examples=200, deadline=None)
@given(parts=st.lists(requests() | st.binary(max_size=100), min_size=1, max_size=3))
def test_any_bytes_get_a_proper_answer(shared: Ingest, parts: list[bytes]) -> None:
    """Requests of all kinds, pipelined or cut: 200, a 4xx, or nothing; never a 500."""
    answers = statuses(exchange(shared, *parts))
    assert all(answer in (100, 200) or 400 <= answer < 500 for answer in answers), answers
    assert shared.process.running


@example(b"\xff\x06\x00\x00sNaPpY", PROTOBUF, "snappy")
@settings(max_examples=100, deadline=None)
@given(
    body=st.binary(max_size=300) | st.text(max_size=100).map(str.encode),
    content_type=st.sampled_from([PROTOBUF, JSON]),
    encoding=st.sampled_from(["", *ENCODINGS]),
)
def test_any_body_is_taken_or_malformed(
    shared: Ingest, body: bytes, content_type: str, encoding: str
) -> None:
    """Whole requests with any body: 200 or 400, or 413 where it claims to be large.

    Snappy's frames, which start with these bytes, are an encoding that is not supported: 415.
    """
    is_framed = encoding == "snappy" and body.startswith(b"\xff\x06\x00\x00sNaPpY")
    allowed = (415,) if is_framed else (200, 400, 413)
    assert shared.post(body, content_type, content_encoding=encoding).status in allowed


def test_a_sender_that_says_it_is_all_still_gets_its_answer(shared: Ingest) -> None:
    """Half-closed after a whole request."""
    body = request(3)
    answer = exchange(shared, HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
    assert statuses(answer) == [200]


def test_a_gzip_bomb(shared: Ingest) -> None:
    """413, before it is unpacked."""
    given_answer = shared.post(gzip_bomb(200), content_encoding="gzip")
    assert given_answer.status == 413
    assert shared.post(request(4)).status == 200


def test_one_span_many_times(shared: Ingest) -> None:
    """413 with a reason: no honest sender makes 50,000 spans of 9 KB."""
    body = gzip.compress(spans(b"", 50_000))
    refused = shared.post(body, content_encoding="gzip")
    assert refused.status == 413
    assert b"20 times as many, and 1 MiB" in refused.body


def test_a_body_that_announces_too_much(shared: Ingest) -> None:
    """413 at once: none of it is awaited."""
    answer = exchange(shared, HEAD + b"content-length: 2000000\r\n\r\n", end=False)
    assert statuses(answer) == [413]


def test_a_sender_that_sends_first_and_reads_later_sees_the_answer(shared: Ingest) -> None:
    """The connection is not reset under a body that is not wanted."""
    assert shared.post(bytes(32 * MIB)).status == 413


def test_an_endless_body(shared: Ingest) -> None:
    """Chunks without an end: read up to the limit, then 413, and the sender sees that."""
    chunk = b"10000\r\n" + bytes(0x10000) + b"\r\n"
    head = HEAD + b"transfer-encoding: chunked\r\n\r\n"
    answer = exchange(shared, head, *[chunk] * 20, end=False)
    assert statuses(answer) == [413]


def test_headers_without_end(shared: Ingest) -> None:
    """431 beyond the limit."""
    assert statuses(exchange(shared, HEAD + b"x: " + b"y" * 100_000, end=False)) == [431]


def test_an_answer_before_the_body_does_not_end_the_deadline(tmp_path: Path) -> None:
    """Who goes on sending after a 404 is cut off as well."""
    with local_ingest(tmp_path / "home", *QUICK, "--request-timeout", "0.5") as running:
        head = b"POST /nothing HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n"
        with running.connect() as link:
            assert statuses(slowly(link, head)) == [404]


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(b"", id="headers"),
        pytest.param(HEAD + b"content-length: 100000\r\n\r\n", id="body"),
        pytest.param(HEAD + b"transfer-encoding: chunked\r\n\r\n", id="chunks"),
    ],
)
def test_a_sender_of_one_byte_at_a_time(tmp_path: Path, head: bytes) -> None:
    """408 after the deadline for a whole request, however busy it keeps the connection."""
    with local_ingest(tmp_path / "home", *QUICK, "--request-timeout", "0.5") as running:
        with running.connect() as link:
            assert statuses(slowly(link, head)) == [408]
        assert running.post(request(1)).status == 200


def slowly(link: socket.socket, head: bytes) -> bytes:
    """Send ``head`` and then a byte at a time, for ever, until the other side has closed."""
    link.sendall(head)
    link.settimeout(0.05)
    rest = iter(b"POST /v1/traces HTTP/1.1\r\nx: " + b"1" * 10_000)
    answers = b""
    with contextlib.suppress(ConnectionError):
        for sender in rest:
            link.sendall(
                bytes([sender]) if not head.endswith(b"chunked\r\n\r\n") else b"1\r\n1\r\n"
            )
            with contextlib.suppress(TimeoutError):
                part = link.recv(65536)
                if not part:
                    break
                answers += part
    return answers


def test_connections_are_bounded_and_idle_ones_end(tmp_path: Path) -> None:
    """For one more, the oldest that has said nothing is turned away; the others do not stay."""
    options = ("--max-connections", "20", "--request-timeout", "2")
    with (
        local_ingest(tmp_path / "home", *QUICK, *options) as running,
        contextlib.ExitStack() as stack,
    ):
        first, *links = [stack.enter_context(running.connect()) for _ in range(20)]
        with running.connect() as one_more:
            assert statuses(read_all(first)) == [503]
            assert statuses(read_all(one_more)) == [408]
        assert [statuses(read_all(link)) for link in links] == [[408]] * 19
        assert running.post(request(1)).status == 200
        assert running.metric("http_connections_refused_total") == 1


@pytest.mark.system
def test_ten_thousand_connections_half_closed(shared: Ingest) -> None:
    """Opened, half a request, half-closed, and kept: the receiver closes its side and answers."""
    count = 10_000
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[0] < count + 500:
        if before[1] != resource.RLIM_INFINITY and before[1] < count + 500:
            # The test itself needs a file for each.
            count = max(100, before[1] - 500)
        resource.setrlimit(resource.RLIMIT_NOFILE, (count + 500, before[1]))
    try:
        with contextlib.ExitStack() as stack:
            for number in range(count):
                link = stack.enter_context(shared.connect())
                with contextlib.suppress(OSError):
                    link.sendall(HEAD[: number % len(HEAD)])
                    link.shutdown(socket.SHUT_WR)
            # The last ones may still be in: then it is 503, and to be tried again.
            until(lambda: shared.post(request(9)).status == 200)
            until(lambda: shared.metric("http_connections") <= 2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert shared.process.running


def test_a_token_is_required(tmp_path: Path) -> None:
    """401 without it, for spans and figures; health needs none."""
    token = tmp_path / "token"
    token.write_text("open-sesame\n")
    with ingest(tmp_path / "home", *QUICK, "--token-file", str(token)) as running:
        for wrong in ("", "open-sesame", "Bearer", "Bearer open", "Bearer open-sesame2", "Basic x"):
            given_answer = running.post(request(1), authorization=wrong)
            assert given_answer.status == 401
            assert given_answer.headers["www-authenticate"] == "Bearer"
        assert running.ask("GET", "/metrics").status == 401
        assert running.ask("GET", "/healthz").status == 200
        right = "bearer open-sesame"
        assert running.post(request(1), authorization=right).status == 200
        assert running.ask("GET", "/metrics", headers={"authorization": right}).status == 200
        assert "open-sesame" not in str(running.status())


@pytest.mark.parametrize("bind", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_listening_beyond_this_machine_takes_a_decision(bind: str) -> None:
    """A token, client certificates, or the word that everybody may send."""
    with pytest.raises(ConfigError, match="--token"):
        ReceiverSettings(bind=bind)
    ReceiverSettings(bind=bind, insecure=True)
    ReceiverSettings(bind=bind, access=Access(token="x"))
    pem = Path("x.pem")
    ReceiverSettings(bind=bind, access=Access(tls_cert=pem, tls_key=pem, client_ca=pem))
    with pytest.raises(ConfigError, match="--token"):  # TLS alone lets everybody in
        ReceiverSettings(bind=bind, access=Access(tls_cert=pem, tls_key=pem))


@pytest.mark.parametrize("bind", ["127.0.0.1", "127.8.8.8", "localhost", "::1"])
def test_loopback_needs_nothing(bind: str) -> None:
    """It is this machine only."""
    assert ReceiverSettings(bind=bind).bind == bind


@pytest.mark.parametrize("token", ["", " ", "a b", "tökén", "a\n"])
def test_a_token_that_nobody_could_send(token: str) -> None:
    """An empty one, above all, is no token at all."""
    with pytest.raises(ConfigError, match="token"):
        Access(token=token)


@pytest.mark.parametrize("option", ["--http-port", "--grpc-port"])
def test_a_port_that_is_taken(tmp_path: Path, option: str) -> None:
    """The message names it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        message = f"{option[2:6]}_port={port} is not valid: it must be a free port"
        with (
            pytest.raises(ConfigError, match=message),
            local_ingest(tmp_path / "home", option, port),
        ):
            pass


def test_the_command_ends_where_a_port_is_taken(tmp_path: Path) -> None:
    """With the same message; no traceback."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "batchmill", "ingest", "--grpc-port", port]
        command += ["--http-port", "0"]
        done = subprocess.run(
            [*command, "--home", str(tmp_path / "home")],
            env={"PYTHONPATH": str(ROOT / "src")},
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )
    assert done.returncode == 1
    assert f"grpc_port={port} is not valid: it must be a free port" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_sender_that_does_not_read_its_answers(tmp_path: Path) -> None:
    """Its connection ends, and takes no memory until then."""
    with (
        local_ingest(tmp_path / "home", *QUICK, "--request-timeout", "0.5") as running,
        running.connect() as link,
    ):
        link.settimeout(0.5)
        with contextlib.suppress(OSError):
            while True:
                link.sendall(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n" * 1000)
        until(lambda: running.metric("http_connections") == 1)  # the one that asks


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, a receiver's certificate and a sender's; and a stranger's."""
    folder = tmp_path_factory.mktemp("certificates")
    write_authority(folder)
    return folder


@pytest.mark.parametrize(("mutual", "processes"), [(False, 1), (True, 1), (True, 2)])
def test_tls_and_client_certificates(
    tmp_path: Path, certificates: Path, mutual: bool, processes: int
) -> None:
    """Both protocols, encrypted; with an authority, only senders that it knows."""
    options = ["--processes", str(processes), "--tls-cert", str(certificates / "server.pem")]
    options += ["--tls-key", str(certificates / "server.key")]
    if mutual:
        options += ["--tls-client-ca", str(certificates / "ca.pem")]
    # With several processes, these are started by the command.
    start = ingest if processes > 1 else local_ingest
    with start(tmp_path / "home", *QUICK, *options) as running:
        assert tls_post(running, certificates, "client") == 200
        assert tls_call(running, certificates, "client") == b""
        for wrong in (None, "stranger"):
            if mutual:
                with pytest.raises((ssl.SSLError, ConnectionError)):
                    tls_post(running, certificates, wrong)
                with pytest.raises(grpc.RpcError):
                    tls_call(running, certificates, wrong)
            else:
                assert tls_post(running, certificates, wrong) == 200
        assert exchange(running, HEAD + b"content-length: 0\r\n\r\n") == b""  # in the clear
        assert tls_post(running, certificates, "client") == 200


def test_certificates_are_replaced_without_a_restart(
    tmp_path: Path, certificates: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """For both ports; files that cannot be used change nothing, and are reported."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"

    def use(name: str) -> None:
        for place, suffix in ((cert, "pem"), (key, "key")):
            new = tmp_path / f"new.{suffix}"
            new.write_bytes((certificates / f"{name}.{suffix}").read_bytes())
            new.replace(place)

    use("server")
    options = ("--tls-cert", str(cert), "--tls-key", str(key))
    with local_ingest(tmp_path / "home", *QUICK, *options) as running:
        host, _, port = running.grpc.rpartition(":")
        places = (running.http, (host, int(port)))
        old = [ssl.get_server_certificate(place) for place in places]
        use("client")  # of the same authority
        wanted = [(certificates / "client.pem").read_text()] * 2
        until(lambda: [ssl.get_server_certificate(place) for place in places] == wanted)
        assert old != wanted
        assert tls_post(running, certificates, None) == 200
        assert tls_call(running, certificates, None) == b""
        cert.write_text("not a certificate")

        def reported() -> bool:
            assert tls_post(running, certificates, None) == 200
            return "the old ones stay" in caplog.text

        until(reported)
        assert tls_post(running, certificates, None) == 200


@pytest.mark.parametrize("processes", [1, 2])
def test_certificates_of_every_process_are_replaced(
    tmp_path: Path, certificates: Path, processes: int
) -> None:
    """That of the receiver, and the authority of its senders: both ports, however many processes
    there are; who had the old authority's certificate is refused then.
    """

    def use(file: str, place: str) -> Path:
        (tmp_path / "new").write_bytes((certificates / file).read_bytes())
        return (tmp_path / "new").replace(tmp_path / place)

    options = ["--tls-client-ca", str(use("stranger.pem", "ca.pem"))]
    options += ["--tls-cert", str(use("server.pem", "cert.pem"))]
    options += ["--tls-key", str(use("server.key", "key.pem"))]
    with ingest(tmp_path / "home", *QUICK, "--processes", str(processes), *options) as running:

        def served(sender: str) -> set[bool]:
            """Whether a sender is served; several connections reach all processes."""
            answers = set()
            for _ in range(1 if processes == 1 else 16):
                for call in (tls_post, tls_call):
                    try:
                        call(running, certificates, sender)
                    except (OSError, grpc.RpcError):
                        answers.add(False)
                    else:
                        answers.add(True)
            return answers

        assert served("stranger") == {True}
        assert served("client") == {False}
        use("ca.pem", "ca.pem")
        until(lambda: served("client") == {True}, "the new authority's certificates are accepted")
        assert served("stranger") == {False}
        use("client.key", "key.pem")
        use("client.pem", "cert.pem")
        new = ssl.PEM_cert_to_DER_cert((certificates / "client.pem").read_text())
        until(lambda: {shown(running, certificates) for _ in range(16)} == {new})


def shown(running: Receiving, certificates: Path) -> bytes | None:
    """The certificate that a sender is shown."""
    context = client_of(certificates, "client")
    with running.connect() as link, context.wrap_socket(link, server_hostname="127.0.0.1") as tls:
        return tls.getpeercert(binary_form=True)


def tls_post(running: Receiving, certificates: Path, sender: str | None) -> int:
    """The status of a request over TLS."""
    context = client_of(certificates, sender)
    link = http.client.HTTPSConnection(*running.http, timeout=PATIENCE_S, context=context)
    with contextlib.closing(link):
        link.request("POST", "/v1/traces", request(1), {"content-type": PROTOBUF})
        return link.getresponse().status


def tls_call(running: Receiving, certificates: Path, sender: str | None) -> bytes:
    """The answer of a gRPC call over TLS."""
    own = [None, None]
    if sender is not None:
        own = [(certificates / f"{sender}.{suffix}").read_bytes() for suffix in ("key", "pem")]  # type: ignore[misc]
    credentials = grpc.ssl_channel_credentials((certificates / "ca.pem").read_bytes(), *own)
    with grpc.secure_channel(running.grpc, credentials) as channel:
        answer: bytes = channel.unary_unary(TRACES)(request(1), timeout=PATIENCE_S)
        return answer
