"""``batchmill pipeline`` and ``batchmill backfill``: what they say, and how they end."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import pty
import signal
import sqlite3
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from batchmill.cli import main
from batchmill.cli.pipeline import (
    add_parser,
    add_pipeline_options,
    error_line,
    pipeline_arguments,
)
from batchmill.run import Home, load_settings, pipeline_spec
from batchmill.spark import BatchReport
from batchmill.store import open_store
from tests.kit.jvm import java_missing, jvm_options
from tests.kit.pipelines import (
    SMALL,
    differences,
    endpoint_events,
    expected_of,
    pipeline,
    sqlite,
    stored,
    write_segment,
)
from tests.kit.processes import Life
from tests.kit.threads import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(java_missing() is not None, reason=java_missing() or ""),
]

ROWS = endpoint_events(60, start=datetime(2020, 1, 1, tzinfo=UTC))
SEGMENTS = 6


def segments(folder: Path, count: int = SEGMENTS) -> None:
    """The rows in so many segments."""
    for number in range(count):
        write_segment(folder, "Endpoint", ROWS[number::count], str(number), number)


def arguments(folder: Path, command: str, *more: str) -> list[str]:
    """A command on the parts in ``folder``, one segment a batch."""
    script = folder / "metrics.oal"
    script.write_text(SMALL)
    places = {"oal": script, "spool": folder / "spool", "checkpoint": folder / "checkpoint"}
    options = {**places, "store": sqlite(folder), "batch-files": 1, "master": "local[2]"}
    return [command, *(f"--{name}={value}" for name, value in options.items()), *more]


def batchmill(monkeypatch: pytest.MonkeyPatch, *given: str) -> int:
    """Run the command in this process, on the session that there is; the exit code."""
    monkeypatch.setattr(sys, "argv", ["batchmill", *given])
    return main()


def backfill_cut_short(spark: SparkSession, folder: Path) -> None:
    """A backfill of ``old`` that fails after its first batch."""

    def fail(report: BatchReport) -> None:
        raise KeyError("pulled the plug")

    with (
        pipeline(spark, folder, oal=SMALL) as running,
        pytest.raises(KeyError, match="pulled the plug"),
    ):
        running.backfill(folder / "old", on_batch=fail)


@pytest.mark.system
def test_the_bar_of_a_resumed_backfill_reaches_its_end(
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What an earlier run put in counts as done; repeated once more, it says that all is in."""
    segments(tmp_path / "old", 1)
    backfill_cut_short(spark, tmp_path)
    for number in (1, 2):
        write_segment(tmp_path / "old", "Endpoint", ROWS[:5], str(number), number)
    (tmp_path / "old" / "Endpoint" / ".3.parquet").write_bytes(b"being written")
    command = arguments(tmp_path, "backfill", str(tmp_path / "old"))
    assert batchmill(monkeypatch, *command) == 0
    said = capsys.readouterr().out
    assert "batch 0: in the store already" in said
    assert "3/3" in said
    assert said.splitlines()[-1] == "10 rows added from 2 segments"
    assert batchmill(monkeypatch, *command) == 0
    said = capsys.readouterr().out
    assert "3/3" in said
    assert said.splitlines()[-1].endswith("segments (3) are in the store already")


