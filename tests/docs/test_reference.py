"""What the documentation lists is all there is: errors, counters, reasons, fields, event types."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import batchmill
from batchmill import BatchmillError
from batchmill.batcher import FlushReason
from batchmill.cli import export
from batchmill.export import exporter, forwarder, values
from batchmill.export import stats as exporter_stats
from batchmill.export.prometheus import page as prometheus_page_module
from batchmill.export.prometheus import server
from batchmill.flows import stats as flow_stats
from batchmill.ingest import Receiver, responses
from batchmill.ingest import stats as ingest_stats
from batchmill.ingest.decode import protobuf
from batchmill.ingest.decode import rows as decode_rows
from batchmill.queue import stats as queue_stats
from batchmill.run import Home, RunState, StatusFile, assess, supervisor
from batchmill.spool import Spool
from batchmill.store import DOUBTFUL, EXPIRED, OVERFLOW_LABELS, TOO_MANY_LABELS, TOO_OLD
from batchmill.store.sql import outbox, topn
from batchmill.traces import SCHEMA
from batchmill.workers import WorkerSettings, events, l2
from tests.docs import settings, sources, stats, telemetry
from tests.docs.kit import DOCS, code_in, tables
from tests.kit.files import ROOT

pytest.importorskip("pyspark")

from batchmill.aggregate import OVERFLOW, overflow, validity
from batchmill.spans import links
from batchmill.spark.batch import maker, read_step, span_step
from batchmill.spark.input import deltas, rows, segments
from batchmill.spark.runtime import progress

ERRORS = DOCS / "errors.md"
COUNTERS = DOCS / "counters.md"


def named(page: Path, heading: str, column: str = "") -> set[str]:
    """What the tables under a heading name in backticks, in a column; or in the first of each."""
    rows = tables(page, heading)
    cells = (row.get(column, "") if column else next(iter(row.values())) for row in rows)
    return {name for cell in cells for name in code_in(cell)}


def texts_in(module: Any, pattern: str) -> set[str]:
    """What a pattern finds in the text of a module."""
    return set(re.findall(pattern, inspect.getsource(module)))


def subclasses(base: type[BaseException]) -> Iterator[type[BaseException]]:
    """All that inherit from it."""
    for subclass in base.__subclasses__():
        yield subclass
        yield from subclasses(subclass)


def test_every_error_is_explained() -> None:
    """Each class that batchmill raises on purpose has a line: when, and what to do."""
    for module in pkgutil.walk_packages(batchmill.__path__, "batchmill."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    raised: set[type[BaseException]] = {BatchmillError, *subclasses(BatchmillError)}
    ours = {error for error in raised if error.__module__.startswith("batchmill.")}
    rows = [row for heading in headings(ERRORS) for row in tables(ERRORS, heading)]
    explained = {name: row for row in rows for name in code_in(row["error"])}
    assert explained.keys() == {our.__name__ for our in ours}
    for our in ours - {BatchmillError}:
        also = explained[our.__name__]["also a"]
        for builtin in code_in(also):
            assert builtin.rpartition(".")[2] in {base.__name__ for base in our.__mro__}, our
        assert also or our.__name__ == "StoreError", our


def test_every_column_of_kept_spans_is_explained() -> None:
    """In the order of the table, with its type."""
    words = {
        "timestamp[us, tz=UTC]": "timestamp, UTC",
        "map<string, string>": "map of string to string",
    }
    explained = [
        (name, row["type"])
        for row in tables(DOCS / "traces.md", "The table")
        for name in code_in(row.get("column", ""))
    ]
    assert explained == [
        (field.name, words.get(str(field.type), str(field.type))) for field in SCHEMA
    ]


def headings(page: Path) -> list[str]:
    """The second-level headings of a page."""
    return re.findall(r"^## (.*)$", page.read_text("utf-8"), re.MULTILINE)


@pytest.fixture
def status(tmp_path: Path) -> dict[str, Any]:
    """What a receiver tells of itself."""
    with Spool(tmp_path / "spool") as spool:
        return Receiver(spool).status()


def test_every_figure_of_the_receiver_is_explained(status: dict[str, Any]) -> None:
    """Each field of its status, and each series on its page."""
    assert status.keys() <= named(COUNTERS, "Ingest", "field")
    page = ingest_stats.prometheus(status).decode()
    series = set(re.findall(r"^# TYPE (\S+)", page, re.MULTILINE))
    shown = named(COUNTERS, "Ingest", "on `/metrics`")
    assert series == {f"batchmill_ingest_{value}" for value in shown}


def test_every_reason_of_the_receiver_is_explained() -> None:
    """Why requests are refused, spans rejected and texts cut."""
    refusals = {
        _refusal(make).reason
        for name, make in inspect.getmembers(responses, inspect.isfunction)
        if inspect.signature(make).return_annotation == "Refusal" and not name.startswith("_")
    }
    assert named(COUNTERS, "Refused requests") == refusals | {
        "CRITICAL_PLUS",
        responses.DISCONNECTED,
    }
    rejected = texts_in(decode_rows, r'reject\("([^"]+)"') | {
        "end before start",
        "no end time",
    }
    rejected |= texts_in(protobuf, r'reject\("([^"]+)"')
    assert named(COUNTERS, "Rejected spans") == rejected | {"other"}
    cut = texts_in(decode_rows, r'cut\("([^"]+)"') | texts_in(protobuf, r'cut\("([^"]+)"')
    assert named(COUNTERS, "Truncated texts") == cut


def _refusal(make: Any) -> responses.Refusal:
    made = {"level": "CRITICAL", "status": 400, "retry_after_s": 1.0, "seconds": 1.0}
    needed = inspect.signature(make).parameters.values()
    given = [
        made.get(parameter.name, "x")
        for parameter in needed
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    refusal = make(*given)
    assert isinstance(refusal, responses.Refusal)
    return refusal


def test_what_is_handed_on_to_kafka_is_explained() -> None:
    """Each figure, and each reason of a drop."""
    text = inspect.getsource(forwarder.KafkaForwarder.stats)
    figures = set(re.findall(r'^ +"(\w+)":', text, re.MULTILINE))
    assert figures == named(COUNTERS, "Forwarded traces and logs")
    why = named(COUNTERS, "Forwarded traces and logs", "what it is")
    constants = {constant for name, constant in vars(forwarder).items() if name.isupper()}
    said = {constant for constant in constants if isinstance(constant, str) and " " in constant}
    assert said >= {forwarder.FULL, forwarder.NO_ROOM}
    assert said | texts_in(forwarder, r'_settle\(.*?"([a-z ]+)"\)') <= why


def test_every_counter_of_the_store_is_explained() -> None:
    """Whatever the pipeline and the exporters count."""
    counted: set[str] = set()
    for module in (maker, read_step, span_step):
        counted |= texts_in(module, r'counters\["([^"]+)"')
    assert counted >= {"rows", "late", "quarantined segment", "unused", "unresolved", "duplicates"}
    counted |= {DOUBTFUL, EXPIRED, topn.EXPIRED_TOPN, topn.EXPIRED_STATEMENTS, outbox.DROPPED}
    counted |= {exporter_stats.EXPORTED, exporter_stats.RETRIES, exporter_stats.VALUES_DROPPED}
    counted |= {exporter_stats.POINTS_REFUSED, exporter_stats.ROWS_DROPPED}
    counted |= {l2.INVALID, OVERFLOW, OVERFLOW_LABELS}
    listed = {
        name
        for row in tables(COUNTERS, "The pipeline")
        if "what it counts" in row
        for name in code_in(row["counter"])
    }
    assert listed == counted
    assert set(prometheus_page_module._COUNTER_HELP) <= counted
    assert set(progress.LEFT_OUT) <= counted


def test_every_reason_of_the_pipeline_is_explained() -> None:
    """Why rows, segments, spans and values were left out."""
    reasons = {*segments.FILE_FAULTS.values(), "corrupt", "wrong type", "unknown source"}
    reasons |= texts_in(validity, r'"((?:no|time|not) [a-z0-9 ]+)"')
    reasons |= texts_in(rows, r'\("(not [a-z ]+)"') | texts_in(
        deltas, r'UnusableError\("([a-z ]+)"'
    )
    reasons |= texts_in(links, r'"([a-z ]+)": given_up')
    reasons |= texts_in(read_step, r'"unused", source, "([^"]+)"')
    reasons |= texts_in(events, r'"(time: [a-z ]+)"')
    reasons |= {span_step.DUPLICATE, deltas.AHEAD, TOO_OLD, outbox.FULL, outbox.LEFT}
    reasons |= {exporter.FULL, exporter.GONE, exporter.UNREADABLE}
    reasons |= {values.EXPIRED, values.UNKNOWN}
    reasons |= {TOO_MANY_LABELS, overflow.TOO_MANY, overflow.STORE_FULL}
    assert reasons >= {
        "parent never came",
        "no destination",
        "time before 1970",
        "not a message of spans",
        "other metrics",
        "no metric reads it",
    }
    assert reasons <= named(COUNTERS, "Reasons", "reason")


def test_every_field_of_a_status_is_explained(tmp_path: Path) -> None:
    """`batchmill status --json`, its processes and their states, and progress.json."""
    shown = assess(Home(tmp_path), RunState(now=0.0)).as_json()
    assert shown.keys() <= named(COUNTERS, "batchmill status")
    text = inspect.getsource(supervisor)
    figures = set(re.findall(r'^ +"(\w+)": ', text, re.MULTILINE))
    states = {state.value for state in supervisor.State}
    assert figures | states <= named(COUNTERS, "batchmill status", "what it is")
    fields = {field.name for field in dataclasses.fields(progress.Progress)}
    assert fields <= named(COUNTERS, "progress.json")


def test_every_figure_of_an_exporter_is_explained() -> None:
    """What it tells of itself in its file, and the series on the page for Prometheus."""
    fields: set[str] = set()
    for source in (StatusFile, export):
        fields |= set(re.findall(r'"(\w+)": ', inspect.getsource(source)))
    waiting = {"files", "rows", "bytes", "oldest_ms"}
    assert fields - waiting <= named(COUNTERS, "Exporters", "field")
    assert waiting <= named(COUNTERS, "Exporters", "what it is")
    outcomes = {outcome.value for outcome in server.Outcome}
    assert outcomes <= named(COUNTERS, "The Prometheus endpoint", "what it is")
    own = texts_in(prometheus_page_module, r'f"\{_EXPORT\}(\w+)"') | {"scrapes_total"}
    assert {f"batchmill_export_{name}" for name in own} == named(
        COUNTERS, "The Prometheus endpoint", "series"
    )


def test_every_reason_of_a_stats_object_is_explained() -> None:
    """Drops of queues and flows, flushes of batchers."""
    dropped = {
        value
        for module in (queue_stats, flow_stats)
        for name, value in vars(module).items()
        if name.isupper() and isinstance(value, str)
    }
    flushes = {flush_reason.value for flush_reason in FlushReason}
    listed = named(COUNTERS, "Stats in a process", "reason")
    assert listed == dropped | flushes | {"rejected", "shed"}


@pytest.mark.parametrize("maker", [settings, sources, stats, telemetry])
def test_tables_made_from_the_code_are_as_the_code_is(maker: Any) -> None:
    """Where this fails, `python -m` and the module's name writes them anew."""
    _, begin, written = maker.PAGE.read_text("utf-8").partition(maker.BEGIN)
    assert begin
    assert written == maker.made(), f"python -m {maker.__name__}"


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_the_tests_that_a_page_names_exist(page: Path) -> None:
    """Paths of test modules, in full or below ``tests/``."""
    named_tests = re.findall(r"`(?:tests/)?([\w/]*test_\w+\.py)`", page.read_text("utf-8"))
    assert [path for path in named_tests if not (ROOT / "tests" / path).exists()] == []


def test_every_public_stats_class_has_a_table() -> None:
    """A class called Stats that a package makes public is on the page."""
    public = {
        name
        for package in (
            "",
            ".batcher",
            ".export",
            ".flows",
            ".kafka",
            ".pressure",
            ".spool",
            ".telemetry",
            ".workers",
        )
        for name in importlib.import_module(f"batchmill{package}").__all__
        if name.endswith("Stats")
    }
    assert public <= {stat.__name__ for stat in stats.STATS}


def test_every_setting_of_the_workers_is_explained() -> None:
    """By its name, in the table of its page."""
    fields = {field.name for field in dataclasses.fields(WorkerSettings)}
    assert named(DOCS / "embedded.md", "Settings", "setting") == fields
