"""``batchmill export`` as a process: killed, ended, told to forget; and how a run starts it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchmill.cli import _parser
from batchmill.cli.config import UnknownSettingError, resolve
from batchmill.cli.export import forget_others
from batchmill.cli.status import DEGRADED, HEALTHY, Seen, drops, health
from batchmill.errors import ConfigError
from batchmill.export import ExporterInUseError, forget_exporter
from batchmill.run.figures import Picture, exported
from batchmill.run.home import Home, read_json
from batchmill.run.specs import export_names, export_spec, pipeline_spec
from tests.kit.exporters import (
    Mill,
    last_totals,
    measurements,
    mill,
    one,
    running,
    stored,
)
from tests.kit.otlp_receivers import GrpcReceiver, Verdict
from tests.kit.processes import Life
from tests.kit.threads import until

__all__ = ["one"]

PATIENCE_S = 60.0


def command(one: Mill, target: str, *more: str) -> list[str]:
    """The command for a mill's outbox."""
    return [
        *(sys.executable, "-m", "batchmill", "export", "--to", target, "--store", one.store.url),
        *("--checkpoint", str(one.checkpoint), *more),
    ]


@contextlib.contextmanager
def life(given: list[str], folder: Path) -> Iterator[Life]:
    """A process, gone in the end."""
    made = Life(given, folder / "errors", os.environ)
    try:
        yield made
    finally:
        made.kill()


def test_killed_before_the_answer_it_sends_again(one: Mill, tmp_path: Path) -> None:
    """The collector has it, the position is not stored: it comes twice, and is not lost."""
    release = threading.Event()
    with GrpcReceiver(lambda number: Verdict(hold=release)) as receiver:
        one.commit(*measurements(0))
        with life(command(one, receiver.target), tmp_path):
            receiver.wait_for(lambda: receiver.seen == 1)
        release.set()
        assert len(one.store.outbox(one.outbox.place)) == 1
        with life(command(one, receiver.target, "--once"), tmp_path) as again:
            again.end(0)
        first, second = receiver.requests
        assert first.SerializeToString() == second.SerializeToString()
        assert last_totals(receiver.points()) == stored(one.store)
    assert one.files() == []


def test_it_tells_how_it_is_doing_and_ends_in_order(one: Mill, tmp_path: Path) -> None:
    """In a file, each second; SIGTERM ends it with what is in hand sent."""
    status = tmp_path / "status.json"
    with (
        GrpcReceiver() as receiver,
        life(command(one, receiver.target, "--status", str(status)), tmp_path) as process,
    ):
        process.must_hear(f"exporting to {re.escape(receiver.target)} as .*")
        one.commit(*measurements(0))
        until(lambda: (read_json(status) or {}).get("sent_values"), timeout_s=PATIENCE_S)
        os.kill(process.pid, signal.SIGTERM)
        process.end(0)
        assert process.lines[-1].startswith("ended")
    told = read_json(status) or {}
    assert (told["pid"], told["state"]) == (process.pid, "ended")
    assert told["waiting"]["files"] == 0
    assert told["position"] == 1
    assert one.store.counters()["exported values", receiver.target, ""] == told["sent_values"]