@pytest.mark.system
def test_the_bar_moves_on_a_terminal(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From what is in already, batch by batch, to the end."""
    segments(tmp_path / "old", 1)
    backfill_cut_short(spark, tmp_path)
    write_segment(tmp_path / "old", "Endpoint", ROWS[:5], "1", 1)
    monkeypatch.setenv("TERM", "xterm")
    with terminal(monkeypatch) as shown:
        code = batchmill(monkeypatch, *arguments(tmp_path, "backfill", str(tmp_path / "old")))
    text = shown.getvalue().decode()
    assert code == 0
    assert text.index("1/2") < text.index("2/2")
    assert "0/2" not in text


@contextlib.contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.BytesIO]:
    """A terminal as the standard output, and what it is shown."""
    master, slave = pty.openpty()
    shown = io.BytesIO()

    def read() -> None:
        with contextlib.suppress(OSError):  # how Linux says that nobody writes any more
            while some := os.read(master, 65536):
                shown.write(some)

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(slave, "w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        yield shown
    reader.join()
    os.close(master)


def test_a_backfill_says_what_became_of_its_segments(
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nothing was added, since all was set aside or is read by no metric: it says just that."""
    service = endpoint_events(4, start=datetime(2020, 1, 1, tzinfo=UTC))
    write_segment(tmp_path / "old", "Endpoint", service)
    (tmp_path / "old" / "Endpoint" / "0.parquet").rename(tmp_path / "0")
    (tmp_path / "old" / "Service").mkdir()
    (tmp_path / "0").rename(tmp_path / "old" / "Service" / "0.parquet")
    (tmp_path / "old" / "Endpoint" / "broken.parquet").write_bytes(b"no Parquet")
    command = arguments(tmp_path, "backfill", str(tmp_path / "old"))
    assert batchmill(monkeypatch, *command) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == (
        "no rows added from 2 segments; 4 rows of Service, which no metric reads; "
        f"1 segment quarantined in {tmp_path / 'spool-quarantine'}, with the reasons"
    )
    (tmp_path / "empty").mkdir()
    assert batchmill(monkeypatch, *arguments(tmp_path, "backfill", str(tmp_path / "empty"))) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("nothing to add: the folder has no")


def test_a_backfill_adds_to_the_run_of_the_settings_file(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Store and checkpoint are those of its home; what it keeps for 30 days is not expired."""
    home = Home(tmp_path / "shop")
    home.prepare()
    with open_store(sqlite(home.folder)):
        pass  # as a run has made it
    later = endpoint_events(60, start=datetime(2020, 1, 20, tzinfo=UTC))
    write_segment(tmp_path / "old", "Endpoint", ROWS + later)
    (tmp_path / "batchmill.toml").write_text('home = "shop"\nttl_days = 30')
    (tmp_path / "metrics.oal").write_text(SMALL)
    monkeypatch.chdir(tmp_path)
    here = {path.name for path in tmp_path.iterdir()}
    assert batchmill(monkeypatch, "backfill", "old", "--oal=metrics.oal", "--master=local[2]") == 0
    assert differences(stored(home.store_url), expected_of(ROWS + later)) == []
    assert len([*home.checkpoint.glob("backfill-*")]) == 1
    assert {path.name for path in tmp_path.iterdir()} == here


def test_an_error_of_spark_is_one_line(
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With what to do; the details come with --verbose."""
    segments(tmp_path / "spool", 1)
    command = arguments(tmp_path, "pipeline", "--once", "--conf=spark.sql.shuffle.partitions=no")
    assert batchmill(monkeypatch, *command) == 1
    messages = capsys.readouterr().err.splitlines()
    assert len(messages) == 1, messages
    assert "spark.sql.shuffle.partitions" in messages[0]
    assert messages[0].endswith("--verbose shows the details")
    assert batchmill(monkeypatch, *command, "--verbose") == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_error_line_is_short() -> None:
    """Also where an error has much to say, or nothing."""
    assert len(error_line("pipeline", ValueError("x" * 5000 + "\nmore"))) < 600
    assert "failed (ValueError)" in error_line("pipeline", ValueError())


@pytest.mark.parametrize("trigger", ["-1", "nan", "soon", "1e9"])
def test_a_trigger_that_is_none_is_refused(
    trigger: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before Spark is started."""
    with pytest.raises(SystemExit):
        batchmill(monkeypatch, "pipeline", f"--trigger={trigger}")
    assert "a number from 0 on, up to 86400" in capsys.readouterr().err


def process(folder: Path, *command: str) -> Life:
    """A process with a Spark of its own."""
    environment = {
        **os.environ,
        "SPARK_SUBMIT_OPTS": jvm_options(),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    return Life([sys.executable, *command], folder / "log", environment)


@pytest.mark.system
def test_signals_end_every_command_after_its_batch(tmp_path: Path) -> None:
    """Stream, --once and backfill: the exit code and the last line tell, a restart goes on."""
    for folder in ("spool", "old"):
        segments(tmp_path / folder)
    stream = arguments(tmp_path, "pipeline", "--trigger=0")
    backfill = arguments(tmp_path, "backfill", str(tmp_path / "old"))
    ended = "ended; the next run continues from here"
    early = "ended early by {}: run the same command again to continue"
    with process(tmp_path, "-m", "tests.cli.pipeline_process") as life:
        life.must_hear("ready")
        for command, signum, code, last in (
            (stream, signal.SIGTERM, 0, ended),
            ([*stream, "--once"], signal.SIGINT, 130, early.format("SIGINT")),
            (backfill, signal.SIGTERM, 143, early.format("SIGTERM")),
        ):
            life.tell(json.dumps(["hold", *command]))
            life.must_hear(r"commit \d+ begin")
            os.kill(life.pid, signum)
            life.tell("go on")
            life.must_hear(rf"exit {code}")
            assert life.lines[-2] == last
        assert stored(sqlite(tmp_path)) != expected_of(ROWS * 2)
        for command in ([*stream, "--once"], backfill):
            life.tell(json.dumps(command))
            life.must_hear("exit 0")
        assert differences(stored(sqlite(tmp_path)), expected_of(ROWS * 2)) == []

        # A second Ctrl-C does not wait: here for a commit that cannot get in.
        write_segment(tmp_path / "spool", "Endpoint", ROWS, "more", SEGMENTS)
        life.tell(json.dumps(["hold", *stream]))
        life.must_hear(r"commit \d+ begin")
        holder = sqlite3.connect(tmp_path / "metrics.db", isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        life.tell("go on")
        said = (tmp_path / "log").read_text().count(ENDING)
        os.kill(life.pid, signal.SIGINT)
        # Two signals at once may be one to a process: the next only when it has heard this one.
        wait_for_log(tmp_path / "log", ENDING, said + 1)
        os.kill(life.pid, signal.SIGINT)
        life.end(130)
        holder.close()
        log = (tmp_path / "log").read_text()
        assert "stopped at once" in log
        assert "Traceback" not in log
    assert differences(stored(sqlite(tmp_path)), expected_of(ROWS * 2)) == []


ENDING = "ending after the running batch"


def wait_for_log(log: Path, text: str, times: int = 1) -> None:
    """Wait until a log has that text so often."""
    until(lambda: log.read_text("utf-8", "replace").count(text) >= times, text)


@pytest.mark.system
def test_a_pipeline_process_ends_with_sigterm(tmp_path: Path) -> None:
    """As a service manager does it: the batch is finished, the exit code is 0, Spark is gone."""
    segments(tmp_path / "spool")
    left = tmp_path / "its files" / "batchmill-left"
    left.mkdir(parents=True)
    left.with_suffix(".lock").write_text("")
    command = arguments(tmp_path, "pipeline", "--conf=spark.driver.memory=512m")
    command.append(f"--temporary={left.parent}")
    with process(tmp_path, "-m", "batchmill", *command) as life:
        life.must_hear("batch 0: .*")
        # Those of Spark and of its JVM, but for what a killed process has left.
        assert not left.exists()
        assert [*left.parent.glob("batchmill-*/blockmgr-*")]
        os.kill(life.pid, signal.SIGTERM)
        life.end()
        assert life.lines[-1] == "ended; the next run continues from here"
        done = sum(line.startswith("batch ") for line in life.lines)
        assert 0 < done <= SEGMENTS
    rows = [row for number in range(done) for row in ROWS[number::SEGMENTS]]
    assert differences(stored(sqlite(tmp_path)), expected_of(rows)) == []


@pytest.mark.parametrize(
    ("text", "seconds"), [("10m", 600), ("90", 90), ("90s", 90), ("1h", 3600), ("7d", 604_800)]
)
def test_the_command_line_takes_a_time(text: str, seconds: float) -> None:
    """With a unit, or in seconds; and segments stay unless told."""
    given_ = parsed("pipeline", f"--dedup={text}")
    assert (given_["dedup_s"], given_["remove_read"]) == (seconds, False)
    assert parsed("pipeline", "--remove-read") | {"settings": None} == {
        **parsed("pipeline"),
        "remove_read": True,
        "settings": None,
    }


@pytest.mark.parametrize("text", ["", "m", "0", "8d", "1.5m", "-1", "1w", "²s"])
def test_a_time_that_is_none_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With what it may be."""
    with pytest.raises(SystemExit):
        parsed("pipeline", f"--dedup={text}")
    assert "such as 90s, 10m or 1h" in capsys.readouterr().err


def test_a_backfill_removes_nothing() -> None:
    """It is not even offered."""
    assert parsed("backfill", "old", "--dedup=1h")["remove_read"] is False
    with pytest.raises(SystemExit):
        parsed("backfill", "old", "--remove-read")


def parsed(*command: str) -> dict[str, Any]:
    """What a pipeline is made with."""
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    return pipeline_arguments(parser.parse_args(command))


def test_the_limit_of_new_entities_reaches_the_pipeline(tmp_path: Path) -> None:
    """Both settings are options of the pipeline's command, which it turns into its own."""
    pytest.importorskip("pyspark")
    limits = {"max_new_entities": "7", "max_entities": "70"}
    settings = load_settings({**limits, "keep_names": True}, environ={})
    spec = pipeline_spec(settings, Home(tmp_path))
    parser = argparse.ArgumentParser()
    add_pipeline_options(parser)
    given, _ = parser.parse_known_args(spec.arguments)
    made = pipeline_arguments(given)["settings"]
    assert (made.max_new_entities, made.max_entities, made.normalise_names) == (7, 70, False)
    given = parser.parse_args([])
    made = pipeline_arguments(given)["settings"]
    assert (made.max_new_entities, made.max_entities) == (5_000, 1_000_000)
    assert made.normalise_names
