"""Settings of ``batchmill run``: where they come from, and what is said of those that are wrong."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import ssl
import sys
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path
from typing import Any

import pytest

from batchmill.alerts import AlertRulesError
from batchmill.cli import main
from batchmill.errors import ConfigError
from batchmill.run import (
    SETTINGS,
    ConfigFileError,
    Home,
    RunSettings,
    UnknownSettingError,
    load_settings,
    resolve,
)
from batchmill.run.checks import check_settings
from batchmill.run.specs import (
    alerts_spec,
    demo_spec,
    export_names,
    export_spec,
    ingest_spec,
    pipeline_spec,
    web_spec,
    with_ports,
)
from tests.kit.files import ROOT
from tests.kit.processes import Life
from tests.kit.servers.certificates import client_of, write_authority
from tests.kit.threads import WAIT_S


def settings(
    file: dict[str, Any] | None = None,
    environ: dict[str, str] | None = None,
    flags: dict[str, Any] | None = None,
) -> RunSettings:
    """What comes of these."""
    return resolve(file, "batchmill.toml", environ or {}, flags or {})


def show(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *given: str
) -> tuple[int, str, str]:
    """Run the command; exit code, output and errors."""
    monkeypatch.setattr(sys, "argv", ["batchmill", "config", "show", *given])
    code = main()
    said = capsys.readouterr()
    return code, said.out, said.err


def test_flags_go_before_variables_before_the_file_before_defaults() -> None:
    """And each value knows where it comes from."""
    file = {"http_port": 1, "grpc_port": 1, "trigger": 7}
    resolved = settings(
        file, {"BATCHMILL_HTTP_PORT": "2", "BATCHMILL_GRPC_PORT": "2"}, {"http_port": "3"}
    )
    origins = {name: (resolved[name], resolved.values[name].origin) for name in (*file, "bind")}
    assert origins == {
        "http_port": (3, "--http-port"),
        "grpc_port": (2, "BATCHMILL_GRPC_PORT"),
        "trigger": (7.0, "batchmill.toml"),
        "bind": ("127.0.0.1", "default"),
    }


@pytest.mark.parametrize(
    ("file", "environ", "message"),
    [
        (
            {"htpp_port": 1},
            {},
            "batchmill.toml: there is no setting htpp_port; did you mean http_port",
        ),
        ({}, {"BATCHMILL_GRPC_PROT": "1"}, "did you mean BATCHMILL_GRPC_PORT"),
        ({"zzzzzz": 1}, {}, "batchmill config show"),
    ],
)
def test_an_unknown_name_is_an_error_that_knows_the_nearest(
    file: dict[str, Any], environ: dict[str, str], message: str
) -> None:
    """In the file and in the environment."""
    with pytest.raises(UnknownSettingError) as caught:
        settings(file, environ)
    assert message in str(caught.value)


def test_web_is_a_switch_and_a_table() -> None:
    """`web = false`, or `[web]` with the port in it."""
    assert settings({"web": False})["web"] is False
    resolved = settings({"web": {"port": 81}})
    assert (resolved["web"], resolved["web_port"]) == (True, 81)


def test_variables_of_others_are_left_alone() -> None:
    """The tests' own, an empty one, and whatever has another prefix."""
    settings({}, {"BATCHMILL_SOAK": "3", "BATCHMILL_BIND": "", "PATH": "/bin", "BATCH": "x"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("http_port", 70_000), ("http_port", "x"), ("http_port", True), ("http_port", 1.5),
        ("trigger", -1), ("trigger", "nan"), ("trigger", []), ("insecure", "maybe"),
        ("dedup", "10"), ("dedup", ""), ("oal", 3), ("oal", [1]), ("bind", ""), ("bind", {"a": 1}),
        ("ttl_days", 0), ("home", 5),
    ],
)  # fmt: skip
def test_a_value_that_is_none_is_refused_by_name(name: str, value: Any) -> None:
    """With what it may be."""
    with pytest.raises(ConfigError, match=f"batchmill.toml: {name}=.*must be"):
        settings({name: value})


def test_a_secret_is_never_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Not where it is listed, and not where it is wrong."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "batchmill.toml").write_text('token = "s3cret"\n')
    for form in ((), ("--json",)):
        code, out, _ = show(monkeypatch, capsys, *form)
        assert code == 0
        assert "s3cret" not in out
        assert "(hidden)" in out
    (tmp_path / "batchmill.toml").write_text('token = ["s3cret"]\n')
    code, out, err = show(monkeypatch, capsys)
    assert code == 2
    assert "s3cret" not in out + err
    assert "token" in err


