"""Exporters of a run: how it starts, ends and removes them, and what its status says of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from batchmill.cli import _parser
from batchmill.errors import ConfigError
from batchmill.export import ExporterInUseError, forget_exporter
from batchmill.files import read_json
from batchmill.run import Health, Home, RunState, UnknownSettingError, assess, resolve
from batchmill.run.runner import remove_exporters
from batchmill.run.specs import export_names, export_spec, ingest_spec, pipeline_spec
from batchmill.run.status import export_text
from tests.kit.exporters import Mill, last_totals, measurements, one, running, stored
from tests.kit.otlp import GrpcReceiver
from tests.kit.processes import Life, wait_for_json
from tests.kit.threads import until

__all__ = ["one"]

NOW = 1000.0


def test_one_that_runs_is_not_forgotten(one: Mill, tmp_path: Path) -> None:
    """It is told to be stopped first, and goes on; a run leaves it for the next time."""
    with GrpcReceiver() as receiver, running(one.exporter(receiver.target, name="run a")):
        until(one.store.exporters)
        with pytest.raises(ExporterInUseError, match="stop that one first"):
            forget_exporter(one.store, one.outbox, "run a")
        home = Home(tmp_path / "home")
        home.checkpoint.parent.mkdir(parents=True)
        home.checkpoint.symlink_to(one.checkpoint)
        Path(home.store_url.removeprefix("sqlite:///")).symlink_to(tmp_path / "store.db")
        assert remove_exporters(home, []) == []
        one.commit(*measurements(0))
        receiver.wait_for(lambda: not one.named())
        assert last_totals(receiver.points()) == stored(one.store)
    assert one.counted("export dropped") == {}


@pytest.mark.system
def test_a_run_starts_and_ends_its_exporter(tmp_path: Path) -> None:
    """And its status tells of it; here the pipeline is a stand-in, which makes no outbox."""
    home = Home(tmp_path / "home")
    target = "otlp+grpc://127.0.0.1:1"
    given = [sys.executable, "-m", "tests.run.run_process", "--no-web", f"--home={home.folder}"]
    with Life([*given, f"--export-to={target}"], tmp_path / "errors", os.environ) as process:
        waiting = "waiting for the pipeline"
        until(lambda: wait_for_json(home.export("export"))["state"] == waiting)
        names = ["ingest", "pipeline", "export"]
        until(lambda: list(wait_for_json(home.supervisor, "processes")) == names)
        command = [sys.executable, "-m", "batchmill", "status", f"--home={home.folder}", "--json"]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        report = json.loads(answer.stdout)["exports"]["export"]
        assert (report["target"], report["state"]) == (target, waiting)
        os.kill(process.pid, signal.SIGTERM)
        process.end(0)
    assert (read_json(home.supervisor) or {})["processes"]["export"]["exit"] == "exit code 0"


def settings(**table: Any) -> Any:
    """The settings of a file with that table ``[export]``."""
    return resolve({"export": table}, "batchmill.toml", {}, {})


def test_the_table_export_starts_exporters_and_an_outbox(tmp_path: Path) -> None:
    """One for each target, by its name; their headers are not on the command line."""
    home = Home(tmp_path)
    resolved = settings(to=["otlp+grpc://a:1", "kafka://b:2,c:3/t"], headers=["authorization=x y"])
    assert "--outbox" in pipeline_spec(resolved, home).arguments
    names = export_names(resolved["export_to"])
    assert names == ["export", "export-2"]
    for name, target in zip(names, resolved["export_to"], strict=True):
        spec = export_spec(resolved, home, name, target)
        given = _parser().parse_args(list(spec.arguments))
        assert (given.to, given.name) == (target, f"run {target}")
        assert spec.ready_file == given.status == home.export(name)
        assert "x y" not in " ".join(spec.arguments)
        assert spec.environment == {"BATCHMILL_EXPORT_HEADERS": "authorization=x y"}
    _parser().parse_args(list(pipeline_spec(resolved, home).arguments))


SENDING = {
    "buffer": 500,
    "batch": 50,
    "poll": 0.25,
    "timeout": 3.0,
    "retry_max": 2.0,
    "drain": 1.5,
}


@pytest.mark.parametrize("target", ["otlp+grpc://a:1", "kafka://b:2/t", "remote+http://c:3/write"])
def test_buffers_batches_and_periods_reach_every_exporter_that_sends(
    tmp_path: Path, target: str
) -> None:
    """From the table, under the same names; what is not set keeps the exporter's own default."""
    for table in (SENDING, {}):
        resolved = settings(to=target, **table)
        spec = export_spec(resolved, Home(tmp_path), "export", target)
        given = vars(_parser().parse_args(list(spec.arguments)))
        expected = table or {"buffer": 20_000, "batch": 2_000, "drain": 5.0}
        assert {name: given[name] for name in SENDING if given[name] is not None} == expected


def test_a_page_that_is_scraped_has_nothing_to_send(tmp_path: Path) -> None:
    """The settings of sending are for the other targets."""
    target = "prometheus://127.0.0.1:9464"
    spec = export_spec(settings(to=target, **SENDING), Home(tmp_path), "export", target)
    given = vars(_parser().parse_args(list(spec.arguments)))
    assert {given[name] for name in SENDING} == {None}


def test_a_page_that_is_scraped_gets_the_kept_spans(tmp_path: Path) -> None:
    """For exemplars, as long as spans are kept; exporters that send have no use for them."""
    home = Home(tmp_path)
    for keep, target, folder in (
        ("on", "prometheus://127.0.0.1:9464", home.traces),
        ("off", "prometheus://127.0.0.1:9464", None),
        ("on", "otlp+grpc://a:1", None),
    ):
        table = {"keep_spans": keep, "export": {"to": target}}
        resolved = resolve(table, "batchmill.toml", {}, {})
        spec = export_spec(resolved, home, "export", target)
        assert _parser().parse_args(list(spec.arguments)).traces == folder


