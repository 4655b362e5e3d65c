"""Metrics and logs: discarded, refused or forwarded, over HTTP and gRPC."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import (
    ExportLogsServiceRequest,
    ExportLogsServiceResponse,
)
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)

from batchmill import ConfigError
from batchmill.ingest import ReceiverSettings
from tests.ingest.kit import decoding_in
from tests.kit.ingest import JSON, MIB, PROTOBUF, QUICK, Ingest, ingest, local_ingest
from tests.kit.processes import run_here
from tests.kit.threads import PATIENCE_S, until

SERVICE = "/opentelemetry.proto.collector.{0}.v1.{1}Service/Export"
METHODS = {name: SERVICE.format(name, name.capitalize()) for name in ("metrics", "logs")}
PROFILES = "/opentelemetry.proto.collector.profiles.v1development.ProfilesService/Export"
ANSWERS: dict[str, type[Message]] = {
    "metrics": ExportMetricsServiceResponse,
    "logs": ExportLogsServiceResponse,
}


def body_of(signal: str) -> bytes:
    """A request as an SDK sends it."""
    if signal == "metrics":
        metrics = ExportMetricsServiceRequest()
        metric = metrics.resource_metrics.add().scope_metrics.add().metrics.add(name="cpu")
        metric.gauge.data_points.add(as_double=0.5)
        return bytes(metrics.SerializeToString())
    logs = ExportLogsServiceRequest()
    logs.resource_logs.add().scope_logs.add().log_records.add().body.string_value = "hello"
    return bytes(logs.SerializeToString())


def call(running: Ingest, method: str, body: bytes) -> bytes:
    """One call over gRPC, compressed as the Java agent does not, but others do."""
    with grpc.insecure_channel(running.grpc) as channel:
        answer: bytes = channel.unary_unary(method)(
            body, timeout=PATIENCE_S, compression=grpc.Compression.Gzip
        )
        return answer


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ingest]:
    """A receiver that refuses both."""
    home = tmp_path_factory.mktemp("ingest")
    with ingest(home, *QUICK, "--metrics", "refuse", "--logs", "refuse") as running:
        yield running


def test_metrics_and_logs_are_discarded_with_one_notice_each(tmp_path: Path) -> None:
    """Success in the signal's own response, counted by signal; the log says it once."""
    with ingest(tmp_path / "home", *QUICK) as running:
        for signal, response in ANSWERS.items():
            path, body = f"/v1/{signal}", body_of(signal)
            answer = running.post(body, path=path)
            assert (answer.status, answer.headers["content-type"]) == (200, PROTOBUF)
            assert response.FromString(answer.body) == response()
            answer = running.post(b'{"resource":[]}', JSON, path)
            assert (answer.status, answer.json()) == (200, {})
            assert response.FromString(call(running, METHODS[signal], body)) == response()
        until(lambda: running.status()["discarded_requests"] == {"metrics": 3, "logs": 3})
        assert running.status()["refused_requests"] == {}
        assert running.metric('discarded_requests_total{signal="logs"}') == 3
        for signal in ANSWERS:
            assert running.stderr().count(f"{signal} are answered with success") == 1
            assert f"OTEL_{signal.upper()}_EXPORTER=none" in running.stderr()
        assert running.spans() == []


def test_what_is_discarded_has_the_limits_of_all_requests(tmp_path: Path) -> None:
    """A token and a size: nobody sends without end because nothing is kept."""
    options = ("--max-body-mb", "1", "--token", "sesame")
    with local_ingest(tmp_path / "home", *QUICK, *options) as running:
        path = "/v1/metrics"
        assert running.post(b"", path=path).status == 401
        right = "Bearer sesame"
        assert running.post(bytes(MIB + 1), path=path, authorization=right).status == 413
        assert running.post(bytes(MIB), path=path, authorization=right).status == 200


@pytest.mark.parametrize("content_type", [PROTOBUF, JSON])
@pytest.mark.parametrize("path", ["/v1/logs", "/v1/metrics", "/v1development/profiles"])
def test_refused_over_http(refusing: Ingest, path: str, content_type: str) -> None:
    """404 with a Status that says what to do, in the content type of the request."""
    answer = refusing.post(b"{}", content_type, path)
    assert (answer.status, answer.headers["content-type"]) == (404, content_type)
    if content_type == JSON:
        message = answer.json()["message"]
    else:
        message = Status.FromString(answer.body).message
    assert "not supported" in message


@pytest.mark.parametrize(
    ("signal", "method"), [*METHODS.items(), ("profiles", PROFILES)], ids=[*METHODS, "profiles"]
)
def test_refused_over_grpc(refusing: Ingest, signal: str, method: str) -> None:
    """UNIMPLEMENTED, and the message says what to do."""
    with pytest.raises(grpc.RpcError) as caught:
        call(refusing, method, b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert f"{signal} are not supported" in caught.value.details()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--logs", "forward"), "logs.*export_logs"),
        (("--logs", "keep"), "logs.*discard or refuse or forward"),
        (("--metrics", "forward"), "metrics.*discard or refuse"),
    ],
)
def test_modes_that_cannot_be(tmp_path: Path, options: tuple[str, str], message: str) -> None:
    """The command ends and says what is allowed; logs are forwarded only where a topic is set."""
    code, _, errors = run_here("ingest", "--home", str(tmp_path), *options)
    assert code == 1
    assert re.search(message, errors), errors


def test_settings_say_what_is_allowed() -> None:
    """For a receiver that is started by a program."""
    with pytest.raises(ConfigError, match="discard or refuse"):
        ReceiverSettings(metrics="forward")


def test_a_decoder_that_does_not_exist_ends_the_command_at_once(tmp_path: Path) -> None:
    """Before it says that it receives anything."""
    with decoding_in("fast"):
        code, out, errors = run_here("ingest", "--home", str(tmp_path), "--http-port=0")
    assert (code, out) == (1, "")
    assert "BATCHMILL_DECODER='fast' is not valid" in errors