def test_show_prints_values_and_origins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """All of them, as text and as JSON."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BATCHMILL_MASTER", "local[2]")
    code, out, _ = show(monkeypatch, capsys, "--http-port", "0")
    lines = {line.split()[0]: line.split()[1:] for line in out.splitlines()}
    assert code == 0
    assert lines.keys() == {setting.name for setting in SETTINGS}
    assert lines["master"] == ['"local[2]"', "BATCHMILL_MASTER"]
    assert lines["http_port"] == ["0", "--http-port"]
    printed = json.loads(show(monkeypatch, capsys, "--json")[1])
    assert printed["master"] == {"value": "local[2]", "from": "BATCHMILL_MASTER"}


def test_paths_of_a_file_are_looked_for_beside_it(tmp_path: Path) -> None:
    """Those of flags and variables in the current folder."""
    file = tmp_path / "mill.toml"
    file.write_text('home = "data"\noal = ["a.oal", "/b.oal"]\n')
    loaded = load_settings({}, str(file), {"BATCHMILL_TLS_CERT": "c.pem"})
    assert loaded["home"] == str(tmp_path / "data")
    assert loaded["oal"] == (str(tmp_path / "a.oal"), "/b.oal")
    assert loaded["tls_cert"] == "c.pem"
    assert load_settings({}, None, {"BATCHMILL_CONFIG": str(file)})["home"] == loaded["home"]


@pytest.mark.parametrize("content", [b"home = ", b"\xff\xfe", None])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    """Broken, no text, or not there though it was named."""
    file = tmp_path / "mill.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigFileError, match=r"mill\.toml cannot be read"):
        load_settings({}, str(file), {})


def test_processes_are_started_as_the_settings_say(tmp_path: Path) -> None:
    """The token goes where other users of the machine cannot see it."""
    resolved = settings({"token": "s3 c/ret", "dedup": "off", "conf": ["a=b"], "insecure": True})
    home = Home(tmp_path)
    ingest, pipeline = ingest_spec(resolved, home), pipeline_spec(resolved, home)
    assert "s3 c/ret" not in " ".join((*ingest.arguments, *pipeline.arguments))
    assert ingest.environment == {"BATCHMILL_TOKEN": "s3 c/ret"}
    assert "--insecure" in ingest.arguments
    assert "--dedup" not in pipeline.arguments
    assert "--conf a=b" in " ".join(pipeline.arguments)
    assert f"--store sqlite:///{tmp_path}/metrics.db" in " ".join(pipeline.arguments)
    assert "--no-span-events" not in ingest.arguments
    without = ingest_spec(settings({"keep_spans": "off"}), home).arguments
    assert "--no-span-events" in without, "only kept spans need them"
    demo = demo_spec(resolved, "0.0.0.0:99", 60.0, 7)
    assert demo.arguments[:3] == ["demo", "--endpoint", "http://127.0.0.1:99"]
    assert demo.environment == {"OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20s3%20c/ret"}
    with pytest.raises(ConfigError, match="--demo"):
        check_settings(settings({"tls_cert": "x"}), demo=True)


def test_addresses_of_receivers_of_alerts_are_no_secret_for_others(tmp_path: Path) -> None:
    """They go where other users of the machine cannot see them, and are not shown."""
    url = "https://user:pw@host/hook"
    resolved = settings({"alerts_to": [url], "alerts_headers": ["Authorization=Bearer t"]})
    spec = alerts_spec(resolved, Home(tmp_path), "alerts.toml", 15.0)
    assert url not in " ".join(spec.arguments)
    assert spec.environment == {
        "BATCHMILL_ALERTS_TO": url,
        "BATCHMILL_ALERTS_HEADERS": "Authorization=Bearer t",
    }
    assert resolved.values["alerts_to"].shown() == "(hidden)"
    with pytest.raises(ConfigError, match="alertmanager"):
        settings({"alerts_to": ["ftp://host"]})


def test_alert_rules_are_checked_before_anything_is_started(tmp_path: Path) -> None:
    """A file that is wrong ends the run at once."""
    (tmp_path / "alerts.toml").write_text("rule = [{name = 'a'}]")
    with pytest.raises(AlertRulesError, match="expression is missing"):
        check_settings(settings({"alerts": str(tmp_path / "alerts.toml")}), demo=False)


def test_strangers_are_refused_before_anything_is_started() -> None:
    """An address that others reach takes a token, a certificate or a clear word."""
    with pytest.raises(ConfigError, match=r"bind.*0\.0\.0\.0.*token"):
        check_settings(settings({"bind": "0.0.0.0"}), demo=False)
    check_settings(settings({"bind": "0.0.0.0", "token": "t"}), demo=False)
    check_settings(settings({"bind": "0.0.0.0", "insecure": True}), demo=False)


def test_every_child_takes_what_it_is_given(tmp_path: Path) -> None:
    """The commands that exist know all the options they are started with."""
    from batchmill.cli import _parser

    given = {"max_body_mb": 1, "max_connections": 1, "request_timeout": 1, "token_file": "t"}
    given |= {f"unread_{level}_mb": 1 for level in ("warning", "critical", "critical_plus")}
    given |= {"metrics_port": 9465, "insecure": True, "ingest_processes": 2}
    resolved = settings({**given, "tls_cert": "c", "tls_key": "k", "tls_client_ca": "a"})
    home = Home(tmp_path)
    alerts = alerts_spec(resolved, home, "alerts.toml", 5.0)
    for spec in (ingest_spec(resolved, home), pipeline_spec(resolved, home), alerts):
        _parser().parse_args(list(spec.arguments))
    _parser().parse_args(list(demo_spec(settings(), "h:1", 60.0, 1).arguments))
    _parser().parse_args(list(demo_spec(settings(), "h:1", float("inf"), None).arguments))


def test_a_port_that_was_free_is_kept(tmp_path: Path) -> None:
    """Senders know it: the next life of ingest has the same one."""
    spec = ingest_spec(settings({"http_port": 0, "grpc_port": 0}), Home(tmp_path))
    arguments = " ".join(with_ports(spec, {"http": "127.0.0.1:99", "grpc": "[::1]:98"}).arguments)
    assert "--http-port 99 --grpc-port 98" in arguments
    assert "--http-port 0" in " ".join(with_ports(spec, {}).arguments)


def test_a_run_hands_on_who_may_look(tmp_path: Path) -> None:
    """As for ingest; the token is on no command line."""
    home = Home(tmp_path)
    given = {"token": "secret", "bind": "0.0.0.0", "web_port": 81, "tls_cert": "c", "tls_key": "k"}
    resolved = settings(given)
    spec = web_spec(resolved, home)
    words = list(spec.arguments)
    assert words[:5] == ["web", "--home", str(tmp_path), "--port", "81"]
    for option, value in (("--bind", "0.0.0.0"), ("--tls-cert", "c"), ("--tls-key", "k")):
        assert words[words.index(option) + 1] == value
    assert spec.environment == {"BATCHMILL_TOKEN": "secret"}
    assert not any("secret" in word for word in words)
    assert not spec.essential


def test_the_web_ui_knows_whether_names_keep_their_ids(tmp_path: Path) -> None:
    """As the pipeline does: kept spans are looked for by the names that metrics have."""
    home = Home(tmp_path)
    assert "--keep-names" not in web_spec(settings({}), home).arguments
    assert "--keep-names" in web_spec(settings({"keep_names": True}), home).arguments


def test_the_next_life_has_the_port_of_the_first(tmp_path: Path) -> None:
    """So that a page that is open finds it again."""
    spec = web_spec(settings({"web_port": 0}), Home(tmp_path))
    spec = with_ports(spec, {"address": "http://[::1]:4711"})
    words = list(spec.arguments)
    assert words[words.index("--port") + 1] == "4711"


def test_prometheus_needs_no_outbox(tmp_path: Path) -> None:
    """In ``[export]`` such targets stand beside others; alone, they need no outbox."""
    alone = ("prometheus://127.0.0.1:9464", "remote+http://127.0.0.1:9090/api/v1/write")
    both = (*alone, "otlp+http://127.0.0.1:4318")
    home = Home(tmp_path)
    for targets, has_outbox in ((alone, False), (both, True), ((), False)):
        resolved = settings({"export": {"to": list(targets)}})
        assert resolved["export_to"] == targets
        assert ("--outbox" in pipeline_spec(resolved, home).arguments) == has_outbox


def test_the_token_of_exporters_is_on_no_command_line(tmp_path: Path) -> None:
    """A token in ``[export]`` goes to the exporter by its environment, where nobody sees it."""
    target = "prometheus://127.0.0.1:9464"
    resolved = settings({"export": {"to": target, "token": "s3cret"}})
    spec = export_spec(resolved, Home(tmp_path), "export", target)
    assert spec.environment == {"BATCHMILL_EXPORT_TOKEN": "s3cret"}
    assert "s3cret" not in " ".join(spec.arguments)


def test_every_process_has_a_page_for_prometheus(tmp_path: Path) -> None:
    """The pipeline's at ``metrics_port``, then exporters without a page of their own; all with the
    access of ingest, and the token in the environment.
    """
    targets = ["otlp+http://a:4318", "prometheus://127.0.0.1:9464", "kafka://b:9092/t"]
    given = {"metrics_port": 9465, "bind": "0.0.0.0", "token": "s3cret", "tls_cert": "c.pem"}
    resolved = settings({**given, "export": {"to": targets}})
    home = Home(tmp_path)
    names = export_names(targets)
    specs = [export_spec(resolved, home, *pair) for pair in zip(names, targets, strict=True)]
    pages = {}
    for spec in (pipeline_spec(resolved, home), *specs):
        arguments = " ".join(spec.arguments)
        assert "s3cret" not in arguments
        if port := re.search(r"--metrics-port (\d+)", arguments):
            pages[spec.name] = int(port[1])
            assert "--metrics-bind 0.0.0.0" in arguments
            assert "--metrics-tls-cert c.pem" in arguments
            assert spec.environment["BATCHMILL_TOKEN"] == "s3cret"
    assert pages == {"pipeline": 9465, "export": 9466, "export-3": 9468}
    without = pipeline_spec(settings(), home)
    assert "--metrics" not in " ".join(without.arguments)


def test_the_security_page_says_which_token_opens_which_port(tmp_path: Path) -> None:
    """As the processes get it: a run has one token for its own listeners, and one for exporters."""
    page, home = "prometheus://127.0.0.1:9464", Home(tmp_path)
    given = {"metrics_port": 9465, "token": "own", "export": {"to": page, "token": "exporter's"}}
    resolved = settings(given)
    specs = {
        "OTLP": ingest_spec(resolved, home),
        "web UI": web_spec(resolved, home),
        "`metrics_port`": pipeline_spec(resolved, home),
        "`prometheus://": export_spec(resolved, home, "export", page),
    }
    text = (ROOT / "SECURITY.md").read_text("utf-8")
    for port, spec in specs.items():
        [name] = re.findall(rf"^\| {re.escape(port)}[^|]*\|[^|]*\| `(\w+)` \|", text, re.MULTILINE)
        assert [*spec.environment.values()] == [resolved[name]], port


def test_a_page_that_is_scraped_has_the_certificates_of_a_run(tmp_path: Path) -> None:
    """Who asks in the clear, or without a certificate that the run accepts, gets no page; an
    exporter that sends has no use for them.
    """
    write_authority(tmp_path)
    names = {"tls_cert": "server.pem", "tls_key": "server.key", "tls_client_ca": "ca.pem"}
    given = {name: str(tmp_path / file) for name, file in names.items()}
    page, sending = "prometheus://127.0.0.1:0", "otlp+http://a:4318"
    resolved = settings({**given, "export": {"to": [page, sending], "token": "s3cret"}})
    home = Home(tmp_path / "home")
    home.prepare()
    assert "--tls-cert" not in export_spec(resolved, home, "export-2", sending).arguments
    spec = export_spec(resolved, home, "export", page)
    command = [sys.executable, "-m", "batchmill", *spec.arguments]
    with Life(command, tmp_path / "errors", {**os.environ, **spec.environment}) as life:
        life.must_hear(r".*https://127\.0\.0\.1:\d+/metrics.*")
        address = re.search(r"(127\.0\.0\.1):(\d+)", life.lines[-1])
        assert address is not None
        place = address[1], int(address[2])

        def status(link: http.client.HTTPConnection) -> int:
            with contextlib.closing(link):
                link.request("GET", "/healthz")
                return link.getresponse().status

        for name in (None, "stranger"):
            with pytest.raises((ssl.SSLError, ConnectionError)):
                status(HTTPSConnection(*place, timeout=WAIT_S, context=client_of(tmp_path, name)))
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            status(HTTPConnection(*place, timeout=WAIT_S))
        trusted = client_of(tmp_path, "client")
        assert status(HTTPSConnection(*place, timeout=WAIT_S, context=trusted)) == 200


@pytest.mark.parametrize(
    "target", ["prometheus://h:1/elsewhere", "remote+http://me:s3cret@h/w", "remote+http://"]
)
def test_an_address_that_is_not_valid_is_refused(target: str) -> None:
    """An address that is none, or that holds a login, is refused before anything is started."""
    with pytest.raises(ConfigError, match="export_to"):
        settings({"export": {"to": target}})
