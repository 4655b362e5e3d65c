"""What `batchmill run` checks before it starts a process, and what it says."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchmill import ConfigError, MissingExtraError, extras
from batchmill.run import Home, HomeError, RunSettings, checks, resolve
from batchmill.run.checks import check_extras, check_ports, check_settings, check_store
from batchmill.store import NotAStoreError, RetryPolicy, open_store
from tests.kit.processes import Life

pytest.importorskip("pyspark")


def settings(**given: Any) -> RunSettings:
    """The settings of a run, those given and the defaults; any free port unless given."""
    free = {"http_port": 0, "grpc_port": 0}
    return resolve({**free, **given}, "batchmill.toml", {}, {})


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that another process listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_missing_extras_are_named_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One command installs them, and the web UI as well, which would have been missed next."""
    absent = {"rich", "pyspark", "h2", "re2", "requests"}
    monkeypatch.setattr(extras, "_is_installed", lambda package: package not in absent)
    with pytest.raises(MissingExtraError) as caught:
        check_extras(settings(), demo=True)
    assert str(caught.value) == (
        "batchmill run needs the extras 'cli,spark,otlp,demo,web' (rich, pyspark, h2, requests, "
        "re2 are not installed): install them with: "
        "pip install 'batchmill[cli,spark,otlp,demo,web]'"
    )


def test_run_goes_on_without_its_web_ui(monkeypatch: pytest.MonkeyPatch) -> None:
    """That extra alone is no reason to refuse; it is said when the processes start."""
    monkeypatch.setattr(extras, "_is_installed", lambda package: package != "re2")
    check_extras(settings(), demo=False)


@pytest.mark.parametrize(
    ("changes", "extra"),
    [
        ({"kafka": "kafka://one:9092/spans"}, "kafka"),
        ({"export_logs": "kafka://one:9092/logs"}, "kafka"),
        ({"export_to": ["otlp+http://one:4318"]}, "export"),
        ({"alerts": "alerts.yml"}, "alerts"),
        ({"alerts": "alerts.yml", "kafka": "kafka://one:9092/spans"}, "kafka,alerts"),
    ],
)
def test_extras_follow_the_settings(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], extra: str
) -> None:
    """What is not used need not be installed."""
    absent = {"confluent_kafka", "yaml"}
    monkeypatch.setattr(extras, "_is_installed", lambda package: package not in absent)
    check_extras(settings(), demo=False)
    with pytest.raises(MissingExtraError) as caught:
        check_extras(settings(**changes), demo=False)
    assert caught.value.extra == extra


@pytest.mark.parametrize("name", ["token_file", "tls_cert", "tls_key", "kafka_config"])
def test_file_that_cannot_be_read_is_refused(name: str, tmp_path: Path) -> None:
    """The message names the setting and the file."""
    with pytest.raises(ConfigError, match=rf"{name}='.*/none' .* can be read \(No such file"):
        check_settings(settings(**{name: str(tmp_path / "none")}), demo=False)


def test_certificate_that_is_none_is_refused(tmp_path: Path) -> None:
    """A file that is no certificate would keep ingest from starting."""
    file = tmp_path / "cert.pem"
    file.write_text("no certificate")
    with pytest.raises(ConfigError, match="tls_cert"):
        check_settings(settings(tls_cert=str(file), tls_key=str(file)), demo=False)


@pytest.mark.parametrize("name", ["http_port", "grpc_port"])
def test_taken_port_of_ingest_is_refused(name: str, taken: int) -> None:
    """The message names the setting, the port and who has it."""
    with pytest.raises(ConfigError, match=f"{name}={taken} .* another process listens on {taken}"):
        check_ports(settings(**{name: taken}))


@pytest.mark.parametrize("behind", [0, 1, 3], ids=["pipeline", "exporter", "alerts"])
def test_taken_port_of_a_page_is_a_warning(taken: int, behind: int) -> None:
    """Ingest is not kept from starting by it; the message names the port and its setting."""
    given = settings(
        metrics_port=taken - behind,
        export_to=["otlp+http://one:4318", "prometheus://127.0.0.1:0"],
        alerts="alerts.toml",
    )
    expected = rf"no page on port {taken} of .* \(set metrics_port\)"
    assert any(re.match(expected, warning) for warning in check_ports(given))


def test_taken_port_of_an_exporter_is_a_warning(taken: int) -> None:
    """It is tried again, as that of the web UI."""
    [warning] = check_ports(settings(export_to=[f"prometheus://127.0.0.1:{taken}"]))
    assert re.match(rf"no page on port {taken} .* \(set export_to\)", warning)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-name.invalid"])
def test_page_at_an_address_that_is_not_there_yet_is_a_warning(host: str) -> None:
    """An interface may come up, and a name may resolve, after ingest has started."""
    [warning] = check_ports(settings(export_to=[f"prometheus://{host}:9464"]))
    expected = rf"no page on port 9464 of {host} .* does not have that address.*\(set export_to\)"
    assert re.match(expected, warning)


def test_port_that_is_given_twice_is_refused() -> None:
    """It could not be opened twice; the message names both settings."""
    with pytest.raises(ConfigError, match=r"grpc_port=\d+ .* another port than http_port's"):
        check_ports(settings(http_port=4999, grpc_port=4999))


def test_address_of_another_machine_is_refused() -> None:
    """Nothing can listen there: 192.0.2.1 is nobody's."""
    with pytest.raises(ConfigError, match=r"bind='192\.0\.2\.1' .* an address of this machine"):
        check_ports(settings(bind="192.0.2.1", insecure=True))


def test_file_that_is_no_store_is_refused(tmp_path: Path) -> None:
    """It is left as it is."""
    home = Home(tmp_path)
    home.prepare()
    home.database.write_text("no database" * 100)
    with pytest.raises(NotAStoreError):
        check_store(home)


def test_store_is_opened_and_closed_again(tmp_path: Path) -> None:
    """One that is there, or none yet, is right."""
    home = Home(tmp_path)
    home.prepare()
    assert check_store(home) == []
    open_store(home.store_url).close()
    assert check_store(home) == []


def test_store_that_does_not_answer_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Senders are not refused because of it: spans wait until it does."""
    home = Home(tmp_path)
    home.prepare()
    open_store(home.store_url).close()
    monkeypatch.setattr(checks, "_PATIENCE", RetryPolicy(give_up_after_s=0.01))
    monkeypatch.setattr("batchmill.store.sqlite.BUSY_MS", 1)
    with contextlib.closing(sqlite3.connect(home.database)) as other:
        other.execute("PRAGMA locking_mode = EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        [warning] = check_store(home)
    assert "spans are received and wait" in warning
    assert "locked" in warning


@pytest.mark.parametrize("name", ["checkpoint", "quarantine"])
def test_folder_that_holds_no_files_is_refused(tmp_path: Path, name: str) -> None:
    """Such as a file of that name; the message has its path."""
    home = Home(tmp_path)
    home.prepare()
    path: Path = getattr(home, name)
    path.write_text("in the way")
    with pytest.raises(HomeError, match=f"{path.name}"):
        check_store(home)


def test_nothing_is_started_where_a_port_is_taken(tmp_path: Path, taken: int) -> None:
    """The command ends with exit code 2, and no process has left a log."""
    home = Home(tmp_path / "home")
    command = [sys.executable, "-m", "tests.run.run_process", f"--home={home.folder}"]
    with Life([*command, f"--http-port={taken}"], tmp_path / "errors", os.environ) as life:
        life.end(2)
    assert f"batchmill run: http_port={taken} is not valid" in (tmp_path / "errors").read_text()
    assert list(home.log.iterdir()) == []
