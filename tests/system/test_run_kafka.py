"""``batchmill run`` with a topic in the spool's place: how it starts, what it tells, its end."""

from __future__ import annotations

import io
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from batchmill.cli import _parser, status
from batchmill.cli.config import UnknownSettingError, lines, resolve
from batchmill.cli.status import DEGRADED, HEALTHY, Seen, as_json, health
from batchmill.errors import ConfigError
from batchmill.run.check import check
from batchmill.run.figures import Picture, Waiting, read_counted, waiting_of, what_waits
from batchmill.run.home import Home, HomeSourceError, read_json
from batchmill.run.specs import export_spec, ingest_spec, pipeline_spec
from batchmill.run.view import Rates, draw, plain_line
from tests.kit.jvm import java_missing, jvm_options
from tests.kit.kafka import PASSWORD, Broker
from tests.kit.kafka_jars import spark_jars
from tests.kit.pipelines import QUICK_SPARK
from tests.kit.processes import Life
from tests.run.test_run_whole import pid_of, wait_until

TOPIC = "kafka://one:9092,two:9092/spans"
NOW = 1_000_000.0


def settings(**table: Any) -> Any:
    """The settings of a file with these."""
    return resolve(table, "batchmill.toml", {}, {})


def test_all_who_talk_to_kafka_get_the_file_and_no_secret(tmp_path: Path) -> None:
    """By its name: what is in it is on no command line, and shown nowhere."""
    file = tmp_path / "kafka.properties"
    file.write_text("sasl.password=s3cret\n")
    found = settings(
        kafka=TOPIC,
        kafka_config=str(file),
        export={"to": "kafka://c:3/t", "traces": "kafka://c:3/traces"},
    )
    home = Home(tmp_path)
    ingest, pipeline = ingest_spec(found, home), pipeline_spec(found, home)
    exporter = export_spec(found, home, "export", "kafka://c:3/t")
    for each in (ingest, pipeline, exporter):
        given = _parser().parse_args(list(each.arguments))
        assert given.kafka_config == file
        assert "s3cret" not in " ".join((*each.arguments, *each.environment.values()))
    assert "--kafka-config" not in export_spec(found, home, "export", "otlp+grpc://a:1").arguments
    given = _parser().parse_args(list(ingest.arguments))
    assert (given.to, given.linger, given.segment_rows) == (TOPIC, None, None)
    given = _parser().parse_args(list(pipeline.arguments))
    assert (given.source, given.remove_read) == (TOPIC, False)
    assert "s3cret" not in "\n".join(lines(found.chosen.values()))


@pytest.mark.parametrize(
    ("name", "given"),
    [
        *((name, "kafka://me:s3cret@one:9092/spans") for name in ("kafka", "export_traces")),
        ("export_to", "kafka://me:s3cret@one:9092/spans"),
        *((name, {"password": "s3cret"}) for name in ("export_traces", "export_to")),
    ],
)
def test_a_login_where_it_has_no_place_is_not_repeated(name: str, given: Any) -> None:
    """In an address, or in a table that is none."""
    with pytest.raises(ConfigError) as caught:
        settings(**{name: given})
    assert "s3cret" not in str(caught.value)
    assert "kafka://host:port" in str(caught.value)


def test_a_table_of_kafka_has_no_login() -> None:
    """It may hold the file's name, ``config``; a password belongs into that file."""
    with pytest.raises(UnknownSettingError) as caught:
        settings(kafka={"password": "s3cret"})
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "content", "told"),
    [
        ({"kafka_config": "missing"}, "", "a file that can be read"),
        ({}, "acks=0", "batchmill sets it itself"),
        ({}, "security.protocol=sasl_ssl", "one of PLAIN"),
        ({"unread_critical_mb": 7}, "", "left out with kafka"),
    ],
)
def test_what_cannot_go_well_is_told_before_anything_starts(
    tmp_path: Path, changes: dict[str, Any], content: str, told: str
) -> None:
    """A file that is not there, or says what nobody takes; settings of a spool."""
    if java_missing() is not None:
        pytest.skip(java_missing() or "")
    file = tmp_path / "kafka.properties"
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        check(settings(**({"kafka": TOPIC, "kafka_config": str(file)} | changes)), demo=False)
    assert told in str(caught.value)


def test_a_folder_belongs_to_one_road(tmp_path: Path) -> None:
    """Spark's books on a spool mean nothing for a topic; brokers may move, though."""
    first, second, third = (Home(tmp_path / name) for name in "abc")
    for each in (first, second, third):
        each.prepare()
    first.belong_to(TOPIC)
    first.belong_to("kafka://elsewhere:1/spans")
    for other in (None, "kafka://one:9092/other"):
        with pytest.raises(HomeSourceError, match=r"the topic spans.*--home"):
            first.belong_to(other)
    second.belong_to(None)
    with pytest.raises(HomeSourceError, match="a spool"):
        second.belong_to(TOPIC)
    third.checkpoint.mkdir()  # as runs before this one left it
    with pytest.raises(HomeSourceError, match="a spool"):
        third.belong_to(TOPIC)