def test_the_buffers_of_forwarded_requests_reach_ingest(tmp_path: Path) -> None:
    """Where there is a topic to forward to."""
    resolved = settings(traces="kafka://b:2/t", forward_buffer=7, forward_mb=3)
    given = _parser().parse_args(list(ingest_spec(resolved, Home(tmp_path)).arguments))
    assert (given.export_forward_buffer, given.export_forward_mb) == (7, 3 * 2**20)
    without = settings(forward_buffer=7)
    assert not any(
        word.startswith("--export-forward")
        for word in ingest_spec(without, Home(tmp_path)).arguments
    )


def test_where_a_setting_of_an_exporter_comes_from_is_known() -> None:
    """The file, a variable or a flag, as for every setting."""
    variables = {"BATCHMILL_EXPORT_BATCH": "30"}
    file = {"export": {"buffer": 10, "batch": 20, "poll": 1}}
    resolved = resolve(file, "batchmill.toml", variables, {"export_poll": "2"})
    values = {
        name: resolved.values[f"export_{name}"] for name in ("buffer", "batch", "poll", "drain")
    }
    assert {name: (value.value, value.origin) for name, value in values.items()} == {
        "buffer": (10, "batchmill.toml"),
        "batch": (30, "BATCHMILL_EXPORT_BATCH"),
        "poll": (2.0, "--export-poll"),
        "drain": (5.0, "default"),
    }


@pytest.mark.parametrize(
    ("name", "value"), [("buffer", 0), ("batch", "x"), ("poll", 0), ("drain", -1), ("timeout", "")]
)
def test_a_buffer_or_a_period_of_nothing_is_refused(name: str, value: object) -> None:
    """Before anything is started; the message names the setting and what is allowed."""
    with pytest.raises(ConfigError, match=f"export_{name}.*number"):
        settings(**{name: value})


def test_without_a_target_there_is_no_outbox(tmp_path: Path) -> None:
    """Nothing is written that nobody reads."""
    assert "--outbox" not in pipeline_spec(settings(), Home(tmp_path)).arguments


def test_one_target_may_be_a_text() -> None:
    """In the file, the environment and on the command line; several in one text, with spaces."""
    assert settings(to="otlp+grpc://a")["export_to"] == ("otlp+grpc://a:4317",)
    variable = {"BATCHMILL_EXPORT_TO": "otlp+grpc://a:1 kafka://b:1,c:1/t"}
    resolved = resolve(None, "batchmill.toml", variable, {})
    assert resolved["export_to"] == ("otlp+grpc://a:1", "kafka://b:1,c:1/t")
    assert resolve(None, "", {}, {"export_to": ["otlp+http://a:1"]})["export_to"]


def test_what_is_wrong_in_the_table_is_reported() -> None:
    """A key that there is none of, and a target that is none."""
    with pytest.raises(UnknownSettingError, match=r"export_too.*export_to"):
        settings(too="x")
    with pytest.raises(ConfigError, match="otlp"):
        settings(to="somewhere")


def test_exporters_that_a_run_has_no_more_are_forgotten(one: Mill, tmp_path: Path) -> None:
    """Those of others stay."""
    home = Home(tmp_path)
    assert home.checkpoint == one.checkpoint
    home.database.symlink_to(tmp_path / "store.db")
    for name in ("run a", "run b", "mine"):
        one.store.join_outbox(name, one.outbox.place)
    assert remove_exporters(home, ["b"]) == ["a"]
    assert [exporter.exporter for exporter in one.store.exporters()] == ["mine", "run b"]
    assert remove_exporters(Home(tmp_path / "nothing"), []) == []


def with_exporter(**changes: Any) -> RunState:
    """A run with an exporter that reports this."""
    states = {name: {"state": "running"} for name in ("ingest", "pipeline", "export")}
    report = {"target": "otlp+grpc://a:1", "sent_values": 1234, "waiting": {"files": 0}}
    return RunState(
        now=NOW,
        supervised=True,
        supervisor={"written_at": NOW, "processes": states},
        ingest_alive=True,
        exports={"export": report | changes},
    )


def test_status_tells_of_an_exporter() -> None:
    """Its report in a line, its drops by reason."""
    state = with_exporter(
        waiting={"files": 3, "oldest_ms": 988_000}, failing="UNAVAILABLE", dropped={"queue full": 2}
    )
    assert export_text(state.exports["export"], NOW) == (
        "1,234 values sent to otlp+grpc://a:1; 3 files waiting, the oldest for 12 s; 2 dropped; "
        "failing: UNAVAILABLE"
    )
    assert state.drops() == {"exported values": {"queue full": 2}}


@pytest.mark.parametrize(("age_s", "health"), [(4.0, Health.HEALTHY), (6.0, Health.DEGRADED)])
def test_an_exporter_that_says_nothing_is_not_healthy(age_s: float, health: Health) -> None:
    """It hangs, or its disk is full."""
    assert assess(Home(Path()), with_exporter(written_at=NOW - age_s)).health is health


@pytest.mark.parametrize(("failing_s", "health"), [(59.0, Health.HEALTHY), (61.0, Health.DEGRADED)])
def test_a_peer_that_takes_nothing_for_long_is_not_healthy(
    failing_s: float, health: Health
) -> None:
    """A moment does not matter: nothing is lost by it."""
    state = with_exporter(failing="UNAVAILABLE: nobody there", failing_s=failing_s)
    status = assess(Home(Path()), state)
    assert status.health is health
    degraded = health is Health.DEGRADED
    assert ("has accepted nothing for 61 s" in " ".join(status.reasons)) == degraded