def test_it_waits_for_a_pipeline_that_has_not_come_yet(tmp_path: Path) -> None:
    """And tells so; with --once it does not wait."""
    status = tmp_path / "status.json"
    given = [sys.executable, "-m", "batchmill", "export", "--to", "otlp+grpc://127.0.0.1:1"]
    given += ["--store", f"sqlite:///{tmp_path}/store.db", "--checkpoint", f"{tmp_path}/checkpoint"]
    with life([*given, "--status", str(status)], tmp_path) as process:
        process.must_hear("waiting for the pipeline: .*")
        until(lambda: read_json(status), timeout_s=PATIENCE_S)
        made = mill(tmp_path)
        with made.store:
            process.must_hear("exporting to .*")
        os.kill(process.pid, signal.SIGTERM)
        process.end(0)
    again = subprocess.run(
        [*given, "--once", "--checkpoint", f"{tmp_path}/elsewhere"],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert again.returncode == 1
    assert "--outbox" in again.stderr


def test_it_can_be_forgotten(one: Mill, tmp_path: Path) -> None:
    """Nothing waits for it any more."""
    one.store.join_outbox("old", one.outbox.place)
    one.commit(*measurements(0))
    given = command(one, "otlp+grpc://127.0.0.1:1", "--name", "old", "--forget")
    with life(given, tmp_path) as process:
        process.end(0)
    assert one.files() == one.named() == []
    assert one.store.exporters() == []


def test_one_that_runs_is_not_forgotten(one: Mill, tmp_path: Path) -> None:
    """It is told to be stopped first, and goes on; a run leaves it for the next time."""
    with GrpcReceiver() as receiver, running(one.exporter(receiver.target, name="run a")):
        until(one.store.exporters, timeout_s=PATIENCE_S)
        with pytest.raises(ExporterInUseError, match="stop that one first"):
            forget_exporter(one.store, one.outbox, "run a")
        home = Home(tmp_path / "home")
        home.checkpoint.parent.mkdir(parents=True)
        home.checkpoint.symlink_to(one.checkpoint)
        Path(home.store_url.removeprefix("sqlite:///")).symlink_to(tmp_path / "store.db")
        assert forget_others(home, "run ", []) == []
        one.commit(*measurements(0))
        receiver.wait_for(lambda: not one.named())
        assert last_totals(receiver.points()) == stored(one.store)
    assert one.counted("export dropped") == {}


def test_a_run_starts_and_ends_its_exporter(tmp_path: Path) -> None:
    """And its status tells of it; here the pipeline is a stand-in, which makes no outbox."""
    home = Home(tmp_path / "home")
    target = "otlp+grpc://127.0.0.1:1"
    given = [sys.executable, "-m", "tests.run.whole", "--no-web", f"--home={home.folder}"]
    with life([*given, f"--export-to={target}"], tmp_path) as process:
        until(lambda: (read_json(home.export("export")) or {}).get("pid"), timeout_s=PATIENCE_S)
        processes: dict[str, Any] = until(
            lambda: (read_json(home.supervisor) or {}).get("processes", {}), timeout_s=PATIENCE_S
        )
        assert list(processes) == ["ingest", "pipeline", "export"]
        asked = [sys.executable, "-m", "batchmill", "status", f"--home={home.folder}", "--json"]
        answer = subprocess.run(asked, capture_output=True, text=True, check=False)
        told = json.loads(answer.stdout)["exports"]["export"]
        assert (told["target"], told["state"]) == (target, "waiting for the pipeline")
        os.kill(process.pid, signal.SIGTERM)
        process.end(0)
    assert (read_json(home.supervisor) or {})["processes"]["export"]["exit"] == "exit code 0"


def settings(**table: Any) -> Any:
    """The settings of a file with that table ``[export]``."""
    return resolve({"export": table}, "batchmill.toml", {}, {})


def test_the_table_export_starts_exporters_and_an_outbox(tmp_path: Path) -> None:
    """One for each target, by its name; their headers are not on the command line."""
    home = Home(tmp_path)
    found = settings(to=["otlp+grpc://a:1", "kafka://b:2,c:3/t"], headers=["authorization=x y"])
    assert "--outbox" in pipeline_spec(found, home).arguments
    names = export_names(found["export_to"])
    assert names == ["export", "export-2"]
    for name, target in zip(names, found["export_to"], strict=True):
        spec = export_spec(found, home, name, target)
        given = _parser().parse_args(list(spec.arguments))
        assert (given.to, given.name) == (target, f"run {target}")
        assert spec.ready_file == given.status == home.export(name)
        assert "x y" not in " ".join(spec.arguments)
        assert spec.environment == {"BATCHMILL_EXPORT_HEADERS": "authorization=x y"}
    _parser().parse_args(list(pipeline_spec(found, home).arguments))


def test_without_a_target_there_is_no_outbox(tmp_path: Path) -> None:
    """Nothing is written that nobody reads."""
    assert "--outbox" not in pipeline_spec(settings(), Home(tmp_path)).arguments


def test_one_target_may_be_a_text() -> None:
    """In the file, the environment and on the command line; several in one text, with spaces."""
    assert settings(to="otlp+grpc://a")["export_to"] == ("otlp+grpc://a:4317",)
    variable = {"BATCHMILL_EXPORT_TO": "otlp+grpc://a:1 kafka://b:1,c:1/t"}
    found = resolve(None, "batchmill.toml", variable, {})
    assert found["export_to"] == ("otlp+grpc://a:1", "kafka://b:1,c:1/t")
    assert resolve(None, "", {}, {"export_to": ["otlp+http://a:1"]})["export_to"]


def test_what_is_wrong_in_the_table_is_told() -> None:
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
    assert forget_others(home, "run ", ["run b"]) == ["run a"]
    assert [each.exporter for each in one.store.exporters()] == ["mine", "run b"]
    assert forget_others(Home(tmp_path / "nothing"), "run ", []) == []


def told(**changes: Any) -> Picture:
    """A run with an exporter that tells this."""
    states = {name: {"state": "running"} for name in ("ingest", "pipeline", "export")}
    figures = {"target": "otlp+grpc://a:1", "sent_values": 1234, "waiting": {"files": 0}}
    return Picture(1000.0, processes=states, exports={"export": figures | changes})


def test_status_tells_of_an_exporter() -> None:
    """Its figures in a line, its drops by reason."""
    picture = told(
        waiting={"files": 3, "oldest_ms": 988_000}, failing="UNAVAILABLE", dropped={"queue full": 2}
    )
    line = exported(picture.now, picture.exports["export"])
    assert line == (
        "1,234 values sent to otlp+grpc://a:1; 3 files wait, the oldest 12 s; 2 dropped; "
        "failing: UNAVAILABLE"
    )
    assert drops(picture) == {"exported values": {"queue full": 2}}


def test_an_exporter_that_says_nothing_is_not_healthy() -> None:
    """It hangs, or its disk is full."""
    for age, code in ((9.0, HEALTHY), (11.0, DEGRADED)):
        picture = told(written_at=1000.0 - age)
        seen = Seen(picture, {"written_at": picture.now}, supervised=True, ingest_alive=True)
        assert health(seen).code == code


@pytest.mark.parametrize(("failing_s", "code"), [(59.0, HEALTHY), (61.0, DEGRADED)])
def test_a_peer_that_takes_nothing_for_long_is_not_healthy(failing_s: float, code: int) -> None:
    """A moment does not matter: nothing is lost by it."""
    picture = told(failing="UNAVAILABLE: nobody there", failing_s=failing_s)
    seen = Seen(picture, {"written_at": picture.now}, supervised=True, ingest_alive=True)
    verdict = health(seen)
    assert verdict.code == code
    assert ("has taken nothing for 61 s" in " ".join(verdict.reasons)) == (code == DEGRADED)
