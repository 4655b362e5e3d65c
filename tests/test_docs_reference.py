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
from batchmill.cli import _export, _prometheus, _status, _supervise
from batchmill.cli._run_figures import Picture
from batchmill.cli._run_home import Home
from batchmill.export import (
    _exporter,
    _figures,
    _forward,
    _prometheus_handler,
    _prometheus_page,
    _prometheus_server,
    _values,
)
from batchmill.flows import _stats as flow_stats
from batchmill.ingest import Receiver, _answers, _decode_proto, _decode_rows
from batchmill.ingest import _figures as ingest_figures
from batchmill.queue import _stats as queue_stats
from batchmill.spool import Spool
from batchmill.store import _outbox, _topn, _types, _writers
from tests import docs_settings, docs_sources, docs_stats
from tests.docs_kit import DOCS, code_in, tables

pytest.importorskip("pyspark")

from batchmill.spark import _batch, _dedup, _links, _progress, _schema, _segments

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
    for each in base.__subclasses__():
        yield each
        yield from subclasses(each)


def test_every_error_is_explained() -> None:
    """Each class that batchmill raises on purpose has a line: when, and what to do."""
    for module in pkgutil.walk_packages(batchmill.__path__, "batchmill."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    raised: set[type[BaseException]] = {BatchmillError, *subclasses(BatchmillError)}
    ours = {each for each in raised if each.__module__.startswith("batchmill.")}
    rows = [row for heading in headings(ERRORS) for row in tables(ERRORS, heading)]
    explained = {name: row for row in rows for name in code_in(row["error"])}
    assert explained.keys() == {each.__name__ for each in ours}
    for each in ours - {BatchmillError}:
        also = explained[each.__name__]["also a"]
        for builtin in code_in(also):
            assert builtin.rpartition(".")[2] in {base.__name__ for base in each.__mro__}, each
        assert also or each.__name__ == "StoreError", each


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
    assert status.keys() <= named(COUNTERS, "Receiving", "field")
    page = ingest_figures.prometheus(status)
    series = set(re.findall(r"^# TYPE (\S+)", page, re.MULTILINE))
    shown = named(COUNTERS, "Receiving", "on `/metrics`")
    assert series == {f"batchmill_ingest_{each}" for each in shown}


def test_every_reason_of_the_receiver_is_explained() -> None:
    """Why requests are refused, spans rejected and texts cut."""
    refusals = {
        _refusal(make).reason
        for name, make in inspect.getmembers(_answers, inspect.isfunction)
        if inspect.signature(make).return_annotation == "Refusal" and not name.startswith("_")
    }
    assert named(COUNTERS, "Why a request was refused") == refusals | {"CRITICAL_PLUS"}
    rejected = texts_in(_decode_rows, r'reject\("([^"]+)"') | {"end before start", "no end time"}
    rejected |= texts_in(_decode_proto, r'reject\("([^"]+)"')
    assert named(COUNTERS, "Why a span was rejected") == rejected | {"other"}
    cut = texts_in(_decode_rows, r'cut\("([^"]+)"') | texts_in(_decode_proto, r'cut\("([^"]+)"')
    assert named(COUNTERS, "What was cut") == cut


def _refusal(make: Any) -> _answers.Refusal:
    made = {"level": "CRITICAL", "status": 400, "retry_after_s": 1.0, "seconds": 1.0}
    needed = inspect.signature(make).parameters.values()
    given = [made.get(each.name, "x") for each in needed if each.kind is each.POSITIONAL_OR_KEYWORD]
    refusal = make(*given)
    assert isinstance(refusal, _answers.Refusal)
    return refusal


def test_what_is_handed_on_to_kafka_is_explained() -> None:
    """Each figure, and each reason of a drop."""
    text = inspect.getsource(_forward.KafkaForwarder.figures)
    figures = set(re.findall(r'^ +"(\w+)":', text, re.MULTILINE))
    assert figures == named(COUNTERS, "Traces and logs handed on")
    why = named(COUNTERS, "Traces and logs handed on", "what it is")
    constants = {each for name, each in vars(_forward).items() if name.isupper()}
    said = {each for each in constants if isinstance(each, str) and " " in each}
    assert said >= {_forward.FULL, _forward.NO_ROOM}
    assert said | texts_in(_forward, r'_settle\(.*?"([a-z ]+)"\)') <= why


def test_every_counter_of_the_store_is_explained() -> None:
    """Whatever the pipeline and the exporters count."""
    counted = texts_in(_batch, r'counters\["([^"]+)"') | {"unresolved"}
    counted |= {_types.EXPIRED, _topn.EXPIRED_TOPN, _topn.EXPIRED_STATEMENTS, _outbox.DROPPED}
    counted |= {_figures.EXPORTED, _figures.RETRIES, _figures.VALUES_DROPPED}
    counted |= {_figures.POINTS_REFUSED, _figures.ROWS_DROPPED}
    listed = {
        name
        for row in tables(COUNTERS, "The pipeline")
        if "what it counts" in row
        for name in code_in(row["counter"])
    }
    assert listed == counted
    assert set(_prometheus_page._COUNTED) <= counted
    assert set(_progress._LEFT_OUT) <= counted


def test_every_reason_of_the_pipeline_is_explained() -> None:
    """Why rows, segments, spans and values were left out."""
    reasons = {*_segments._OF_THE_FILE.values(), "corrupt", "wrong type", "unknown source"}
    reasons |= texts_in(_schema, r'"((?:no|time|not) [a-z0-9 ]+)"\)')
    reasons |= texts_in(_links, r"THEN '([a-z ]+)'")
    reasons |= texts_in(_batch, r'"unused", source, "([^"]+)"')
    reasons |= {_dedup.REASON, _types.TOO_OLD, _outbox.FULL, _outbox.LEFT}
    reasons |= {_exporter.FULL, _exporter.GONE, _exporter.UNREADABLE}
    reasons |= {_values.EXPIRED, _values.UNKNOWN}
    assert "parent never came" in reasons
    assert "time too far ahead" in reasons
    assert reasons <= named(COUNTERS, "Why something was left out", "reason")


def test_every_field_of_a_status_is_explained(tmp_path: Path) -> None:
    """`batchmill status --json`, its processes and their states, and progress.json."""
    verdict = _status.Health(0)
    shown = _status.as_json(Home(tmp_path), _status.Seen(Picture(0.0)), verdict)
    assert shown.keys() <= named(COUNTERS, "batchmill status")
    text = inspect.getsource(_supervise)
    figures = set(re.findall(r'^ +"(\w+)": ', text, re.MULTILINE))
    states = {each.value for each in _supervise.State}
    assert figures | states <= named(COUNTERS, "batchmill status", "what it is")
    fields = {each.name for each in dataclasses.fields(_progress.Progress)}
    assert fields <= named(COUNTERS, "progress.json")


def test_every_figure_of_an_exporter_is_explained() -> None:
    """What it tells of itself in its file, and the series on the page for Prometheus."""
    fields = set(re.findall(r'^ +"(\w+)": ', inspect.getsource(_export._Telling), re.MULTILINE))
    for each in (_prometheus._Telling, _prometheus._sent, _prometheus._served):
        fields |= set(re.findall(r'"(\w+)": ', inspect.getsource(each)))
    waiting = {"files", "rows", "bytes", "oldest_ms"}
    assert fields - waiting <= named(COUNTERS, "Exporters", "field")
    assert waiting <= named(COUNTERS, "Exporters", "what it is")
    outcomes = texts_in(_prometheus_handler, r'(?:\)|"|body|count\(),? ?"([a-z ]+)"(?=[,)])') - {
        "replace"
    }
    outcomes |= texts_in(_prometheus_server, r'count\("([^"]+)"')
    assert "too many connections" in outcomes
    assert outcomes <= named(COUNTERS, "The page for Prometheus", "what it is")
    own = texts_in(_prometheus_page, r'f"\{_EXPORT\}(\w+)"') | {"scrapes_total"}
    assert {f"batchmill_export_{each}" for each in own} == named(
        COUNTERS, "The page for Prometheus", "series"
    )


def test_every_reason_of_a_stats_object_is_explained() -> None:
    """Drops of queues and flows, flushes of batchers, fallbacks of writers."""
    dropped = {
        value
        for module in (queue_stats, flow_stats)
        for name, value in vars(module).items()
        if name.isupper() and isinstance(value, str)
    }
    flushes = {each.value for each in FlushReason}
    fallbacks = {_writers.FAILED, _writers.LOST}
    listed = named(COUNTERS, "Stats in a process", "reason")
    assert listed == dropped | flushes | fallbacks | {"rejected", "shed"}


@pytest.mark.parametrize("maker", [docs_settings, docs_sources, docs_stats])
def test_tables_made_from_the_code_are_as_the_code_is(maker: Any) -> None:
    """Where this fails, `python -m` and the module's name writes them anew."""
    _, begin, written = maker.PAGE.read_text("utf-8").partition(maker.BEGIN)
    assert begin
    assert written == maker.made(), f"python -m {maker.__name__}"


def test_every_public_stats_class_has_a_table() -> None:
    """A class called Stats that a package makes public is on the page."""
    public = {
        name
        for package in ("", ".batcher", ".export", ".flows", ".kafka", ".pressure", ".spool")
        for name in importlib.import_module(f"batchmill{package}").__all__
        if name.endswith("Stats")
    }
    assert public <= {each.__name__ for each in docs_stats.STATS}
