"""What a receiver tells of its spool, or topic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from batchmill.ingest.stats import thresholds, with_sink
from batchmill.spool import Level, Measure, Pressure, SinkStats, SpoolStats

MEASURES = (
    Measure("queue rows", 30, 50, 100, 150),
    Measure("queue bytes", 5, 500, 1000, 1500),
)


STATS = SinkStats(
    level=Level.NORMAL,
    submitted_rows=500,
    written_rows=468,
    failed_rows=2,
    refused_rows=0,
    refused={},
    queue_rows=30,
    queue_bytes=5,
)
SPOOL_STATS = SpoolStats(
    **vars(STATS),
    segments=3,
    written_bytes=900,
    unread_segments=1,
    unread_bytes=300,
    oldest_unread_s=2.0,
)


def queue_status(name: str, load: float) -> dict[str, Any]:
    """A queue of the process, which counts something else."""
    return {"name": name, "depth": 3, "threads": [{"name": f"{name}-0", "load": load}]}


def queues(
    reported: list[dict[str, Any]],
    measures: tuple[Measure, ...] = MEASURES,
    stats: SinkStats = STATS,
) -> list[dict[str, Any]]:
    """The queues that the status of a process has."""
    report = with_sink({"queues": reported, "levels": []}, measures, stats)
    shown: list[dict[str, Any]] = report["queues"]
    return shown


def test_what_waits_for_a_spool_is_counted_in_spans() -> None:
    """Against its bound, with the threads of its micro-batcher; other queues follow as they are."""
    other = queue_status("to kafka", 0.5)
    sink, *rest = queues([other, queue_status("spool-Span", 0.1)], stats=SPOOL_STATS)
    assert (sink["name"], sink["unit"]) == ("spool", "spans")
    assert (sink["depth"], sink["capacity"]) == (30, 100)
    assert sink["threads"] == [{"name": "spool-Span-0", "load": 0.1}]
    assert (sink["accepted"], sink["rejected"]) == (500, {"not stored": 2})
    assert rest == [other]


def test_a_spool_is_one_before_its_first_request() -> None:
    """Then it has no micro-batcher yet."""
    (sink,) = queues([], stats=SPOOL_STATS)
    assert (sink["name"], sink["threads"]) == ("spool", [])


def test_a_topic_has_no_thread_of_ours() -> None:
    """Yet what waits for it is told in the same way."""
    pytest.importorskip("confluent_kafka")
    from batchmill.kafka import KafkaStats

    stats = KafkaStats(**vars(STATS), failures={}, messages=9, written_bytes=900)
    (sink,) = queues([], stats=stats)
    assert (sink["name"], sink["depth"], sink["threads"]) == ("topic", 30, [])


def test_a_sink_that_measures_nothing_is_left_out() -> None:
    """The other queues are told."""
    other = queue_status("to kafka", 0.5)
    assert queues([other], ()) == [other]


def test_the_thresholds_of_the_sink_are_not_told_twice() -> None:
    """They are its measures; thresholds of other depths are told."""
    levels = [{"name": "queue rows"}, {"name": "to kafka"}]
    report = with_sink({"queues": [], "levels": levels}, MEASURES, STATS)
    assert report["levels"] == [{"name": "to kafka"}]


def test_free_disk_space_is_shown_where_there_is_a_disk() -> None:
    """Along with what the pipeline has not read."""
    stats = replace(SPOOL_STATS, free_bytes=7 << 30)
    assert thresholds(Pressure(Level.NORMAL), MEASURES, stats)["free_bytes"] == 7 << 30
    assert stats.unread() == {"unread_bytes": 300, "unread_segments": 1}
    assert STATS.unread() == {}


def test_thresholds_say_why() -> None:
    """And have no free bytes where there is no disk."""
    status = thresholds(Pressure(Level.CRITICAL, "too much waits", 1.0), MEASURES, STATS)
    assert (status["level"], status["why"]) == ("CRITICAL", "too much waits")
    assert "free_bytes" not in status
    assert status["measures"][0] == {
        "name": "queue rows",
        "value": 30,
        "warning": 50,
        "critical": 100,
        "critical_plus": 150,
    }
