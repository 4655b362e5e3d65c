"""A run with a topic instead of the spool: how it is started, and what its status says."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from batchmill.cli import _parser
from batchmill.errors import ConfigError
from batchmill.run import (
    Backlog,
    Health,
    Home,
    HomeSourceError,
    RunState,
    UnknownSettingError,
    assess,
    resolve,
)
from batchmill.run.checks import check_settings
from batchmill.run.screen import Tables, draw, plain_line
from batchmill.run.specs import export_spec, ingest_spec, pipeline_spec
from batchmill.run.state import read_backlog, topic_backlog
from tests.kit.jvm import java_missing

TOPIC = "kafka://one:9092,two:9092/spans"
NOW = 1_000_000.0


def settings(**table: Any) -> Any:
    """The settings of a file with these."""
    return resolve(table, "batchmill.toml", {}, {})


def test_all_who_talk_to_kafka_get_the_file_and_no_secret(tmp_path: Path) -> None:
    """By its name: what is in it is on no command line, and shown nowhere."""
    file = tmp_path / "kafka.properties"
    file.write_text("sasl.password=s3cret\n")
    resolved = settings(
        kafka=TOPIC,
        kafka_config=str(file),
        export={"to": "kafka://c:3/t", "traces": "kafka://c:3/traces"},
    )
    home = Home(tmp_path)
    ingest, pipeline = ingest_spec(resolved, home), pipeline_spec(resolved, home)
    exporter = export_spec(resolved, home, "export", "kafka://c:3/t")
    for spec in (ingest, pipeline, exporter):
        given = _parser().parse_args(list(spec.arguments))
        assert given.kafka_config == file
        assert "s3cret" not in " ".join((*spec.arguments, *spec.environment.values()))
    assert (
        "--kafka-config" not in export_spec(resolved, home, "export", "otlp+grpc://a:1").arguments
    )
    given = _parser().parse_args(list(ingest.arguments))
    assert (given.to, given.linger, given.segment_rows) == (TOPIC, None, None)
    given = _parser().parse_args(list(pipeline.arguments))
    assert (given.source, given.remove_read) == (TOPIC, False)
    assert "s3cret" not in str([value.shown() for value in resolved.values.values()])


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
    ("changes", "content", "message"),
    [
        ({"kafka_config": "missing"}, "", "a file that can be read"),
        ({}, "acks=0", "batchmill sets it itself"),
        ({}, "security.protocol=tls", "what librdkafka accepts"),
        ({}, "sasl.pasword=s3cret", "what librdkafka accepts"),
        ({"unread_critical_mb": 7}, "", "left out with kafka"),
    ],
)
def test_what_cannot_work_is_reported_before_anything_starts(
    tmp_path: Path, changes: dict[str, Any], content: str, message: str
) -> None:
    """A file that is not there, or says what nobody takes; settings of a spool."""
    if java_missing() is not None:
        pytest.skip(java_missing() or "")
    file = tmp_path / "kafka.properties"
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        check_settings(
            settings(**({"kafka": TOPIC, "kafka_config": str(file)} | changes)), demo=False
        )
    assert message in str(caught.value)


def test_a_folder_belongs_to_one_road(tmp_path: Path) -> None:
    """Spark's books on a spool mean nothing for a topic; brokers may move, though."""
    first, second, third = (Home(tmp_path / name) for name in "abc")
    for home in (first, second, third):
        home.prepare()
    first.bind_source(TOPIC)
    first.bind_source("kafka://elsewhere:1/spans")
    for other in (None, "kafka://one:9092/other"):
        with pytest.raises(HomeSourceError, match=r"the topic spans.*--home"):
            first.bind_source(other)
    second.bind_source(None)
    with pytest.raises(HomeSourceError, match="a spool"):
        second.bind_source(TOPIC)
    third.checkpoint.mkdir()  # as runs before this one left it
    with pytest.raises(HomeSourceError, match="a spool"):
        third.bind_source(TOPIC)


def progress(**changes: Any) -> dict[str, Any]:
    """What the pipeline tells."""
    fields = {"source": TOPIC, "unread_segments": 3, "lag_s": 2.0, "written_at": NOW - 1}
    return fields | changes


def test_the_backlog_is_what_the_pipeline_reported(tmp_path: Path) -> None:
    """Messages, grown older since; as long as it told nothing, that is not known."""
    assert topic_backlog(progress(), NOW) == Backlog(3, 0, 3.0, TOPIC, 1.0)
    assert topic_backlog(progress(unread_segments=0), NOW) == Backlog(0, 0, 0.0, TOPIC, 1.0)
    assert topic_backlog({"source": "/a/spool"}, NOW) is None
    assert read_backlog(Home(tmp_path), {}, NOW, TOPIC).text == "not known yet"
    assert read_backlog(Home(tmp_path), {}, NOW) == Backlog()


def state_with(**changes: Any) -> RunState:
    """A run whose pipeline has reported this of its topic."""
    states = {name: {"state": "running"} for name in ("ingest", "pipeline")}
    report = progress(**changes)
    backlog = topic_backlog(report, NOW)
    assert backlog is not None
    return RunState(
        now=NOW,
        supervised=True,
        supervisor={"written_at": NOW, "processes": states},
        ingest_alive=True,
        progress=report,
        backlog=backlog,
    )


def test_the_view_and_the_status_tell_of_a_topic(tmp_path: Path) -> None:
    """And of no spool."""
    state = state_with()
    assert "| topic 3 messages |" in plain_line(state, 0.0)
    console = Console(record=True, width=200, file=io.StringIO())
    console.print(draw(state, Tables(), 0.0))
    shown = console.export_text()
    assert "3 messages, the oldest 3.0 s old" in shown
    assert "spool" not in shown
    status = assess(Home(tmp_path), state)
    report = status.as_json()
    assert report["topic"] == {"address": TOPIC, "messages": 3, "told_s": 1.0}
    assert "spool" not in report
    assert f"topic      {TOPIC}: 3 messages; lag 3.0 s" in "\n".join(status.lines())


@pytest.mark.parametrize(
    ("changes", "health", "why"),
    [
        ({}, Health.HEALTHY, ""),
        ({"lag_s": 61.0}, Health.DEGRADED, "the oldest message has waited for 62 s"),
        (
            {"written_at": NOW - 11, "unread_segments": 0},
            Health.DEGRADED,
            "has not reported for 11 s",
        ),
    ],
)
def test_health_with_a_topic(changes: dict[str, Any], health: Health, why: str) -> None:
    """Without new reports of the pipeline, nothing is known of the topic."""
    status = assess(Home(Path()), state_with(**changes))
    assert status.health is health
    assert why in " ".join(status.reasons)