def progress(**changes: Any) -> dict[str, Any]:
    """What the pipeline tells."""
    told = {"source": TOPIC, "unread_segments": 3, "lag_s": 2.0, "written_at": NOW - 1}
    return told | changes


def test_what_waits_is_what_the_pipeline_told(tmp_path: Path) -> None:
    """Messages, grown older since; as long as it told nothing, that is not known."""
    assert waiting_of(progress(), NOW) == Waiting(3, 0, 3.0, TOPIC, 1.0)
    assert waiting_of(progress(unread_segments=0), NOW) == Waiting(0, 0, 0.0, TOPIC, 1.0)
    assert waiting_of({"source": "/a/spool"}, NOW) is None
    assert what_waits(Home(tmp_path), {}, NOW, TOPIC).text == "not known yet"
    assert what_waits(Home(tmp_path), {}, NOW) == Waiting()


def test_the_view_and_the_status_tell_of_a_topic(tmp_path: Path) -> None:
    """And of no spool."""
    waiting = waiting_of(progress(), NOW)
    assert waiting is not None
    picture = Picture(NOW, waiting=waiting, progress=progress())
    assert "| topic 3 messages |" in plain_line(picture, Rates())
    console = Console(record=True, width=200, file=io.StringIO())
    console.print(draw(picture, Rates()))
    shown = console.export_text()
    assert "3 messages, the oldest 3.0 s old" in shown
    assert "spool" not in shown
    found = Seen(picture, supervised=True, ingest_alive=True)
    told = as_json(Home(tmp_path), found, health(found))
    assert told["topic"] == {"address": TOPIC, "messages": 3, "told_s": 1.0}
    assert "spool" not in told
    text = "\n".join(status.lines(Home(tmp_path), found, health(found)))
    assert f"topic      {TOPIC}: 3 messages; lag 3.0 s" in text


@pytest.mark.parametrize(
    ("changes", "code", "why"),
    [
        ({}, HEALTHY, ""),
        ({"lag_s": 61.0}, DEGRADED, "the oldest message has waited for 62 s"),
        ({"written_at": NOW - 11, "unread_segments": 0}, DEGRADED, "has not told for 11 s"),
    ],
)
def test_health_with_a_topic(changes: dict[str, Any], code: int, why: str) -> None:
    """Who does not hear of it any more does not know."""
    states = {name: {"state": "running"} for name in ("ingest", "pipeline")}
    waiting = waiting_of(progress(**changes), NOW)
    assert waiting is not None
    picture = Picture(NOW, processes=states, waiting=waiting)
    verdict = health(Seen(picture, {"written_at": NOW}, supervised=True, ingest_alive=True))
    assert verdict.code == code
    assert why in " ".join(verdict.reasons)


@pytest.mark.timeout(600)
@pytest.mark.skipif(java_missing() is not None, reason=java_missing() or "")
def test_the_demo_balances_over_a_topic(kafka: Broker, tmp_path: Path) -> None:
    """All processes are the real ones, and ingest is killed once; the broker asks for a login.

    It comes after they have started: they say that they wait, and go on by themselves.
    """
    for needed in ("grpc", "opentelemetry.exporter.otlp.proto.http", "pyspark", "uvicorn"):
        pytest.importorskip(needed)
    home = Home(tmp_path / "home")
    topic = kafka.new_topic(partitions=2)
    kafka.stop()
    conf = {**QUICK_SPARK, "spark.jars": spark_jars()}
    command = [sys.executable, "-m", "batchmill", "run", "--demo=5", f"--home={home.folder}"]
    command += ["--http-port=0", "--grpc-port=0", "--master=local[2]", "--trigger=0.5"]
    command += [f"--kafka=kafka://{kafka.login}/{topic}"]
    command += [f"--kafka-config={kafka.login_file(tmp_path)}"]
    command += [f"--conf={name}={value}" for name, value in conf.items()]
    life = Life(command, tmp_path / "errors", {**os.environ, "SPARK_SUBMIT_OPTS": jvm_options()})
    try:
        life.must_hear("OpenTelemetry: http://127.0.0.1:.*")
        said = home.log / "pipeline.log"
        wait_until(lambda: said.exists() and "when the broker is there" in said.read_text(), 300)
        kafka.start()
        wait_until(lambda: (read_json(home.ingest) or {}).get("acknowledged_spans"), 300)
        os.kill(pid_of(home, "ingest"), signal.SIGKILL)
        life.must_hear(r"ingest died \(SIGKILL\): starting it again in 0.5 s")
        life.must_hear("the demo's traffic is over: .*")
        life.end(0)
    finally:
        life.kill()
    spans = read_counted(home.store_url).spans
    (account,) = [line for line in life.lines if line.startswith("balance: ")]
    assert account.startswith(f"balance: {spans:,} spans sent = {spans:,} acknowledged = {spans:,}")
    assert spans > 0
    assert any("| topic " in line and " messages |" in line for line in life.lines)
    assert not list(home.spool.iterdir())
    told = read_json(home.progress) or {}
    assert (told["unread_segments"], told["source"]) == (0, f"kafka://{kafka.login}/{topic}")
    files = [each for each in home.folder.rglob("*") if each.is_file()]
    assert not [each for each in files if PASSWORD.encode() in each.read_bytes()]
